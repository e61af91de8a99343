"""Names and shapes of a model folder's tensors, read without their data: what a load is checked against."""

from __future__ import annotations

import json
from pathlib import Path

from forge.rollout.engine import EngineError

Shapes = dict[str, tuple[int, ...]]


def tensors(folder: Path) -> Shapes:
    """Of model.safetensors, or of the shards that its index lists. Raises EngineError where they cannot be read."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            files = ["model.safetensors"]
        return {name: shape for file in files for name, shape in _header(folder / file).items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{folder}: weights cannot be read: {error}") from None


def check_same(served: Shapes, folder: Path) -> None:
    """Raises EngineError where the folder's tensors are not those of the served model."""
    found = tensors(Path(folder))
    for name in sorted(served.keys() ^ found.keys()):
        where = "is missing" if name in served else "is not in the served model"
        raise EngineError(f"{folder}: tensor {name!r} {where}")
    for name, shape in found.items():
        if shape != served[name]:
            raise EngineError(f"{folder}: {name!r} has shape {shape}, the served model has {served[name]}")


def _header(path: Path) -> Shapes:
    """A safetensors file begins with the length of its header, 8 bytes, little endian; the header is JSON."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length)) if length <= size - 8 else None
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} is no safetensors file")
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    ends = [entry["data_offsets"][1] for entry in entries.values()]
    if 8 + length + max(ends, default=0) != size:
        raise ValueError(f"{path.name} is cut off")
    return {name: tuple(entry["shape"]) for name, entry in entries.items()}
