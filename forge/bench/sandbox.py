"""`forge bench sandbox`: how long a sandbox takes to start, what ends leave behind, and the battery of escapes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from forge.sandbox.battery import DISK_MIB, battery, left
from forge.sandbox.bubblewrap import Bubblewrap
from forge.types import Json


def run(sandboxes: int, progress: Callable[[str], None]) -> Json:
    """Figures in milliseconds and counts. Raises ForgeError where there are no sandboxes."""
    return asyncio.run(_run(sandboxes, progress))


async def _run(sandboxes: int, progress: Callable[[str], None]) -> Json:
    before = left()
    times = []
    for count in range(sandboxes):
        progress(f"sandbox {count + 1} of {sandboxes}")
        times.append(await one_life())
    remains = {f"left_{what}": number - before[what] for what, number in left().items()}
    start, command, end = (np.array(part) * 1000 for part in zip(*times, strict=True))
    progress("escapes")
    reports = await battery(_open)
    figures = {
        "start_p50_ms": float(np.percentile(start + command, 50)),
        "start_p99_ms": float(np.percentile(start + command, 99)),
        "open_p50_ms": float(np.percentile(start, 50)),
        "command_p50_ms": float(np.percentile(command, 50)),
        "close_p50_ms": float(np.percentile(end, 50)),
        "sandboxes": sandboxes,
        **remains,
        "escapes": len(reports),
        "contained": sum(report.contained for report in reports),
    }
    protocol = "start: from nothing to the end of a first command (`true`), one sandbox after another"
    sandbox = await _open()
    await sandbox.close()
    rows = [asdict(report) for report in reports]
    return {"protocol": protocol, "not_limited": list(sandbox.missing), "rows": rows, "figures": figures, "reasons": {}}


async def one_life() -> tuple[float, float, float]:
    """Seconds to open a sandbox, to run a first command, to close it."""
    began = time.perf_counter()
    sandbox = await _open()
    opened = time.perf_counter()
    await sandbox.run("true")
    ran = time.perf_counter()
    await sandbox.close()
    return opened - began, ran - opened, time.perf_counter() - ran


async def _open() -> Bubblewrap:
    return await Bubblewrap.open(disk_mib=DISK_MIB)
