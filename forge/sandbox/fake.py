"""A `Sandbox` without processes, for tests of what stands on one: files in memory, commands answered from a table."""

from __future__ import annotations

from collections.abc import Mapping

from forge.sandbox.base import Entry, Guest, Limits, Result, WorkspaceError
from forge.sandbox.files import parts_of


class FakeSandbox:
    """`answers`: how each command ends. One that is not among them ends as one that bash does not know."""

    missing: tuple[str, ...] = ()

    def __init__(self, answers: Mapping[str, Result] | None = None) -> None:
        self._answers = dict(answers or {})
        self._files: dict[str, bytes] = {}

    async def run(
        self,
        command: str,
        stdin: bytes = b"",  # noqa: ARG002
        limits: Limits = Limits(),  # noqa: ARG002, B008
        guest: Guest | None = None,  # noqa: ARG002
    ) -> Result:
        unknown = Result(exit_code=127, output=f"bash: {command}: command not found\n", cut=False, seconds=0.0)
        return self._answers.get(command, unknown)

    def read(self, path: str) -> bytes:
        name = "/".join(parts_of(path))
        if name not in self._files:
            raise WorkspaceError(f"{path}: No such file or directory")
        return self._files[name]

    def write(self, path: str, data: bytes) -> None:
        self._files["/".join(parts_of(path))] = data

    def entries(self) -> list[Entry]:
        return [Entry(path, len(data)) for path, data in sorted(self._files.items())]

    async def close(self) -> None:
        self._files.clear()
