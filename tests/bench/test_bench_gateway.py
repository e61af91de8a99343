"""The parts of `forge bench gateway`: every chunk of every stream comes, by both ways, and is timed."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from forge.bench import gateway_server
from forge.bench.gateway import Bench, _added, cpu_s
from forge.bench.gateway_load import Load


def test_both_sides_are_measured_to_the_last_chunk() -> None:
    with contextlib.ExitStack() as stack:
        bench = Bench(stack)
        direct = Load(port=bench.stub, path="/v1/chat/completions", sessions=4, turns=3, chunks=6, spread_s=0.1)
        port, _ = bench.started(gateway_server.main, bench.stub)
        pid = bench.pid
        path, report = "/t/{name}/v1/chat/completions", "/t/{name}/report"
        ours = replace(direct, port=port, path=path, report_path=report)
        seen = {"direct": bench.run(direct, 200.0), "gateway": bench.run(ours, 200.0)}
        assert bench.errors == []
        for one in seen.values():
            assert (len(one.first_ms), len(one.chunk_ms)) == (4 * 3, 4 * 3 * 5)
            assert min(one.first_ms + one.chunk_ms) >= 0
            assert one.seconds > 3 * 4 * 4 / 200
        assert set(_added(seen, "gateway", "chunk_ms")) == {"p50", "p99"}
        assert cpu_s(pid) > 0
        bench.run(replace(ours, path="/nowhere/{name}"), 200.0)
        assert len(bench.errors) >= 4
