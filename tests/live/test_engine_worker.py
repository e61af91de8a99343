"""The loop around an engine: drains, superseded loads, bundles, refusals. The deterministic engine, no process."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_args

import pytest

from forge.live.child import GONE
from forge.live.engine_worker import EngineLoop
from forge.policies.sync import SyncMode
from forge.rollout.engine import Delta, EngineRequest, Sampling
from forge.rollout.fake_engine import FakeEngine

#: Tokens of a request that is still running when the next message arrives, however slow this machine is.
LONG = 20_000


class Harness:
    """The loop in a thread, spoken to as its parent would."""

    def __init__(self, slots: int = 2) -> None:
        ours, theirs = Pipe()
        self.pipe: Connection = ours
        self.engine = FakeEngine(slots=slots, max_context=2 * LONG, vocab_size=8)
        self._thread = threading.Thread(target=self._run, args=(theirs,), daemon=True)
        self._thread.start()
        assert self.pipe.recv()[0] == "ready"

    def _run(self, pipe: Connection) -> None:
        try:
            EngineLoop(pipe, self.engine).run()
        except GONE:  # end of file, or a reset where messages lay unread: the parent went
            pipe.close()

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()
        self._thread.join(5)
        assert not self._thread.is_alive()

    def add(self, name: str, tokens: int) -> None:
        request = EngineRequest(id=name, prompt_ids=(1, 2), sampling=Sampling(max_tokens=tokens))
        self.pipe.send(("add", request))

    def until(self, wanted: int, kind: str) -> list[tuple[Any, ...]]:
        """Messages up to the `wanted`-th of this kind."""
        got: list[tuple[Any, ...]] = []
        while sum(m[0] == kind for m in got) < wanted:
            assert self.pipe.poll(10), got
            got.append(self.pipe.recv())
        return got

    def finished(self, names: set[str]) -> list[tuple[Any, ...]]:
        got: list[tuple[Any, ...]] = []
        while names:
            assert self.pipe.poll(10), got
            got.append(self.pipe.recv())
            if got[-1][0] == "deltas":
                names = names - {d.id for d in got[-1][1] if d.finish}
        return got


def deltas_of(messages: list[tuple[Any, ...]], name: str) -> list[Delta]:
    return [d for m in messages if m[0] == "deltas" for d in m[1] if d.id == name]


def test_every_token_arrives_once_in_order_however_bundled() -> None:
    with Harness() as loop:
        loop.add("a", 30)
        loop.add("b", 5)
        got = loop.finished({"a", "b"})
        for name, tokens in (("a", 30), ("b", 5)):
            mine = deltas_of(got, name)
            assert sum(len(d.token_ids) for d in mine) == tokens
            assert all(len(d.token_ids) == len(d.logprobs) == len(d.versions) for d in mine)
            assert [d.finish for d in mine if d.finish] == ["length"]
        assert len(deltas_of(got, "a")) < 30, "nothing was bundled"


def test_a_drain_holds_new_requests_back_until_the_running_ones_are_done() -> None:
    with Harness() as loop:
        loop.add("old", LONG)
        loop.pipe.send(("load", None, 7, "drain"))
        loop.add("new", 3)
        got = loop.finished({"old", "new"})
        kinds = [m[0] for m in got]
        at = kinds.index("loaded")
        assert got[at][1] == 7
        assert {v for d in deltas_of(got, "old") for v in d.versions} == {0}
        assert {v for d in deltas_of(got, "new") for v in d.versions} == {7}
        assert deltas_of(got[:at], "old")[-1].finish == "length"


def test_in_flight_a_running_request_goes_on_under_the_new_version() -> None:
    with Harness() as loop:
        loop.add("a", LONG)
        loop.until(1, "deltas")
        loop.pipe.send(("load", None, 3, "in_flight"))
        got = loop.finished({"a"})
        versions = [v for d in deltas_of(got, "a") for v in d.versions]
        assert versions == sorted(versions)
        assert versions[-1] == 3


def test_an_abort_loads_at_once_and_computes_anew_what_was_running() -> None:
    with Harness() as loop:
        loop.add("a", LONG)
        loop.until(1, "deltas")
        loop.pipe.send(("load", None, 3, "abort"))
        loop.add("b", 2)
        got = loop.finished({"a", "b"})
        mine = deltas_of(got, "a")
        at = next(i for i, m in enumerate(got) if m[0] == "loaded")
        assert not any(d.finish for d in deltas_of(got[:at], "a")), "it did not wait"
        versions = [v for d in mine for v in d.versions]
        # The first token came before the load and was read by `until`: no token is lost or sampled twice.
        assert len(versions) == LONG - 1
        old = versions.count(0) + 1
        assert versions == sorted(versions)
        assert versions[-1] == 3
        assert loop.engine.stats.decode_tokens == LONG + 2
        assert loop.engine.stats.prefill_tokens == 2 + 2 + (2 + old), "prompts, and what ran under the old weights"


def test_a_held_request_can_be_cancelled() -> None:
    with Harness() as loop:
        loop.add("old", LONG)
        loop.pipe.send(("load", None, 1, "drain"))
        loop.add("held", 3)
        loop.pipe.send(("cancel", "held"))
        got = loop.finished({"old", "held"})
        (only,) = deltas_of(got, "held")
        assert only.finish == "cancelled"


def test_what_the_engine_refuses_is_told_and_the_loop_goes_on(tmp_path: Path) -> None:
    with Harness() as loop:
        loop.pipe.send(("add", EngineRequest(id="long", prompt_ids=(1,) * 2 * LONG, sampling=Sampling())))
        ((_, name, text),) = loop.until(1, "refused")
        assert (name, str(2 * LONG) in text) == ("long", True)
        loop.pipe.send(("load", tmp_path / "nowhere", 2, "in_flight"))
        ((_, version, _),) = loop.until(1, "load_failed")
        assert version == 2
        loop.add("a", 2)
        assert {v for d in deltas_of(loop.finished({"a"}), "a") for v in d.versions} == {0}


@pytest.mark.parametrize("mode", get_args(SyncMode))
def test_a_load_with_nothing_to_do_is_done_at_once(mode: SyncMode) -> None:
    with Harness() as loop:
        loop.pipe.send(("load", None, 5, mode))
        ((_, version, _),) = loop.until(1, "loaded")
        assert version == 5
