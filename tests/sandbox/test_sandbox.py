"""The sandbox: what it lets through, what it does not, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox_support import needs_bubblewrap

from forge.bench.sandbox import one_life
from forge.sandbox.base import Sandbox, WorkspaceError
from forge.sandbox.battery import DISK_MIB, ESCAPES, LIMITS, attempt, battery, left, outside, processes
from forge.sandbox.bubblewrap import Bubblewrap
from forge.sandbox.fake import FakeSandbox
from forge.sandbox.holder import UNPRIVILEGED
from forge.types import ForgeError


@pytest.fixture(params=["fake", pytest.param("bubblewrap", marks=needs_bubblewrap)])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    opened: Sandbox = FakeSandbox() if request.param == "fake" else await Bubblewrap.open(disk_mib=DISK_MIB)
    yield opened
    await opened.close()


@pytest.fixture
async def real() -> AsyncIterator[Bubblewrap]:
    opened = await Bubblewrap.open(disk_mib=DISK_MIB)
    yield opened
    await opened.close()


# --- files: any sandbox ------


async def test_what_is_written_is_read_and_listed(sandbox: Sandbox) -> None:
    sandbox.write("b.txt", b"one")
    sandbox.write("/workspace/a/deep/c.bin", bytes(range(256)))
    sandbox.write("./b.txt", b"two")
    assert sandbox.read("b.txt") == b"two"
    assert sandbox.read("a/deep/c.bin") == bytes(range(256))
    assert [(one.path, one.size) for one in sandbox.entries()] == [("a/deep/c.bin", 256), ("b.txt", 3)]


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "/workspace", "", ".", "/", "a\0b", "x/" * 40])
async def test_a_path_that_leaves_the_workspace_is_refused(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(WorkspaceError):
        sandbox.read(path)
    with pytest.raises(WorkspaceError):
        sandbox.write(path, b"x")
    assert sandbox.entries() == []


async def test_a_file_that_is_not_there_is_said(sandbox: Sandbox) -> None:
    with pytest.raises(WorkspaceError, match=r"x\.txt: No such file or directory"):
        sandbox.read("x.txt")


# --- commands ------


@needs_bubblewrap
async def test_a_command_has_output_exit_code_input_and_the_files_of_others(real: Bubblewrap) -> None:
    real.write("a.txt", b"from outside\n")
    result = await real.run("cat a.txt -; echo wrong >&2; echo inside > b/c || mkdir b; exit 3", b"by stdin\n")
    assert (result.exit_code, result.cut, result.met) == (3, False, ())
    assert result.output.startswith("from outside\nby stdin\nwrong\n")
    assert (await real.run("echo inside > b/c; stat -c %U:%a a.txt; echo more >> a.txt")).exit_code == 0
    assert (real.read("b/c"), real.read("a.txt")) == (b"inside\n", b"from outside\nmore\n")


@needs_bubblewrap
async def test_output_is_cut_at_its_limit_and_the_command_goes_on(real: Bubblewrap) -> None:
    result = await real.run("head -c 20000 /dev/zero | tr '\\0' x; touch done", limits=replace(LIMITS, output_kib=4))
    assert (result.output, result.cut, result.exit_code, result.met) == ("x" * 4096, True, 0, ())
    assert [one.path for one in real.entries()] == ["done"]


@needs_bubblewrap
async def test_commands_of_one_sandbox_wait_for_each_other(real: Bubblewrap) -> None:
    each = "n=$(cat n 2>/dev/null || echo 0); sleep 0.05; echo $((n + 1)) > n"
    await asyncio.gather(*(real.run(each) for _ in range(5)))
    assert real.read("n") == b"5\n"


@needs_bubblewrap
async def test_two_sandboxes_do_not_know_each_other(real: Bubblewrap) -> None:
    other = await Bubblewrap.open(disk_mib=1)
    real.write("a", b"a")
    assert (await other.run("touch /tmp/mark; ls /workspace")).output == ""
    await other.close()
    assert (await real.run("ls /tmp")).output == ""
    with pytest.raises(ForgeError, match="closed"):
        await other.run("true")


@needs_bubblewrap
async def test_a_cancelled_command_ends_before_the_cancellation_is_told(real: Bubblewrap) -> None:
    running = asyncio.create_task(real.run(": cancelled-mark\n(trap '' TERM; sleep 600) & sleep 600"))
    while not processes("cancelled-mark"):
        await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert processes("cancelled-mark") == 0
    assert (await real.run("echo next")).output == "next\n"


@needs_bubblewrap
async def test_a_file_that_is_too_long_or_no_file_is_not_read(real: Bubblewrap) -> None:
    await real.run("head -c 2M /dev/zero > long; mkdir folder; mkfifo pipe; ln -s long link")
    for path, said in (("long", "longer than"), ("folder", "not a file"), ("pipe", "not a file"), ("link", "symbolic")):
        with pytest.raises(WorkspaceError, match=said):
            real.read(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of somebody else where we are root, and reached by them."""
    if os.geteuid() == 0:
        for parent in [tmp_path, *tmp_path.parents][:-2]:
            parent.chmod(0o755)
        os.chown(tmp_path, UNPRIVILEGED, UNPRIVILEGED)
    return tmp_path


@needs_bubblewrap
async def test_a_folder_of_this_machine_is_the_workspace_and_has_its_size_watched(folder: Path) -> None:
    (folder / "given").write_text("given")
    sandbox = await Bubblewrap.open(disk_mib=4, folder=folder)
    assert any("disk" in what for what in sandbox.missing)
    assert (await sandbox.run("cat given; echo new > made")).output == "given"
    result = await sandbox.run("for i in $(seq 50); do head -c 1M /dev/zero > $i; sleep 0.1; done")
    assert (result.exit_code, result.met) == (None, ("disk",))
    await sandbox.close()
    assert (folder / "made").read_text() == "new\n"


@needs_bubblewrap
async def test_in_a_folder_of_this_machine_every_escape_is_contained(folder: Path) -> None:
    numbers = iter(range(100))

    async def opened() -> Bubblewrap:
        own = folder / str(next(numbers))
        own.mkdir()
        os.chown(own, folder.stat().st_uid, folder.stat().st_gid)
        return await Bubblewrap.open(disk_mib=DISK_MIB, folder=own)

    assert [report for report in await battery(opened) if not report.contained] == []


async def test_a_folder_that_no_sandbox_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="no such folder; make it first"):
        await Bubblewrap.open(folder=tmp_path / "none")
    with pytest.raises(ForgeError, match="belongs to root; chown -R 65534 /usr"):
        await Bubblewrap.open(folder=Path("/usr"))


async def test_where_bubblewrap_is_not_installed_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forge.sandbox.holder.PATH", "/nowhere")
    with pytest.raises(ForgeError, match=r"not installed: bwrap, .*; apt-get install bubblewrap util-linux"):
        await Bubblewrap.open()


# --- escapes, and what is left ------


@needs_bubblewrap
@pytest.mark.parametrize("escape", ESCAPES, ids=lambda escape: escape.name.replace(" ", "_"))
async def test_an_escape_is_contained_and_reported(escape: object, real: Bubblewrap) -> None:
    before = left()
    with outside() as (goal, connected):
        report = await attempt(escape, real, goal)  # type: ignore[arg-type]
        assert report.contained, report
        assert goal.secret.read_text() == goal.word
        assert not connected()
    assert left() == before


def test_the_battery_sees_an_escape() -> None:
    """Must fail: the same attempts with nothing around them reach what they aim at."""
    with outside() as (goal, connected):
        by_name = {escape.name: escape.command for escape in ESCAPES}
        for name in ("network", "symlink"):
            command = by_name[name].replace("SECRET", str(goal.secret)).replace("PORT", str(goal.port))
            done = subprocess.run(
                ["bash", "-c", command.replace("1.1.1.1", "127.0.0.2")], cwd=goal.secret.parent, capture_output=True
            )
            assert (goal.word in done.stdout.decode()) == (name == "symlink")
        assert connected()


@needs_bubblewrap
async def test_two_hundred_sandboxes_leave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    await one_life()  # what is made once, by the event loop
    before = left()
    times = sorted([sum((await one_life())[:2]) for _ in range(160)])
    for _ in range(5):  # and eight at once
        await asyncio.gather(*(one_life() for _ in range(8)))
    assert left() == before
    with capsys.disabled():
        print(f"\nstart-up of a sandbox to the end of a first command: p50 {times[80] * 1e3:.0f} ms, ", end="")
        print(f"p99 {times[158] * 1e3:.0f} ms")


_KILLED = """
import asyncio
from forge.sandbox.bubblewrap import Bubblewrap
async def main():
    sandbox = await Bubblewrap.open()
    print("open", flush=True)
    await sandbox.run(": killed-mark\\nsleep 600 & setsid sleep 600")
asyncio.run(main())
"""


@needs_bubblewrap
def test_nothing_is_left_of_a_process_that_was_killed_and_the_next_sweeps_its_groups() -> None:
    def until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.05)

    with subprocess.Popen([sys.executable, "-c", _KILLED], stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"open\n"
        until(lambda: processes("killed-mark") >= 3)  # the script itself is one
        holder = Path(f"/proc/{victim.pid}/task/{victim.pid}/children").read_text().split()
        os.kill(victim.pid, signal.SIGKILL)
    until(lambda: processes("killed-mark") == 0)
    until(lambda: not any(Path(f"/proc/{child}").exists() for child in holder))
    asyncio.run(one_life())
    from forge.sandbox.cgroups import here

    assert [group for place in here().values() for group in place.folder.glob(f"forge-{victim.pid}-*")] == []


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_user_without_privileges_has_a_sandbox_too(tmp_path: Path) -> None:
    """In a copy of the package, as the sources may lie where that user cannot read."""
    script = (
        "import asyncio; from forge.sandbox.bubblewrap import *; from forge.sandbox.battery import *\n"
        "reports = asyncio.run(battery(lambda: Bubblewrap.open(disk_mib=DISK_MIB)))\n"
        "print([r for r in reports if not r.contained and r.name != 'memory of many'], asyncio.run(probe()))"
    )
    root = Path(__file__).parents[2]
    subprocess.run(["cp", "-r", root / "forge", tmp_path / "forge"], check=True)
    subprocess.run(["chmod", "-R", "a+rX", tmp_path], check=True)
    for parent in [*tmp_path.parents][:-2]:
        parent.chmod(0o755)
    interpreter = "/usr/bin/python3"
    if subprocess.run([interpreter, "-c", "import sys; assert sys.version_info >= (3, 11)"]).returncode:
        pytest.skip(f"{interpreter}: older than 3.11, or not there")
    done = subprocess.run(
        [interpreter, "-c", script],
        user=1234,
        group=1234,
        extra_groups=[],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[] bubblewrap"), done.stdout
    assert "not limited: memory of all processes together" in done.stdout
