"""The `Engine` contract, against every implementation."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from engine_support import CONTEXT, ENGINES, VOCAB, drain, join, make_model, request, save
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.rollout.engine import Delta, Engine, EngineError, EngineRequest
from forge.rollout.fake_engine import FakeEngine
from forge.rollout.torch_engine import TorchEngine

Make = Callable[..., Engine]


@pytest.fixture(params=sorted(ENGINES))
def make(request: pytest.FixtureRequest) -> Make:
    return ENGINES[request.param]


def test_is_an_engine(make: Make) -> None:
    engine = make(version=3)
    assert isinstance(engine, Engine)
    assert (engine.version, engine.slots, engine.max_context) == (3, 4, CONTEXT)
    assert engine.load_in_flight == (0, 0)


def test_the_fake_needs_no_torch() -> None:
    check = "import sys, forge.rollout.fake_engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_a_scripted_fake_says_its_completions_in_turn() -> None:
    engine = FakeEngine([(1, 2, 3), (4,)], logprob=lambda _, index, token: -0.1 * token - index, step_s=0.5)
    for i in range(3):
        engine.add(request(str(i), prompt=(9,)))
    done = drain(engine)
    assert [done[str(i)].token_ids for i in range(3)] == [(1, 2, 3), (4,), (1, 2, 3)]
    assert {delta.finish for delta in done.values()} == {"stop"}
    assert done["0"].logprobs == pytest.approx((-0.1, -1.2, -2.3))
    assert (engine.stats.steps, engine.stats.busy_s) == (3, 1.5)
    with pytest.raises(EngineError, match="completion"):
        FakeEngine([])


def test_a_fake_script_sees_prompt_index_and_draw() -> None:
    engine = FakeEngine(lambda prompt, index, draw: prompt[0] + index + int(draw < 0.5))
    engine.add(request("a", prompt=(20, 1), max_tokens=30))
    extra = {token - 20 - index for index, token in enumerate(drain(engine)["a"].token_ids)}
    assert extra == {0, 1}


def test_idle_step_does_nothing(make: Make) -> None:
    engine = make()
    assert engine.step() == []
    assert engine.stats.steps == 0


def test_one_request_from_start_to_end(make: Make) -> None:
    engine = make(version=2)
    engine.add(request("a", max_tokens=5))
    assert engine.load_in_flight == (0, 1)
    steps = []
    while engine.load_in_flight != (0, 0):
        steps.append(engine.step())
    assert all(len(delta.token_ids) <= 1 for step in steps for delta in step)
    done = join([delta for step in steps for delta in step])["a"]
    assert done.finish == "length"
    assert len(done.token_ids) == len(done.logprobs) == 5
    assert done.versions == (2,) * 5
    assert all(0 <= token < VOCAB for token in done.token_ids)
    assert all(math.isfinite(logprob) and logprob <= 1e-6 for logprob in done.logprobs)


def test_stop_token_is_kept_and_ends(make: Make) -> None:
    engine = make()
    engine.add(request("a", max_tokens=8, seed=1))
    free = drain(engine)["a"].token_ids
    stop = free[3]
    engine.add(request("b", max_tokens=8, seed=1, stop_ids=(stop,)))
    done = drain(engine)["b"]
    assert done.finish == "stop"
    assert done.token_ids == free[: free.index(stop) + 1]


def test_stop_on_the_last_allowed_token_is_stop(make: Make) -> None:
    engine = make()
    engine.add(request("a", max_tokens=1, stop_ids=tuple(range(VOCAB))))
    assert drain(engine)["a"].finish == "stop"


def test_context_limit_ends_with_length(make: Make) -> None:
    engine = make()
    engine.add(request("a", prompt=(1,) * (CONTEXT - 3), max_tokens=100))
    engine.add(request("b", prompt=(1,) * (CONTEXT - 1), max_tokens=100))
    done = drain(engine)
    assert {key: (len(delta.token_ids), delta.finish) for key, delta in done.items()} == {
        "a": (3, "length"),
        "b": (1, "length"),
    }


def test_admission_is_first_come_first_served(make: Make) -> None:
    engine = make(slots=2)
    for i in range(6):
        engine.add(request(str(i), max_tokens=3))
    assert engine.load_in_flight == (0, 6)
    first_seen: list[str] = []
    most = 0
    while engine.load_in_flight != (0, 0):
        deltas = engine.step()
        most = max(most, len(deltas), engine.load_in_flight[0])
        first_seen += [delta.id for delta in deltas if delta.id not in first_seen]
    assert first_seen == [str(i) for i in range(6)]
    assert most == 2


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (request("x", prompt=()), "empty"),
        (request("x", prompt=(1, VOCAB)), str(VOCAB)),
        (request("x", prompt=(-1,)), "-1"),
        (request("x", prompt=(1,) * CONTEXT), str(CONTEXT)),
        (request("x", stop_ids=(VOCAB,)), str(VOCAB)),
        (request("x", max_tokens=0), "max_tokens"),
        (request("x", temperature=-1.0), "temperature"),
        (request("x", temperature=math.nan), "temperature"),
        (request("x", top_p=0.0), "top_p"),
        (request("x", top_p=1.5), "top_p"),
    ],
)
def test_bad_request_is_refused_and_changes_nothing(make: Make, bad: EngineRequest, says: str) -> None:
    engine = make()
    with pytest.raises(EngineError, match=says):
        engine.add(bad)
    assert engine.load_in_flight == (0, 0)
    engine.add(request("x", max_tokens=1))
    assert drain(engine)["x"].finish == "length"


def test_duplicate_id_is_refused_only_in_flight(make: Make) -> None:
    engine = make()
    engine.add(request("a", max_tokens=2))
    with pytest.raises(EngineError, match="'a'"):
        engine.add(request("a"))
    engine.step()
    with pytest.raises(EngineError, match="'a'"):
        engine.add(request("a"))
    drain(engine)
    engine.add(request("a", max_tokens=2))
    assert drain(engine)["a"].finish == "length"


def test_cancel_running_queued_unknown_and_finished(make: Make) -> None:
    engine = make(slots=1)
    engine.add(request("running", max_tokens=40))
    engine.add(request("queued", max_tokens=40))
    engine.add(request("next", max_tokens=1))
    engine.step()
    engine.cancel("running")
    engine.cancel("queued")
    engine.cancel("queued")
    engine.cancel("unknown")
    deltas = engine.step()
    assert {d for d in deltas if d.finish == "cancelled"} == {
        Delta(id="running", finish="cancelled"),
        Delta(id="queued", finish="cancelled"),
    }
    drain(engine)
    engine.cancel("next")
    assert engine.step() == []


def test_relabel_versions_tokens_of_running_requests(make: Make) -> None:
    engine = make(version=1)
    engine.add(request("a", max_tokens=4, seed=5))
    reference = make()
    reference.add(request("a", max_tokens=4, seed=5))
    deltas = engine.step() + engine.step()
    engine.load(None, 7)
    assert engine.version == 7
    done = join([*deltas, *drain(engine).values()])["a"]
    assert done.versions == (1, 1, 7, 7)
    assert done.token_ids == drain(reference)["a"].token_ids


def test_load_of_a_missing_folder_changes_nothing(make: Make, tmp_path: Path) -> None:
    engine = make(version=1)
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(EngineError, match=str(folder)):
            engine.load(folder, 2)
    assert engine.version == 1


@pytest.mark.parametrize(("kind", "weights"), [("llama", "llama"), ("qwen2", "qwen2"), ("fake", "llama")])
def test_load_takes_the_version(kind: str, weights: str, tmp_path: Path) -> None:
    engine = ENGINES[kind]()
    engine.load(save(make_model(weights), tmp_path), 4)
    assert engine.version == 4


#: More than slots; one prompt is longer than a step prefills, and two share theirs.
GOING_ON = {"a": (3, 1, 4), "b": tuple(range(30)), "c": (5,) * 9, "d": (5,) * 9 + (6,), "e": (2, 7)}


def interrupted(kind: str, folder: Path, steps: int, *, recompute: bool) -> tuple[dict[str, Delta], dict[str, Delta]]:
    """What every request of `GOING_ON` had sampled when other weights came after some steps, and all it sampled."""
    engine = with_weights(kind, seed=0)
    for name, prompt in GOING_ON.items():
        engine.add(request(name, prompt=prompt, max_tokens=10, temperature=0.0))
    parts = [delta for _ in range(steps) for delta in engine.step()]
    engine.load(folder, 1, recompute=recompute)
    return join(parts), join([*parts, *drain(engine).values()])


def continuation(kind: str, prompt: tuple[int, ...], tokens: int) -> Delta:
    """Of an engine that has only ever known the new weights."""
    engine = with_weights(kind, seed=7)
    engine.add(request("x", prompt=prompt, max_tokens=tokens, temperature=0.0))
    return drain(engine)["x"]


def with_weights(kind: str, seed: int) -> Engine:
    if kind == "fake":
        return FakeEngine(lambda prompt, index, _: (sum(prompt[:2]) + len(prompt) + index) % VOCAB, slots=4)
    return TorchEngine(make_model(kind, seed), slots=4, max_context=CONTEXT, prefill_chunk=16)


@pytest.mark.parametrize("kind", sorted(ENGINES))
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_a_load_that_recomputes_goes_on_as_a_fresh_engine_would_from_what_was_sampled(
    kind: str, steps: int, tmp_path: Path
) -> None:
    folder = save(make_model("llama" if kind == "fake" else kind, seed=7), tmp_path)
    before, after = interrupted(kind, folder, steps, recompute=True)
    assert set(after) == set(GOING_ON)
    assert before, "nothing was running"
    for name, prompt in GOING_ON.items():
        sampled, whole = before.get(name, Delta(id=name)), after[name]
        count = len(sampled.token_ids)
        assert whole.token_ids[:count] == sampled.token_ids
        assert whole.logprobs[:count] == sampled.logprobs
        assert whole.versions == (0,) * count + (1,) * (10 - count)
        expected = continuation(kind, prompt + sampled.token_ids, 10 - count)
        assert whole.token_ids[count:] == expected.token_ids
        assert whole.logprobs[count:] == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_load_in_flight_goes_on_with_the_old_weights_kv(kind: str, tmp_path: Path) -> None:
    folder = save(make_model(kind, seed=7), tmp_path)
    before, after = interrupted(kind, folder, 3, recompute=False)
    differences = []
    for name, sampled in before.items():
        count = len(sampled.token_ids)
        expected = continuation(kind, GOING_ON[name] + sampled.token_ids, 1)
        differences.append(abs(after[name].logprobs[count] - expected.logprobs[0]))
        assert after[name].versions == (0,) * count + (1,) * (10 - count)
    assert min(differences) > 1e-2


def test_tokens_computed_anew_are_prefilled_again(make: Make) -> None:
    engine = make(slots=2)
    for name in ("a", "b", "queued"):
        engine.add(request(name, prompt=(3, 1, int(name == "b"), 9), max_tokens=5))
    deltas = [*engine.step(), *engine.step(), *engine.step()]
    before = engine.stats.prefill_tokens + engine.stats.cached_tokens
    assert before == 8
    engine.load(None, 1, recompute=True)
    assert engine.load_in_flight == (2, 1)
    deltas += engine.step()
    assert engine.stats.prefill_tokens + engine.stats.cached_tokens == before + 2 * (4 + 3)
    assert Counter(delta.id for delta in deltas) == {"a": 4, "b": 4}, "the step that recomputes also samples"
    drain(engine)
    assert engine.stats.decode_tokens == 15


def test_stats_count_each_token_once(make: Make) -> None:
    engine = make()
    for i in range(6):
        engine.add(request(str(i), prompt=(i, i + 1, i + 2), max_tokens=i + 1))
    drain(engine)
    stats = engine.stats
    assert stats.prefill_tokens + stats.cached_tokens == 18
    assert stats.decode_tokens == 21
    assert stats.steps >= 6


def test_seeds_and_the_lack_of_them(make: Make) -> None:
    def run(engine_seed: int, seed: int | None) -> list[tuple[int, ...]]:
        engine = make(seed=engine_seed)
        for i in range(3):
            engine.add(request(str(i), max_tokens=12, seed=seed))
        return [delta.token_ids for _, delta in sorted(drain(engine).items())]

    unseeded = run(0, None)
    assert unseeded == run(0, None)
    assert len(set(unseeded)) == 3
    assert unseeded != run(1, None)
    assert len(set(run(0, 9))) == 1
    assert run(0, 9) == run(1, 9)
    assert run(0, 9) != run(0, 10)


# Any interleaving

#: Requests of mixed lengths, temperatures and prompts; some share prefixes, so that KV is reused.
REQUESTS = [
    request(
        str(i),
        prompt=tuple(range(1, 2 + (7 * i) % 23)) + (i,) * (i % 3),
        max_tokens=1 + (5 * i) % 9,
        temperature=(1.0, 0.7, 0.0)[i % 3],
        top_p=(1.0, 0.8)[i % 2],
        stop_ids=(i, i + 1),
        seed=i,
    )
    for i in range(12)
]


@cache
def alone(kind: str, index: int) -> Delta:
    engine = ENGINES[kind]()
    engine.add(REQUESTS[index])
    return drain(engine)[str(index)]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(REQUESTS) - 1)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, len(REQUESTS) - 1)),
        st.tuples(st.just("load"), st.integers(1, 3)),
        st.tuples(st.just("recompute"), st.integers(1, 3)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("kind", sorted(ENGINES))
@settings(max_examples=30, deadline=None, derandomize=True)
@given(actions=ACTIONS, slots=st.integers(1, 4))
def test_any_interleaving(kind: str, actions: list[tuple[str, int]], slots: int) -> None:
    """Every request ends exactly once, in versions that never go back, with what it would sample alone."""
    engine = ENGINES[kind](slots=slots)
    starts: Counter[str] = Counter()
    in_flight: set[str] = set()
    ended: list[Delta] = []
    parts: list[Delta] = []

    def step() -> None:
        for delta in engine.step():
            parts.append(delta)
            if delta.finish is not None:
                whole = join([part for part in parts if part.id == delta.id])[delta.id]
                parts[:] = [part for part in parts if part.id != delta.id]
                ended.append(whole)
                in_flight.remove(delta.id)
        running, queued = engine.load_in_flight
        assert running <= slots
        assert running + queued == len(in_flight)

    for action, number in actions:
        if action == "add" and str(number) not in in_flight:
            engine.add(REQUESTS[number])
            starts[str(number)] += 1
            in_flight.add(str(number))
        elif action == "step":
            for _ in range(number):
                step()
        elif action == "cancel":
            engine.cancel(str(number))
        elif action in ("load", "recompute"):
            engine.load(None, engine.version + number, recompute=action == "recompute")
    while in_flight:
        step()

    assert Counter(delta.id for delta in ended) == starts
    for delta in ended:
        expected = alone(kind, int(delta.id))
        assert list(delta.versions) == sorted(delta.versions)
        assert delta.token_ids == expected.token_ids[: len(delta.token_ids)]
        assert delta.logprobs == pytest.approx(expected.logprobs[: len(delta.logprobs)], abs=1e-4)
        assert delta.finish in ("cancelled", expected.finish)
