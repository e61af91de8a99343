"""Where control groups can be made, read from what the kernel says; of version 2 on folders like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.sandbox.base import Limits
from forge.sandbox.cgroups import Cgroup, find_places


def folder(path: Path, **files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in {"cgroup__procs": "", **files}.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def test_version_1_is_found_by_controller_at_our_own_group(tmp_path: Path) -> None:
    own = folder(tmp_path / "memory" / "of" / "ours")
    folder(tmp_path / "pids")
    mounts = "\n".join(
        f"30 29 0:26 / {tmp_path}/{name} rw,relatime shared:9 - cgroup cgroup rw,{name}" for name in ("memory", "pids")
    )
    places = find_places("4:memory:/of/ours\n8:pids:/gone/in/a/container\n0::/\n", mounts)
    assert {name: (place.folder, place.version) for name, place in places.items()} == {
        "memory": (own, 1),
        "pids": (tmp_path / "pids", 1),
    }


def test_version_2_is_found_beside_our_own_group_with_what_is_delegated(tmp_path: Path) -> None:
    slice_ = folder(tmp_path / "user.slice", cgroup__subtree_control="memory pids\n")
    folder(slice_ / "ours.scope")
    mounts = f"30 29 0:26 / {tmp_path} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
    places = find_places("0::/user.slice/ours.scope\n", mounts)
    assert {name: (place.folder, place.version) for name, place in places.items()} == {
        "memory": (slice_, 2),
        "pids": (slice_, 2),
    }


def test_nowhere_to_write_is_no_place() -> None:
    assert find_places("0::/\n", "30 29 0:26 / /nowhere rw - cgroup2 cgroup2 rw") == {}
    assert find_places("", "") == {}


def test_a_group_of_version_2_is_written_as_the_kernel_reads_it(tmp_path: Path) -> None:
    slice_ = folder(tmp_path / "user.slice", cgroup__subtree_control="cpu memory pids\n")
    folder(slice_ / "ours.scope")
    mounts = f"30 29 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw"
    group = Cgroup(find_places("0::/user.slice/ours.scope\n", mounts))
    (made,) = slice_.glob("forge-*")
    group.limit(Limits(memory_mib=100, processes=7, cores=0.5), files_mib=28)
    group.add(123)
    texts = {name: (made / name).read_text() for name in ("memory.max", "pids.max", "cpu.max", "cgroup.procs")}
    assert texts == {"memory.max": str(128 * 2**20), "pids.max": "7", "cpu.max": "50000", "cgroup.procs": "123"}
    folder(made, memory__events="low 0\noom 3\noom_kill 2\n", pids__events="max 5\n")
    assert group.counts() == {"memory": 2, "processes": 5}


@pytest.mark.parametrize("process", [2**22 + 1, 1])
def test_groups_of_processes_that_are_no_more_are_removed(tmp_path: Path, process: int) -> None:
    root = folder(tmp_path / "pids")
    (root / f"forge-{process}-0").mkdir()
    (root / "of-others").mkdir()
    Cgroup(find_places("8:pids:/\n", f"30 29 0:26 / {root} rw - cgroup cgroup rw,pids"))
    assert (root / f"forge-{process}-0").exists() == (process == 1)
    assert (root / "of-others").exists()
