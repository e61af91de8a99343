"""The structured log: a file of JSON lines, one for every request that was answered."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Self

from forge.types import ForgeError, Json


class RequestLog:
    """Appends rows (forge.gateway.watch) to a file; each reaches the operating system at once. Raises ForgeError."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ForgeError(f"{path}: the log of requests cannot be written: {error.strerror}") from None

    def __call__(self, row: Json) -> None:
        self._file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
