"""`forge doctor`: what this machine can run, and what is missing for the rest."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass

from forge import compiled, runs
from forge.models import MODELS, shipped
from forge.rollout.vllm import install as vllm
from forge.types import ForgeError, Json


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing Forge can use. `fix` says what to do when `ok` is false."""

    what: str
    ok: bool
    found: str
    fix: str = ""


def machine() -> Json:
    """The machine, in the terms a benchmark is quoted with."""
    return {**runs.machine(), "python": platform.python_version(), "gpu": gpu_name()}


def checks() -> list[Check]:
    cores = int(runs.machine()["cores"] or 1)
    return [
        Check(
            what="Python 3.11 or newer",
            ok=sys.version_info >= (3, 11),
            found=platform.python_version(),
            fix="install a newer Python",
        ),
        Check(
            what="two cores (rollout and training at once)",
            ok=cores >= 2,
            found=f"{cores}",
            fix="a live run works on one core, slowly",
        ),
        _packages(
            "simulate, tune, replay, report",
            ("simpy", "numpy", "matplotlib", "pydantic", "optuna"),
            "pip install forge-rl",
        ),
        _packages(
            "live training (gateway, embedded engine, CISPO)",
            ("torch", "transformers", "starlette", "uvicorn", "prometheus_client", "openai", "reasoning_gym"),
            "pip install 'forge-rl[live]'",
        ),
        _packages("convert SmolLM2", ("gguf", "accelerate"), "pip install 'forge-rl[smollm2]'"),
        _packages("dashboard", ("streamlit",), "pip install 'forge-rl[dash]'"),
        _vllm(),
        _packages("DeepSpeed training", ("deepspeed",), "pip install 'forge-rl[deepspeed]'"),
        _merged_attention(),
        _sandbox(),
        _packages("the sandbox's tools over MCP", ("mcp",), "pip install 'forge-rl[agents]'"),
        Check(
            what="compiled simulator",
            ok=compiled.in_use(),
            found="in use" if compiled.in_use() else "none of these sources",
            fix="make fast, or forge compile; without it long simulations take twice as long",
        ),
        Check(what="CUDA GPU", ok=gpu_name() is not None, found=gpu_name() or "none", fix="the CPU path needs none"),
        Check(
            what="shipped model",
            ok="quickstart" in shipped(),
            found=", ".join(shipped()) or "none",
            fix="python -m forge.train.warm_start --out forge/assets/quickstart",
        ),
        Check(
            what="SmolLM2-135M-Instruct",
            ok=(MODELS / "smollm2" / "config.json").is_file(),
            found=str(MODELS / "smollm2") if (MODELS / "smollm2").is_dir() else "none",
            fix="forge model get smollm2",
        ),
        Check(
            what="disk space for run folders (1 GiB)",
            ok=shutil.disk_usage(".").free > 2**30,
            found=f"{shutil.disk_usage('.').free / 2**30:.0f} GiB free",
            fix="run where there is room, or pass --runs DIR",
        ),
    ]


def _vllm() -> Check:
    """In its own environment, where `forge engine install vllm` puts it."""
    there = vllm.found()
    return Check(
        what="vLLM engine",
        ok=there.version is not None,
        found=f"vllm {there.version} in {vllm.FOLDER}" if there.version else there.why,
        fix="forge engine install vllm; elsewhere: engine.vllm.environment says where",
    )


def _merged_attention() -> Check:
    """Which backend of prefix-tree attention trains here, and why the others do not."""
    what = "prefix-tree attention"
    if importlib.util.find_spec("torch") is None:
        return Check(what=what, ok=False, found="needs torch", fix="pip install 'forge-rl[live]'")
    import torch

    from forge.train.attention import BACKENDS, automatic, unavailable

    device = torch.device("cuda" if gpu_name() else "cpu")
    others = [f"not {name}: {why}" for name in BACKENDS if (why := unavailable(name, device))]
    return Check(what=what, ok=True, found="; ".join([f"{automatic(device)} (auto)", *others]))


def _sandbox() -> Check:
    """Which limits agents' commands are kept to here, and which not."""
    from forge.sandbox.bubblewrap import probe

    what = "sandbox for agents' commands"
    try:
        return Check(what=what, ok=True, found=asyncio.run(probe()))
    except ForgeError as error:
        return Check(what=what, ok=False, found="none", fix=str(error))


def gpu_name() -> str | None:
    """The first CUDA device, without importing torch where there is no driver."""
    if not os.path.exists("/dev/nvidiactl") or importlib.util.find_spec("torch") is None:
        return None
    import torch

    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None


def _packages(what: str, modules: tuple[str, ...], fix: str) -> Check:
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    found = ", ".join(f"{m} {_version(m)}" for m in modules if m not in missing)
    if missing:
        found = f"missing: {', '.join(missing)}"
    return Check(what=what, ok=not missing, found=found, fix=fix)


def _version(module: str) -> str:
    names = importlib.metadata.packages_distributions().get(module, [module])
    return importlib.metadata.version(names[0])
