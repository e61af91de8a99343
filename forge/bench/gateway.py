"""`forge bench gateway`: what the gateway adds to a streamed token's way, beside what the LiteLLM proxy adds.

One stub engine over HTTP in a process of its own, one load of concurrent conversations in another, and between them
nothing (direct), our gateway, or LiteLLM, one process each. Saturation is the chunks a second that come through when
the engine does not pause, or fewer, if a core is full before where chunks come one by one. Latencies are then measured
at half of it, direct first and through the gateway, three times in turn; what is added is the difference of the
quantiles. LiteLLM, which saturates earlier, is measured at half of its own, and the ratio is that of both sides at this
rate.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from forge.bench import gateway_load, gateway_server, gateway_stub
from forge.bench.gateway_load import Load, Seen
from forge.types import ForgeError, Json

STREAMS = 200
SESSIONS = 1000
#: seconds that a stream lasts, turns of a conversation, and rounds of direct and gateway in turn
STREAM_S, TURNS, ROUNDS = 4.0, 2, 3
#: seconds over which the conversations begin, so that first chunks are not each other's queue
SPREAD_S = 2.0
#: LiteLLM's environment: version tried
LITELLM = "litellm[proxy]==1.108.7"
START_S = 120.0
Told = Callable[[str], None]


class Bench:
    """The stub and the load, up and paired."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.stub, _ = self.started(gateway_stub.main)
        _, self._load = self.started(gateway_load.main, self.stub, tells=False)
        self.errors: list[str] = []

    def started(self, target: Callable[..., None], *args: Any, tells: bool = True) -> tuple[int, Connection]:
        """A process; the port it tells (0 where it has none) and its pipe."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *args), daemon=True)
        process.start()
        self._stack.callback(process.kill)
        self.pid = process.pid or 0
        return (ours.recv() if tells else 0), ours

    def run(self, load: Load, chunks_per_s: float | None) -> Seen:
        """All streams together at so many chunks a second; None: without a pause."""
        self._load.send((load, 0.0 if chunks_per_s is None else load.sessions / chunks_per_s))
        seen: Seen = self._load.recv()
        self.errors += seen.errors
        return seen

    def saturation(self, load: Load, pid: int, pace: float) -> tuple[float, float]:
        """(chunks a second, CPU microseconds that process `pid` spends on one), after a first run that warms up: what
        comes through without a pause, but no more than fills a core where chunks come one by one, at `pace` a second.
        """
        flat_out = self.run(load, None)
        before = cpu_s(pid)
        paced = self.run(replace(load, chunks=_chunks(pace), spread_s=SPREAD_S), pace)
        cost_s = (cpu_s(pid) - before) / _counted(paced)
        return min(_counted(flat_out) / flat_out.seconds, 1 / cost_s), cost_s * 1e6

    def at_rate(self, loads: dict[str, Load], chunks_per_s: float) -> dict[str, Seen]:
        """Every side at this rate, in turn, so that a machine that drifts drifts for all."""
        chunks = _chunks(chunks_per_s)
        whole = {name: Seen() for name in loads}
        for _ in range(ROUNDS):
            for name, load in loads.items():
                seen = self.run(replace(load, chunks=chunks, spread_s=SPREAD_S), chunks_per_s)
                whole[name].first_ms += seen.first_ms
                whole[name].chunk_ms += seen.chunk_ms
        return whole


def _chunks(chunks_per_s: float) -> int:
    """Of a stream that lasts STREAM_S while all together carry this rate."""
    return max(2, round(STREAM_S * chunks_per_s / STREAMS))


def _counted(seen: Seen) -> int:
    return len(seen.chunk_ms) + len(seen.first_ms)


def cpu_s(pid: int) -> float:
    """Seconds of CPU time a process has used (man 5 proc_pid_stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(litellm: Path | None, tell: Told) -> Json:
    """All figures of the contract. `litellm`: the Python of an environment that has it; None: its figures are null."""
    with contextlib.ExitStack() as stack:
        bench = Bench(stack)
        port, _ = bench.started(gateway_server.main, bench.stub)
        gateway_pid = bench.pid
        direct = Load(port=bench.stub, path="/v1/chat/completions", sessions=STREAMS, turns=TURNS, chunks=200)
        ours = replace(direct, port=port, path="/t/{name}/v1/chat/completions", report_path="/t/{name}/report")
        tell("the gateway's saturation")
        saturation, cost_us = bench.saturation(ours, gateway_pid, 2000.0)
        tell(f"{STREAMS} streams at {saturation / 2:.0f} chunks a second")
        seen = bench.at_rate({"direct": direct, "gateway": ours}, saturation / 2)
        tell(f"{SESSIONS} sessions at once")
        rss = [_sessions(bench, ours, saturation / 2, gateway_pid) for _ in range(4)]
        ours_errors = len(bench.errors)
        theirs: Json = {"why": f"none was given: --litellm PYTHON of an environment with {LITELLM}"}
        if litellm is not None:
            try:
                theirs = _litellm(bench, litellm, direct, ours, stack, tell)
            except ForgeError as error:
                theirs = {"why": str(error)}
        samples = bench.errors[:3]
    return _result(saturation, cost_us, seen, rss, ours_errors, samples, theirs)


def _sessions(bench: Bench, ours: Load, chunks_per_s: float, pid: int) -> float:
    """MiB resident in the gateway after many sessions at once have come and gone."""
    many = replace(ours, sessions=SESSIONS, chunks=max(2, round(STREAM_S * chunks_per_s / SESSIONS)), spread_s=SPREAD_S)
    bench.run(many, chunks_per_s)
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def _litellm(bench: Bench, python: Path, direct: Load, ours: Load, stack: contextlib.ExitStack, tell: Told) -> Json:
    tell("LiteLLM starts")
    port, pid = stack.enter_context(_proxy(python, bench.stub))
    theirs = replace(direct, port=port, chunks=20)
    tell("LiteLLM's saturation")
    saturation, cost_us = bench.saturation(theirs, pid, 100.0)
    rate = saturation / 2
    tell(f"direct, gateway and LiteLLM at {rate:.0f} chunks a second")
    seen = bench.at_rate({"direct": direct, "gateway": ours, "litellm": theirs}, rate)
    return {"saturation": saturation, "cost_us": cost_us, "seen": seen}


@contextlib.contextmanager
def _proxy(python: Path, stub: int) -> Iterator[tuple[int, int]]:
    """LiteLLM's proxy before the stub, one worker, without a database: port and process id. Raises ForgeError."""
    command = python.with_name("litellm")
    if not command.is_file():
        raise ForgeError(f"--litellm {python}: no litellm beside it; make an environment with pip install '{LITELLM}'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder) / "config.yaml", Path(folder) / "log"
        config.write_text(
            "model_list:\n  - model_name: stub\n    litellm_params:\n      model: openai/stub\n"
            f"      api_base: http://127.0.0.1:{stub}/v1\n      api_key: none\n"
            "litellm_settings:\n  telemetry: false\n"
            "general_settings:\n  dangerously_permit_weak_or_unset_master_key: true\n",
            encoding="utf-8",
        )
        env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "NO_DOCS": "True"}
        arguments = [str(command), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        with log.open("wb") as out:
            process = subprocess.Popen(arguments, stdout=out, stderr=subprocess.STDOUT, env=env)
        try:
            _wait(process, port, log)
            yield port, process.pid
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(0.5)
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    raise ForgeError(f"LiteLLM did not start within {START_S:g} s: {' '.join(said)}")


def _added(seen: dict[str, Seen], side: str, kind: str) -> dict[str, float]:
    """Milliseconds that a side adds to direct: differences of medians, and of 99th percentiles."""
    through, plain = (np.percentile(getattr(seen[name], kind), (50, 99)) for name in (side, "direct"))
    return {"p50": float(through[0] - plain[0]), "p99": float(through[1] - plain[1])}


def _result(
    saturation: float,
    cost_us: float,
    seen: dict[str, Seen],
    rss: list[float],
    errors: int,
    samples: list[str],
    theirs: Json,
) -> Json:
    chunk, first = (_added(seen, "gateway", kind) for kind in ("chunk_ms", "first_ms"))
    figures: dict[str, float | None] = {
        "added_p50_ms": chunk["p50"],
        "added_p99_ms": chunk["p99"],
        "added_first_p50_ms": first["p50"],
        "added_first_p99_ms": first["p99"],
        "saturation_chunks_per_s": saturation,
        "cpu_us_per_chunk": cost_us,
        "sessions": float(SESSIONS),
        "errors": float(errors),
        "sessions_growth_mib": rss[-1] - rss[1],
        "ratio_vs_litellm": None,
        "litellm_added_p50_ms": None,
        "litellm_added_p99_ms": None,
        "litellm_saturation_chunks_per_s": None,
        "litellm_cpu_us_per_chunk": None,
        "added_at_litellm_rate_p50_ms": None,
    }
    reasons = {}
    if "seen" in theirs:
        other, own = (_added(theirs["seen"], side, "chunk_ms") for side in ("litellm", "gateway"))
        figures |= {
            "ratio_vs_litellm": other["p50"] / own["p50"],
            "litellm_added_p50_ms": other["p50"],
            "litellm_added_p99_ms": other["p99"],
            "litellm_saturation_chunks_per_s": theirs["saturation"],
            "litellm_cpu_us_per_chunk": theirs["cost_us"],
            "added_at_litellm_rate_p50_ms": own["p50"],
        }
    else:
        reasons = {name: theirs["why"] for name, value in figures.items() if value is None}
    return {
        "figures": figures,
        "reasons": reasons,
        "error_samples": samples,
        "protocol": f"{STREAMS} conversations streamed at once, {saturation / 2:.0f} chunks a second in all: half of "
        f"what this machine's {os.cpu_count()} cores carry with load, engine and gateway on them",
        "sessions_rss_mib": rss,
        "load_average": os.getloadavg(),  # of others too: latencies mean something on a machine that was quiet
    }
