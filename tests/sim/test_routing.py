"""Routers in parallel, what an instance says it has to compute, and the bench of routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest

from forge.instances import RouterView, pairs
from forge.policies import AnyRouter, RoundRobin
from sim import routing_bench
from sim.clock import to_fs
from sim.engine import Instance, Shape
from sim.iteration import LineTimes
from sim.request import Request
from sim.routing import NAMES, Pace, Size, part
from sim.routing_bench import FIGURES, Grid, run
from sim.serve import Row, Serving
from sim.sessions import Session, Step
from sim.traces.reading import Recorded

DATA = Path(__file__).parents[3] / "shared" / "data"
ROUTERS = get_args(get_args(AnyRouter)[0])
TIMES = LineTimes(step_s=0.01, row_s=0.001, prefill_token_s=1e-3)
SHAPE = Shape(block=16, capacity=2000, budget=64, seats=16)


def talks(sessions: int = 12, turns: int = 4) -> Recorded:
    """Conversations that grow, begun a quarter of a second apart."""
    return Recorded(
        16,
        tuple(
            Session(
                name=f"{i}",
                start_s=i / 4,
                steps=tuple(
                    Step(
                        prompt=160 * (turn + 1),
                        output=20,
                        path=((0, 4), (1 + i, 10 * (turn + 1) - 4)),
                        after=(turn - 1,) if turn else (),
                        delay_s=0.3 if turn else 0.0,
                    )
                    for turn in range(turns)
                ),
            )
            for i in range(sessions)
        ),
    )


def serve(*routers: Any, seed: int = 0) -> list[Row]:
    fleet = [Instance(TIMES, SHAPE, listen=True) for _ in range(3)]
    return Serving(talks(), fleet, routers[0], beside=routers[1:], period_s=0.2, delay_s=0.1, seed=seed).run()


class Spy:
    """Spreads requests, and notes what it sees."""

    reads_load: ClassVar[bool] = True

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.flights: list[int] = []
        self.others: list[int] = []
        self._way = RoundRobin()

    def route(self, view: RouterView) -> int:
        self.sent.append(view.trajectory)
        self.flights.append(sum(seen.in_flight for seen in view.instances))
        self.others.append(sum(seen.others for seen in view.instances))
        return self._way.route(view)


def test_routers_in_parallel_see_their_own_and_reports_of_the_rest() -> None:
    spies = [Spy() for _ in range(4)]
    rows = serve(*spies)
    assert len(rows) == 48
    for number, spy in enumerate(spies):
        assert set(spy.sent) == {str(i) for i in range(12) if i % 4 == number}, "a session stays with its router"
        assert len(spy.sent) == 12
        assert max(spy.flights) <= 3, "its sessions send one request at a time"
    assert max(max(spy.others) for spy in spies) > 3
    alone = Spy()
    serve(alone)
    assert max(alone.flights) > 3
    assert not any(alone.others), "all that instances have came from it"


@pytest.mark.parametrize("cls", ROUTERS)
def test_a_run_is_a_function_of_its_seed(cls: type[Any]) -> None:
    assert serve(cls(), cls(), seed=3) == serve(cls(), cls(), seed=3)


def test_an_instance_knows_what_it_has_to_compute() -> None:
    instance = Instance(TIMES, SHAPE)
    instance.add(Request("a", 200, 5), 0)
    assert instance.queued(0) == (200, pairs(200, 200))
    instance.advance(0)
    instance.add(Request("b", 100, 5), 1)
    now = to_fs(0.16)  # two chunks of 64 at 0.075 s each are done
    instance.sync(now)
    assert instance.queued(now) == (72 + 100, pairs(72, 200) + pairs(100, 100))


def test_parts_of_a_trace_are_its_seeds() -> None:
    trace, size = talks(40, 1), Size(keep=0.5, sessions=10, requests=2)
    one, same, other = (part("mooncake", trace, seed, size, Pace(speed=2.0)) for seed in (1, 1, 2))
    assert one == same != other
    assert {session.start_s * 2.0 for session in one.recorded} <= {i / 4 for i in range(40)}
    cut = part("claude_code", talks(), 1, size, Pace(concurrency=2))
    assert [len(session.steps) for session in cut.recorded] == [2] * 10


def test_without_data_the_figures_are_null_and_say_why() -> None:
    result = run(None, routing_bench.QUICK, lambda *_: None)
    assert result["figures"] == dict.fromkeys(FIGURES)
    assert set(result["reasons"]) == set(FIGURES)
    assert all("conversation_trace.jsonl" in reason for reason in result["reasons"].values())


@pytest.mark.skipif(not (DATA / "mooncake").is_dir(), reason=f"{DATA}: no public traces here")
def test_the_bench_compares_all_routers_on_what_data_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mooncake").symlink_to(DATA / "mooncake")
    monkeypatch.setattr("forge.compiled.ensure", lambda: None)
    grid = Grid(
        loads=(0.8,),
        routers=(2,),
        signals_s=(1.0,),
        seeds=(1, 2),
        size=Size(keep=0.02, sessions=10, requests=4),
    )
    told: list[tuple[int, int]] = []
    result = run(tmp_path, grid, lambda done, of: told.append((done, of)))
    assert told[-1] == (2 * len(NAMES),) * 2
    assert result["figures"]["cells"] == 1
    assert list(result["left_out"]) == ["claude_code"]
    for row in result["rows"]:
        assert set(row["routers_compared"]) == set(NAMES)
        assert len({one["requests"] for one in row["routers_compared"].values()}) == 1, "the same work"
        best = row["routers_compared"][row["best_baseline"]]["ttft_s"]
        assert row["gain"] == pytest.approx(1 - row["routers_compared"]["seconds"]["ttft_s"] / best)
