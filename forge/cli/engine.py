"""`forge engine`: rollout engines that are not part of this environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forge.cli import app
from forge.types import ForgeError

engines = typer.Typer(help="Rollout engines beside the embedded one.", no_args_is_help=True)
app.add_typer(engines, name="engine")


@engines.command("install")
def install(
    name: Annotated[str, typer.Argument(help="vllm")],
    into: Annotated[Path, typer.Option(help="Folder of its Python environment.")] = Path("engines/vllm"),
    gpu: Annotated[bool | None, typer.Option("--gpu/--cpu", help="Which build; by default as this machine is.")] = None,
) -> None:
    """vLLM in an environment of its own: minutes, 2.5 GB on a CPU. An environment that is whole is kept."""
    from forge.doctor import gpu_name
    from forge.rollout.vllm.install import install as install_vllm

    if name != "vllm":
        raise ForgeError(f"engine {name!r}: only vllm can be installed; torch and fake are part of Forge")
    console = Console()
    made = install_vllm(into, gpu=gpu_name() is not None if gpu is None else gpu, say=console.print)
    console.print(f'vLLM {made.version} in {into}; a scenario uses it with engine.kind = "vllm"', highlight=False)
