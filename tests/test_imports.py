"""Imports point one way (DESIGN section 3), and a simulator user needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: Level by module or package: a module imports lower levels and its own package; those of level 1 also each other.
PURE = {
    "forge.types": 0,
    "forge.draws": 0,
    "forge.formats": 1,
    "forge.scaffolds": 2,
    "forge.queue": 1,
    "forge.trace": 1,
    "forge.mix": 1,
    "forge.forest": 1,
    "forge.cost": 1,
    "forge.prefix_index": 1,
    "forge.instances": 1,
    "forge.views": 2,
    "forge.policies": 3,
    "forge.processing": 4,
    "forge.sections": 5,
    "forge.sections_agents": 6,
    "forge.sections_rollout": 6,
    "forge.sections_sim": 7,
    "forge.faults": 7,
    "forge.scenario": 8,
    "forge.control": 5,
    "forge.metrics": 9,
}
IMPURE = {"torch", "simpy", "asyncio", "time", "random"}
LIVE = ("gateway", "pool", "rollout", "train", "agents", "domains", "sandbox", "blackbox", "live", "bench")
CLI = "forge.cli"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Every module a file names in an import, wherever in the file; `from a import b` gives `a` and `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def level(name: str) -> int | None:
    return next((n for package, n in PURE.items() if within(name, package)), None)


FILES = sorted([*ROOT.glob("forge/**/*.py"), *ROOT.glob("sim/**/*.py")])
PAGES = sorted(ROOT.glob("dashboards/**/*.py"))
DRAWING = {"streamlit", "altair", "pandas"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    name, imported = module_of(path), set(imports_of(path))
    own = level(name)
    for other in imported:
        if own is not None:
            assert other.partition(".")[0] not in IMPURE, f"{name} is pure and imports {other}"
            if within(other, "forge") and other != "forge":
                kin = any(within(name, p) and within(other, p) for p in PURE)
                theirs = level(other)
                assert theirs is not None, f"{name} is pure and imports {other}, which is not"
                assert kin or theirs < own or (theirs == own == 1), f"{name} imports {other} against the direction"
        if within(name, "sim"):
            assert not any(within(other, f"forge.{part}") for part in LIVE), f"{name} imports live part {other}"
        if within(other, "sim"):
            assert within(name, "sim") or name.startswith(CLI), f"{name} imports {other}; only the CLI may"
        assert not other.startswith(CLI) or name.startswith(CLI) or name == "forge.__main__", f"{name} imports {other}"
        assert not within(other, "dashboards"), f"{name} imports {other}; pages read forge and sim, nothing reads them"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_import_no_live_part_and_what_they_compute_no_streamlit(path: Path) -> None:
    name, imported = module_of(path), set(imports_of(path))
    for other in imported:
        assert not any(within(other, f"forge.{part}") for part in (*LIVE, "cli")), f"{name} imports live part {other}"
    draws = name.rpartition(".")[2] in ("app", "charts", "pictures", "ui") or ".page_" in name
    assert draws or not imported & DRAWING, f"{name} computes, and imports {imported & DRAWING}"


def test_the_rules_see_what_they_forbid(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("def f():\n    from forge.pool import store\n    import time as clock\n")
    assert {"forge.pool", "forge.pool.store", "time"} <= set(imports_of(path))


def test_the_pure_layer_is_all_there() -> None:
    names = {module_of(p) for p in FILES}
    assert set(PURE) <= names


@pytest.mark.parametrize(
    "modules",
    [
        "forge.scenario, forge.control, sim",
        "forge.metrics, forge.runs, forge.replay, forge.report.page, forge.report.comparison",
        "sim.world",
    ],
)
def test_a_simulator_user_loads_no_torch(modules: str) -> None:
    heavy = "torch transformers starlette openai reasoning_gym vllm"
    code = f"import {modules}, sys; print([m for m in '{heavy}'.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_a_live_run_leaves_torch_to_its_trainer_and_engines() -> None:
    code = "import forge.live.run, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
