"""The torch engine against transformers: same tokens, same probabilities, with and without reuse of KV."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_support import CONTEXT, VOCAB, drain, join, make_model, plain_model, request, save, shared_model
from safetensors.torch import load_file, save_file
from transformers import MistralConfig, MistralForCausalLM

from forge.rollout.engine import Delta, EngineError
from forge.rollout.requests import draws, request_key
from forge.rollout.sampler import sample
from forge.rollout.torch_engine import TorchEngine

KINDS = ("llama", "qwen2")


def engine_of(model: Any, **options: Any) -> TorchEngine:
    return TorchEngine(model, **{"slots": 4, "max_context": CONTEXT, "prefill_chunk": 16} | options)


def prompts(count: int, seed: int = 0, longest: int = 30) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))) for _ in range(count)]


@torch.inference_mode()
def reference_logprobs(
    model: Any, prompt: tuple[int, ...], sampled: tuple[int, ...], temperature: float = 1.0, top_p: float = 1.0
) -> list[float]:
    """One plain forward over the whole sequence; top_p by an independent loop over the sorted tokens."""
    logits = model(torch.tensor([prompt + sampled]), use_cache=False).logits[0].double() / temperature
    chosen = []
    for position, token in enumerate(sampled, start=len(prompt) - 1):
        probs = logits[position].softmax(-1)
        kept, mass = set(), 0.0
        for candidate in probs.argsort(descending=True).tolist():
            if mass >= top_p:
                break
            kept.add(candidate)
            mass += probs[candidate].item()
        assert token in kept
        chosen.append(float((probs[token] / (mass if top_p < 1 else 1.0)).log()))
    return chosen


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate(kind: str) -> None:
    model = make_model(kind, seed=1)
    work = prompts(6)
    expected = [
        model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=10)[0, len(prompt) :].tolist()
        for prompt in work
    ]
    engine = engine_of(model)
    for i, prompt in enumerate(work):
        engine.add(request(str(i), prompt=prompt, max_tokens=10, temperature=0.0))
    done = drain(engine)
    assert [list(done[str(i)].token_ids) for i in range(len(work))] == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9), (0.0, 0.9), (1.3, 0.5)])
def test_logprobs_are_those_of_a_plain_forward(kind: str, temperature: float, top_p: float) -> None:
    engine = engine_of(shared_model(kind))
    work = prompts(8, seed=2)
    for i, prompt in enumerate(work):
        engine.add(request(str(i), prompt=prompt, max_tokens=12, temperature=temperature, top_p=top_p, seed=i))
    done = drain(engine)
    # Greedy is reported under the plain softmax.
    scale, mass = (temperature, top_p) if temperature else (1.0, 1.0)
    for i, prompt in enumerate(work):
        delta = done[str(i)]
        expected = reference_logprobs(plain_model(kind), prompt, delta.token_ids, scale, mass)
        assert delta.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
def test_frequencies_match_the_probabilities(temperature: float, top_p: float) -> None:
    """Pearson's chi-square over 50k first draws, rare tokens pooled, against the 99.9th percentile."""
    count, prompt = 50_000, (5, 6)
    with torch.inference_mode():
        logits = plain_model("llama")(torch.tensor([prompt]), use_cache=False).logits[:, -1]
    keys = np.array([request_key(seed, 0, 0) for seed in range(count)], dtype=np.uint64)
    ids, logprobs = sample(
        logits.expand(count, -1),
        temperature=np.full(count, temperature, np.float32),
        top_p=np.full(count, top_p, np.float32),
        draws=draws(keys, np.zeros(count, np.int64)),
    )
    expected = {token: count * np.exp(logprob) for token, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True)}
    counts = np.bincount(ids, minlength=VOCAB)
    common = [token for token, number in expected.items() if number >= 5]
    terms = [(counts[token] - expected[token]) ** 2 / expected[token] for token in common]
    rare = count - sum(expected[token] for token in common)
    if rare >= 1:
        terms.append((count - counts[common].sum() - rare) ** 2 / rare)
    freedom = len(terms) - 1
    # Wilson and Hilferty's approximation of the chi-square percentile.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert freedom > 5
    assert sum(terms) < bound


def test_successive_draws_of_a_request_are_independent() -> None:
    """Pairs of neighbouring draws, and of the same draw of neighbouring seeds, fall evenly into four quarters."""
    keys = np.array([request_key(seed, 0, 0) for seed in range(400)], dtype=np.uint64)
    halves = draws(np.repeat(keys, 100), np.tile(np.arange(100), 400)).reshape(400, 100) >= 0.5
    for first, second in ((halves[:, :-1], halves[:, 1:]), (halves[:-1], halves[1:])):
        share = np.bincount((2 * first + second).ravel(), minlength=4) / first.size
        assert share == pytest.approx([0.25] * 4, abs=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_after_load_tokens_come_from_the_new_weights(kind: str, tmp_path: Path) -> None:
    new = make_model(kind, seed=8)
    folder = save(new, tmp_path)
    engine = engine_of(make_model(kind, seed=7))
    prompt = tuple(range(10))
    engine.add(request("old", prompt=prompt, max_tokens=6, temperature=0.0))
    drain(engine)
    engine.load(folder, 1)
    engine.add(request("new", prompt=prompt, max_tokens=6, seed=1))
    done = drain(engine)["new"]
    assert done.versions == (1,) * 6
    assert done.logprobs == pytest.approx(reference_logprobs(new, prompt, done.token_ids), abs=1e-4)


def test_a_running_request_keeps_its_kv_through_a_load(tmp_path: Path) -> None:
    old, new = make_model("llama", seed=7), make_model("llama", seed=8)
    engine = engine_of(make_model("llama", seed=7))
    engine.add(request("a", prompt=(1, 2, 3), max_tokens=6, seed=1))
    parts = engine.step() + engine.step() + engine.step()
    engine.load(save(new, tmp_path), 1)
    done = join([*parts, *drain(engine).values()])["a"]
    assert done.versions == (0, 0, 0, 1, 1, 1)
    assert done.logprobs[:3] == pytest.approx(reference_logprobs(old, (1, 2, 3), done.token_ids)[:3], abs=1e-4)
    # The last three come from the new weights over the old KV: from neither model alone.
    for model in (old, new):
        plain = reference_logprobs(model, (1, 2, 3), done.token_ids)[3:]
        assert done.logprobs[3:] != pytest.approx(plain, abs=1e-3)


def damage(file: Path, how: str) -> None:
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "missing":
        del tensors[name]
    elif how == "extra":
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
    elif how == "shape":
        tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, file)
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("how", ["missing", "extra", "shape", "truncated"])
def test_a_bad_file_leaves_the_old_weights(how: str, tmp_path: Path) -> None:
    folder = save(make_model("llama", seed=8), tmp_path)
    damage(folder / "model.safetensors", how)
    model = make_model("llama", seed=7)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = engine_of(model)
    with pytest.raises(EngineError, match=str(folder)):
        engine.load(folder, 1)
    assert engine.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_load_reads_shards_and_converts_the_dtype(tmp_path: Path) -> None:
    new = make_model("qwen2", seed=8).bfloat16()
    new.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = make_model("qwen2", seed=7)
    engine_of(model).load(tmp_path, 1)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, new.state_dict()[name].float())


# Reuse of KV


def turn(engine: TorchEngine, id: str, prompt: tuple[int, ...]) -> tuple[Delta, int]:
    """One seeded completion, and how many prompt tokens it did not have to compute."""
    before = engine.stats.cached_tokens
    engine.add(request(id, prompt=prompt, max_tokens=5, seed=4))
    done = drain(engine)[id]
    return done, engine.stats.cached_tokens - before


def test_the_next_turn_reuses_the_whole_last_turn_exactly() -> None:
    engine = engine_of(shared_model("llama"))
    prompt = tuple(range(20))
    first, reused = turn(engine, "1", prompt)
    assert reused == 0
    # The last sampled token was never fed to the model, so its KV is not there.
    following = prompt + first.token_ids + (7, 8)
    second, reused = turn(engine, "2", following)
    assert reused == len(prompt) + 4
    expected = reference_logprobs(plain_model("llama"), following, second.token_ids)
    assert second.logprobs == pytest.approx(expected, abs=1e-4)
    assert second.token_ids == turn(engine_of(shared_model("llama")), "2", following)[0].token_ids


def test_a_shared_prefix_is_copied_and_the_longer_conversation_stays() -> None:
    engine = engine_of(shared_model("llama"))
    system = tuple(range(12))
    first, _ = turn(engine, "1", (*system, 30, 31))
    other, reused = turn(engine, "2", (*system, 32))
    assert reused == len(system)
    expected = reference_logprobs(plain_model("llama"), (*system, 32), other.token_ids)
    assert other.logprobs == pytest.approx(expected, abs=1e-4)
    _, reused = turn(engine, "3", (*system, 30, 31, *first.token_ids, 1))
    assert reused == len(system) + 2 + 4


def test_a_finished_conversation_survives_the_move_of_a_running_one() -> None:
    engine = engine_of(shared_model("llama"), slots=2)
    engine.add(request("ends", prompt=(1, 2, 3, 4, 5), max_tokens=2, seed=1))
    engine.add(request("runs", prompt=(9, 8, 7), max_tokens=20, seed=2))
    parts = [*engine.step(), *engine.step(), *engine.step()]
    following = (1, 2, 3, 4, 5, *join(parts)["ends"].token_ids, 6)
    engine.add(request("goes on", prompt=following, max_tokens=5, seed=3))
    done = join([*parts, *drain(engine).values()])
    assert engine.stats.cached_tokens == 6
    for id, prompt in (("goes on", following), ("runs", (9, 8, 7))):
        expected = reference_logprobs(plain_model("llama"), prompt, done[id].token_ids)
        assert done[id].logprobs == pytest.approx(expected, abs=1e-4)


def test_the_same_prompt_again_computes_one_token() -> None:
    engine = engine_of(shared_model("llama"))
    first, _ = turn(engine, "1", (1, 2, 3, 4))
    second, reused = turn(engine, "2", (1, 2, 3, 4))
    assert reused == 3
    assert second.token_ids == first.token_ids


def test_the_row_given_up_longest_ago_is_taken_first() -> None:
    engine = engine_of(shared_model("llama"), slots=2)
    turn(engine, "1", (1,) * 10)
    turn(engine, "2", (2,) * 10)
    turn(engine, "3", (3,) * 10)
    assert turn(engine, "4", (2,) * 10)[1] == 9
    assert turn(engine, "5", (1,) * 10)[1] == 0


def test_a_group_computes_its_common_prompt_once() -> None:
    engine = engine_of(shared_model("llama"), slots=8, prefill_chunk=24)
    prompt = (*range(36), 1, 2)
    for i in range(6):
        engine.add(request(str(i), prompt=prompt + (i,) * (i // 3), max_tokens=4, seed=i))
    done = drain(engine)
    assert engine.stats.prefill_tokens == len(prompt) + 5  # the first whole, of each other its last token
    for i in range(6):
        delta = done[str(i)]
        expected = reference_logprobs(plain_model("llama"), prompt + (i,) * (i // 3), delta.token_ids)
        assert delta.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("relabel", [True, False])
def test_no_kv_is_reused_across_versions(relabel: bool, tmp_path: Path) -> None:
    engine = engine_of(make_model("llama", seed=7))
    folder = None if relabel else save(make_model("llama", seed=8), tmp_path)
    prompt = tuple(range(20))
    turn(engine, "1", prompt)
    # One request that spans the load: its KV is of two versions.
    engine.add(request("spans", prompt=(5,) * 20, max_tokens=5))
    engine.step()
    engine.step()
    engine.load(folder, 1)
    drain(engine)
    assert turn(engine, "2", prompt)[1] == 0
    assert turn(engine, "3", (5,) * 20)[1] == 0
    assert turn(engine, "4", prompt)[1] == 19


def test_a_cancelled_prefill_leaves_only_what_it_computed() -> None:
    engine = engine_of(shared_model("llama"), prefill_chunk=4)
    prompt = tuple(range(20))
    engine.add(request("1", prompt=prompt))
    engine.step()
    engine.cancel("1")
    drain(engine)
    done, reused = turn(engine, "2", prompt)
    assert reused == 4
    assert done.logprobs == pytest.approx(reference_logprobs(plain_model("llama"), prompt, done.token_ids), abs=1e-4)


# Chunks, dtypes, models


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    engine = engine_of(shared_model("llama"), prefill_chunk=8)
    engine.add(request("short", prompt=(1, 2), max_tokens=10))
    engine.step()
    engine.add(request("long", prompt=(3,) * 30, max_tokens=1))
    deltas, prefilled = [], [engine.stats.prefill_tokens]
    for _ in range(4):
        deltas.append(engine.step())
        prefilled.append(engine.stats.prefill_tokens)
    assert [[delta.id for delta in step] for step in deltas] == [["short"]] * 3 + [["short", "long"]]
    assert prefilled == [2, 10, 18, 26, 32]


def test_bfloat16_serves_close_to_float32() -> None:
    engine = engine_of(make_model("llama"), dtype=torch.bfloat16)
    engine.add(request("a", prompt=(1, 2, 3), max_tokens=8, seed=1))
    done = drain(engine)["a"]
    expected = reference_logprobs(make_model("llama"), (1, 2, 3), done.token_ids)
    assert done.logprobs == pytest.approx(expected, abs=0.3)


def test_a_model_folder_is_opened(tmp_path: Path) -> None:
    save(make_model("qwen2", seed=7), tmp_path)
    engine = TorchEngine(tmp_path, slots=2, max_context=CONTEXT)
    engine.add(request("a", max_tokens=3, seed=1))
    done = drain(engine)["a"]
    assert done.logprobs == pytest.approx(
        reference_logprobs(make_model("qwen2", seed=7), (3, 1, 4), done.token_ids), abs=1e-4
    )
    with pytest.raises(EngineError, match="absent"):
        TorchEngine(tmp_path / "absent")


def test_a_window_shorter_than_the_context_is_refused() -> None:
    config = MistralConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=16,
        vocab_size=VOCAB, sliding_window=32,
    )  # fmt: skip
    model = MistralForCausalLM(config)
    with pytest.raises(EngineError, match="sliding_window 32"):
        TorchEngine(model, max_context=48)
    engine = TorchEngine(model, max_context=32, slots=2)
    engine.add(request("a", max_tokens=4, seed=1))
    done = drain(engine)["a"]
    assert done.logprobs == pytest.approx(reference_logprobs(model, (3, 1, 4), done.token_ids), abs=1e-4)


def test_weights_that_are_not_finite_are_an_error_not_a_token(tmp_path: Path) -> None:
    model = make_model("llama", seed=7)
    engine = engine_of(model, version=5)
    engine.add(request("a", max_tokens=4))
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="version 5"):
        engine.step()
    # Good weights make it serve again: nothing of the bad ones is left in the rows.
    engine.load(save(make_model("llama", seed=7), tmp_path), 6)
    done = drain(engine)["a"]
    assert done.logprobs == pytest.approx(
        reference_logprobs(make_model("llama", seed=7), (3, 1, 4), done.token_ids), abs=1e-4
    )
