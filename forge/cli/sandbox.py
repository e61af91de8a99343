"""`forge sandbox`: an agent's sandbox for others."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from forge.cli import app
from forge.types import ForgeError

sandbox = typer.Typer(help="The sandbox in which agents run commands.", no_args_is_help=True)
app.add_typer(sandbox, name="sandbox")


@sandbox.callback()
def one() -> None:
    """The sandbox in which agents run commands."""


@sandbox.command()
def mcp(
    workspace: Annotated[
        Path | None, typer.Option(help="Folder that commands work in, and write to; without it one that is then gone.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Longest time of a command.")] = 30.0,
    memory_mib: Annotated[int, typer.Option(min=16, help="Memory of a command, MiB.")] = 512,
    disk_mib: Annotated[int, typer.Option(min=1, help="Most that the files may take, MiB.")] = 64,
) -> None:
    """Command and file tools as an MCP server on standard input and output, for an agent's configuration."""
    if find_spec("mcp") is None:
        raise ForgeError("forge sandbox mcp: the package mcp is not installed; pip install 'forge-rl[agents]'")
    from forge.sandbox.base import Limits
    from forge.sandbox.bubblewrap import Bubblewrap
    from forge.sandbox.mcp import serve

    async def run() -> None:
        opened = await Bubblewrap.open(disk_mib=disk_mib, folder=workspace.resolve() if workspace else None)
        try:
            await serve(opened, Limits(seconds=seconds, memory_mib=memory_mib))
        finally:
            await opened.close()

    asyncio.run(run())
