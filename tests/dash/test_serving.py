"""The page on traces: bounded, fair to both routers, and a sentence for what cannot be served."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from dashboards import uploads
from dashboards.serving import Fleet, cut, defaults, figures, hits, loads, router, serve
from forge.types import ForgeError
from sim.routing import cost
from sim.traces.reading import Recorded
from sim.tunable import kinds_of

FLEET = Fleet(instances=2)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Conversations that grow by two blocks a turn, five of them by turns."""
    rows = [
        {
            "timestamp": 400 * i,
            "input_length": 512 * blocks + 7,
            "output_length": 20,
            "hash_ids": [1000 * (i % 5) + b for b in range(blocks)],
        }
        for i in range(60)
        for blocks in [2 + 2 * (i // 5)]
    ]
    path = tmp_path_factory.mktemp("trace") / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return uploads.workload(path)


def test_a_cut_is_said(trace: Recorded) -> None:
    some, note = cut(trace, 10)
    assert sum(len(session.steps) for session in some.recorded) == 10
    assert note == "Served are the first 10 of 60 requests."
    assert cut(trace, 60) == (trace, "")


@pytest.mark.parametrize("kind", list(kinds_of("router")))
def test_every_router_serves_every_request_once(trace: Recorded, kind: str) -> None:
    served = serve(trace, FLEET, router(kind, defaults(kind, FLEET)))
    assert len({(row.session, row.step) for row in served.rows}) == len(served.rows) == 60
    found = figures(served)
    assert 0.0 <= found["hit"] < 1.0 <= found["imbalance"]
    assert 0.0 < found["ttft_p50"] <= found["ttft_p99"]
    shares = hits(served.rows).columns["share"]
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert set(loads(served).columns["instance"]) == {0, 1}


def test_a_router_that_knows_prefixes_finds_more_of_them(trace: Recorded) -> None:
    aware, blind = (figures(serve(trace, FLEET, router(kind, {}))) for kind in ("cache_aware", "random"))
    assert aware["hit"] > blind["hit"]


def test_seconds_has_the_deployments_costs() -> None:
    own = defaults("seconds", Fleet())
    assert own["token_s"] == pytest.approx(5.7e-5, rel=0.1), "llama_3_1_70b on 8 h100_sxm, as its docstring says"
    assert cost().on.devices == 8
    assert defaults("random", Fleet()) == {}


@pytest.mark.parametrize(
    ("fleet", "complaint"),
    [
        (Fleet(tp=1), "llama_3_1_70b on 1 h100_sxm leaves no room for KV"),
        (Fleet(model="nothing"), "nothing"),
        (Fleet(budget=256), "budget = 256: must exceed seats"),
    ],
)
def test_what_does_not_fit_is_a_sentence(trace: Recorded, fleet: Fleet, complaint: str) -> None:
    with pytest.raises(ForgeError) as raised:
        serve(trace, fleet, router("random", {}))
    assert complaint in str(raised.value)


def test_what_takes_too_long_is_given_up(trace: Recorded) -> None:
    many = Recorded(trace.block, trace.recorded * 2)
    with pytest.raises(ForgeError, match="lower the number of requests"):
        serve(many, FLEET, router("random", {}), longest_s=0.0)


def test_a_closed_loop_holds_its_concurrency(trace: Recorded) -> None:
    served = serve(trace, Fleet(instances=2, concurrency=1), router("random", {}))
    rows = sorted(served.rows, key=lambda row: row.arrived)
    assert all(a.ended <= b.arrived for a, b in pairwise(rows))
