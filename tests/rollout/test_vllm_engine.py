"""The vLLM engine against a deterministic server that speaks as much of vLLM's HTTP as Forge uses."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_vllm import FakeVllm, token_at
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from forge.rollout.engine import Delta, Engine, EngineDied, EngineError, EngineRequest, Sampling
from forge.rollout.vllm import client
from forge.rollout.vllm.engine import VllmEngine
from forge.types import ForgeError

VOCAB = 40
CONTEXT = 64


def model(folder: Path, *, rows: int = 3, name: str = "w") -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: np.zeros((rows, 2), np.float32)}, folder / "model.safetensors")
    save_file({"moments": np.zeros(2, np.float32)}, folder / "optimizer.safetensors")
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
    return folder


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    one = FakeVllm(VOCAB, max_context=CONTEXT)
    yield one
    one.stop()


@pytest.fixture
def engine(server: FakeVllm, tmp_path: Path) -> Iterator[VllmEngine]:
    one = VllmEngine(server, model(tmp_path / "model"), tmp_path, slots=4, max_context=CONTEXT)
    yield one
    one.close()


def request(name: str, prompt: tuple[int, ...] = (3, 1, 4), **sampling: object) -> EngineRequest:
    return EngineRequest(id=name, prompt_ids=prompt, sampling=Sampling(**{"max_tokens": 8, **sampling}))  # type: ignore[arg-type]


def drain(engine: Engine) -> list[Delta]:
    deltas: list[Delta] = []
    while sum(engine.load_in_flight):
        deltas += engine.step()
    return deltas


def until(engine: Engine, tokens: int) -> list[Delta]:
    deltas: list[Delta] = []
    while sum(len(d.token_ids) for d in deltas) < tokens:
        deltas += engine.step()
    return deltas


def joined(deltas: list[Delta], name: str) -> Delta:
    mine = [d for d in deltas if d.id == name]
    assert [d.finish for d in mine[:-1]] == [None] * (len(mine) - 1)
    return Delta(
        id=name,
        token_ids=tuple(t for d in mine for t in d.token_ids),
        logprobs=tuple(p for d in mine for p in d.logprobs),
        versions=tuple(v for d in mine for v in d.versions),
        finish=mine[-1].finish,
    )


def expected(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(token_at(prompt, len(prompt) + i, VOCAB) for i in range(count))


def test_it_is_an_engine_and_idle_steps_do_nothing(engine: VllmEngine) -> None:
    assert isinstance(engine, Engine)
    assert (engine.version, engine.slots, engine.max_context, engine.load_in_flight) == (0, 4, CONTEXT, (0, 0))
    assert engine.step() == []
    assert engine.stats.steps == 0


def test_more_requests_than_slots_end_whole_in_the_order_they_came(engine: VllmEngine, server: FakeVllm) -> None:
    prompts = {f"r{i}": tuple(range(1, 3 + i)) for i in range(10)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt))
    assert engine.load_in_flight == (0, 10)
    deltas = []
    while sum(engine.load_in_flight):
        deltas += engine.step()
        assert engine.load_in_flight[0] <= 4
    for name, prompt in prompts.items():
        whole = joined(deltas, name)
        assert (whole.token_ids, whole.finish, whole.versions) == (expected(prompt, 8), "length", (0,) * 8)
        assert whole.logprobs == pytest.approx(
            [-0.01 * (len(prompt) + i) - token for i, token in enumerate(whole.token_ids)]
        )
    asked = [b["request_id"].partition("~")[0] for b in server.bodies]
    assert sorted(asked) == sorted(prompts), "each one once"
    assert all(abs(asked.index(name) - i) < 4 for i, name in enumerate(prompts)), "first come, first served"
    assert engine.stats.decode_tokens == 80
    assert engine.stats.prefill_tokens + engine.stats.cached_tokens == sum(map(len, prompts.values()))


def test_what_the_server_is_asked(engine: VllmEngine, server: FakeVllm) -> None:
    engine.add(request("a", (1, 2), max_tokens=5, temperature=0.7, top_p=0.9, stop_ids=(39,), seed=11))
    drain(engine)
    (body,) = server.bodies
    assert body["token_ids"] == [1, 2]
    asked = body["sampling_params"]
    assert (asked["temperature"], asked["top_p"], asked["seed"]) == (0.7, 0.9, 11)
    assert (asked["max_tokens"], asked["stop_token_ids"]) == (5, [39])
    assert asked["ignore_eos"], "nothing but our stop ids may end it"


def test_a_stop_token_is_kept_and_the_context_limit_is_length(engine: VllmEngine) -> None:
    engine.add(request("stop", (3, 1, 4), stop_ids=(expected((3, 1, 4), 3)[-1],)))
    engine.add(request("full", (1,) * (CONTEXT - 3), max_tokens=50))
    deltas = drain(engine)
    assert joined(deltas, "stop").token_ids == expected((3, 1, 4), 3)
    assert joined(deltas, "stop").finish == "stop"
    assert (len(joined(deltas, "full").token_ids), joined(deltas, "full").finish) == (3, "length")


@pytest.mark.parametrize(
    "bad", [request("x", ()), request("x", (VOCAB,)), request("x", (1,) * CONTEXT), request("x", top_p=0.0)]
)
def test_a_bad_request_is_refused_here(engine: VllmEngine, server: FakeVllm, bad: EngineRequest) -> None:
    with pytest.raises(EngineError):
        engine.add(bad)
    assert engine.load_in_flight == (0, 0)
    assert server.bodies == []


def test_a_duplicate_is_refused_only_in_flight(engine: VllmEngine) -> None:
    for _ in range(2):
        engine.add(request("a"))
        with pytest.raises(EngineError, match="'a'"):
            engine.add(request("a"))
        until(engine, 1)
        with pytest.raises(EngineError, match="'a'"):
            engine.add(request("a"))
        drain(engine)


def test_cancelled_requests_end_once_and_leave_the_server(engine: VllmEngine, server: FakeVllm) -> None:
    server.tick_s = 0.02
    for i in range(5):
        engine.add(request(f"r{i}", max_tokens=50))
    until(engine, 4)
    for name in ("r0", "r4", "r4", "unknown"):
        engine.cancel(name)
    deltas = drain(engine)
    assert [d for d in deltas if d.finish == "cancelled"] == [
        Delta(id="r0", finish="cancelled"),
        Delta(id="r4", finish="cancelled"),
    ]
    assert len(server.bodies) == 4, "r4 was still queued here"
    for _ in range(200):
        if server.engine.load_in_flight == (0, 0):
            return
        drain(engine)
    pytest.fail("the server still samples what was hung up")


def test_in_flight_weights_reach_running_requests_and_the_spans_say_where(
    engine: VllmEngine, server: FakeVllm, tmp_path: Path
) -> None:
    server.tick_s = 0.01
    engine.add(request("a", max_tokens=40))
    before = until(engine, 4)
    engine.load(model(tmp_path / "step-1"), 7)
    assert engine.version == 7
    engine.add(request("b", max_tokens=3))
    whole = [*before, *drain(engine)]
    a, b = joined(whole, "a"), joined(whole, "b")
    assert a.token_ids == expected((3, 1, 4), 40), "no token is lost or doubled"
    assert list(a.versions) == sorted(a.versions)
    assert {0, 7} == set(a.versions)
    assert set(b.versions) == {7}
    held = [d for d in whole if d.id == "a" and 7 in d.versions]
    assert len(held) == 1, "tokens whose weights are not yet known were handed out"
    assert server.loaded == ["config.json,model.safetensors"], "the optimiser's tensors are no weights"


def test_no_block_crosses_versions(engine: VllmEngine, tmp_path: Path) -> None:
    prompt = tuple(range(1, 14))
    counts = []
    for version in (0, 0, 3, 3, 4):
        if version != engine.version:
            engine.load(model(tmp_path / "m") if version == 3 else None, version)
        before = engine.stats.cached_tokens
        engine.add(request("a", prompt))
        drain(engine)
        counts.append(engine.stats.cached_tokens - before)
    assert counts == [0, 12, 0, 12, 0]


def test_a_load_that_recomputes_goes_on_from_what_was_handed_out(
    engine: VllmEngine, server: FakeVllm, tmp_path: Path
) -> None:
    server.tick_s = 0.01
    engine.add(request("a", max_tokens=30))
    before = until(engine, 4)
    count = sum(len(d.token_ids) for d in before)
    engine.load(model(tmp_path / "m"), 1, recompute=True)
    whole = joined([*before, *drain(engine)], "a")
    assert whole.token_ids == expected((3, 1, 4), 30)
    assert whole.versions == (0,) * count + (1,) * (30 - count)
    assert server.bodies[-1]["token_ids"] == [3, 1, 4, *whole.token_ids[:count]]
    assert server.bodies[0]["cache_salt"] != server.bodies[-1]["cache_salt"]


def test_weights_that_are_not_the_models_are_refused_and_change_nothing(
    engine: VllmEngine, server: FakeVllm, tmp_path: Path
) -> None:
    cut = model(tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-4])
    wrong = {
        "absent": tmp_path / "absent",
        "cut off": cut.parent,
        "shape": model(tmp_path / "shape", rows=4),
        "not in the served model": model(tmp_path / "name", name="v"),
    }
    for says, folder in wrong.items():
        with pytest.raises(EngineError, match=says):
            engine.load(folder, 5)
    assert (engine.version, server.loaded, server.label) == (0, [], "0")


def test_a_server_that_may_hold_half_of_the_weights_is_given_up(
    engine: VllmEngine, server: FakeVllm, tmp_path: Path
) -> None:
    server.faults.add("reload")
    with pytest.raises(EngineDied, match="out of memory"):
        engine.load(model(tmp_path / "good"), 5)
    assert not server.lives


def test_a_load_that_its_engine_dies_under_is_not_waited_for(
    engine: VllmEngine, server: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "HEALTH_S", 0.05)
    server.faults.add("dead")
    with pytest.raises(EngineDied, match="503"):
        engine.load(model(tmp_path / "good"), 5)


def test_a_checkpoint_that_is_removed_while_it_is_read_stays(engine: VllmEngine, tmp_path: Path) -> None:
    engine.load(model(tmp_path / "step-1"), 1)
    (tmp_path / "step-1" / "model.safetensors").unlink()
    assert (tmp_path / "weights" / "step-1" / "model.safetensors").stat().st_size > 0
    with pytest.raises(EngineError):
        engine.load(tmp_path / "step-1", 2)
    assert engine.version == 1


def test_a_server_that_dies_is_no_users_error(engine: VllmEngine, server: FakeVllm) -> None:
    server.tick_s = 0.05
    engine.add(request("a", max_tokens=50))
    until(engine, 1)
    server.lives = False
    with pytest.raises(EngineDied) as died:
        drain(engine)
    assert not isinstance(died.value, ForgeError)


def test_a_stream_that_breaks_under_a_healthy_server_is_begun_anew(engine: VllmEngine, server: FakeVllm) -> None:
    server.faults.add("cut once")
    engine.add(request("a", max_tokens=20))
    assert joined(drain(engine), "a").token_ids == expected((3, 1, 4), 20)
    assert [len(body["token_ids"]) for body in server.bodies] == [3, 4], "one token was handed out before"


def test_a_completion_under_a_grammar_comes_whole_and_begins_from_its_prompt(
    engine: VllmEngine, server: FakeVllm
) -> None:
    server.faults.add("cut once")
    engine.add(request("a", max_tokens=20, grammar='start: "x"'))
    (delta,) = drain(engine)
    assert (delta.id, delta.token_ids, delta.finish) == ("a", expected((3, 1, 4), 20), "length")
    engine.add(request("b"))
    drain(engine)
    bodies = [body for body in server.bodies if body["request_id"].startswith("a~")]
    assert [len(body["token_ids"]) for body in bodies] == [3, 3]
    assert [body["sampling_params"]["structured_outputs"] for body in bodies] == [{"grammar": 'start: "x"'}] * 2
    assert "structured_outputs" not in next(b for b in server.bodies if b["request_id"] == "b~1")["sampling_params"]


@pytest.mark.parametrize(("fault", "error"), [("cut", EngineDied), ("mislabel", EngineDied), ("refuse", EngineError)])
def test_faults_of_the_server_are_never_silent(
    engine: VllmEngine, server: FakeVllm, fault: str, error: type[Exception]
) -> None:
    server.faults.add(fault)
    engine.add(request("a"))
    with pytest.raises(error):
        drain(engine)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 7)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 7)),
        st.tuples(st.just("load"), st.integers(1, 3)),
        st.tuples(st.just("recompute"), st.integers(1, 3)),
    ),
    max_size=25,
)


@settings(max_examples=25, deadline=None)
@given(actions=ACTIONS, interval=st.integers(1, 5))
def test_any_interleaving(shared: tuple[VllmEngine, FakeVllm], actions: list[tuple[str, int]], interval: int) -> None:
    """Every request ends exactly once, no token is lost or doubled, versions never go back."""
    engine, server = shared
    server.interval = interval
    starts: Counter[str] = Counter()
    flying: set[str] = set()
    parts: dict[str, list[Delta]] = {}

    def step() -> None:
        for delta in engine.step():
            parts.setdefault(delta.id, []).append(delta)
            if delta.finish is not None:
                flying.remove(delta.id)
                check(joined(parts.pop(delta.id), delta.id))
                starts[delta.id] -= 1

    for action, number in actions:
        name = str(number)
        if action == "add" and name not in flying:
            engine.add(request(name, tuple(range(1, 2 + number)), max_tokens=3 + 5 * number))
            starts[name] += 1
            flying.add(name)
        elif action == "step":
            for _ in range(number):
                step()
        elif action == "cancel":
            engine.cancel(name)
        elif action in ("load", "recompute"):
            engine.load(None, engine.version + number, recompute=action == "recompute")
    while flying:
        step()
    assert engine.load_in_flight == (0, 0)
    assert not any(starts.values())


def check(whole: Delta) -> None:
    number = int(whole.id)
    wanted = expected(tuple(range(1, 2 + number)), 3 + 5 * number)
    assert len(whole.token_ids) == len(whole.logprobs) == len(whole.versions)
    assert whole.token_ids == (wanted[: len(whole.token_ids)] if whole.finish == "cancelled" else wanted)
    assert list(whole.versions) == sorted(whole.versions)
    assert all(math.isfinite(p) for p in whole.logprobs)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmEngine, FakeVllm]]:
    folder = tmp_path_factory.mktemp("vllm")
    server = FakeVllm(VOCAB, slots=3, max_context=CONTEXT)
    engine = VllmEngine(server, model(folder / "model"), folder, slots=3, max_context=CONTEXT)
    yield engine, server
    engine.close()
