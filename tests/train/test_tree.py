"""The merged forward equals the plain one: loss, logprobs and every gradient, and the faults it could have are seen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_support import CORPUS, KINDS, VOCAB, grown, losses, model

from forge.forest import Forest
from forge.train import attention, tree
from forge.train.attention import TreeLayout, dense, flex, magi, segments, varlen
from forge.train.tree import Targets, TreeModel
from forge.train.tree_refusal import UnsupportedModelError
from forge.train.verify import Verdict, verify
from forge.types import ForgeError

agents = st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=8)
loss_names = st.sampled_from(sorted(losses(0)))


@contextmanager
def planning(apart: bool) -> Iterator[None]:
    """On forests this small the cost model puts all under one mask; with free calls it never does."""
    with patch.multiple(segments, CALL=0.0, TILE=1) if apart else nullcontext():
        yield


@pytest.mark.parametrize("backend", ["dense", "segments"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(sequences=agents, loss=loss_names, seed=st.integers(0, 99), apart=st.booleans())
def test_exact_in_fp64(kind: str, backend: Any, sequences: Any, loss: str, seed: int, apart: bool) -> None:
    with planning(apart):
        verdict = verify(model(kind), sequences, losses(seed)[loss], backend)
    assert verdict.limit == 1e-12
    assert verdict.exact, verdict
    assert verdict.logprobs < 1e-11


@pytest.mark.parametrize("backend", ["dense", "segments"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", ["sft", "cispo"])
def test_exact_in_fp32(kind: str, backend: Any, loss: str) -> None:
    for seed in range(5):
        verdict = verify(model(kind, torch.float32), grown(seed), losses(seed)[loss], backend)
        assert verdict.limit >= 1e-5
        assert verdict.exact, verdict
        assert verdict.gradient < 1e-4


def test_a_batch_whose_gradients_cancel_is_judged_by_float64() -> None:
    """Here the plain float32 path is itself off by 1.8e-5, more than the bound on the difference of the two."""
    odd = [[4, 2, 4], [4, 2, 4], [4], [4, 2], [], [5], [4, 2, 4, 4]]
    verdict = verify(model("llama-mqa", torch.float32), odd, losses(0)["cispo"])
    assert verdict.exact, verdict
    assert verdict.limit > 1e-5


@pytest.mark.parametrize("backend", ["dense", "segments"])
@pytest.mark.parametrize("kind", ["llama-mqa", "qwen3-gqa", "mistral-window"])
def test_in_bf16_no_worse_than_twice_the_plain_path(kind: str, backend: Any) -> None:
    for seed in range(3):
        verdict = verify(model(kind, torch.bfloat16), grown(seed), None, backend)
        assert verdict.exact, verdict


# --- faults that must be seen ------


def sibling_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token sees all before it, other branches too: plain causal attention over the packed tokens."""
    of = TreeLayout.of

    def leaky(forest: Forest) -> TreeLayout:
        right = of(forest)
        end = np.full_like(right.end, right.queries)
        return TreeLayout(past=0, end=end, q_depth=right.q_depth, k_depth=right.k_depth)

    monkeypatch.setattr(tree.TreeLayout, "of", leaky)


def packed_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Forest.of

    def packed(sequences: Any) -> Forest:
        right = of(sequences)
        object.__setattr__(right, "depth", np.arange(len(right)))
        return right

    monkeypatch.setattr(tree.Forest, "of", packed)


def shifted_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    after = Targets.after

    def shifted(forest: Forest, sequences: Any) -> Targets:
        return after(forest, [np.concatenate([s[:1], s[:-1]]) for s in sequences])

    monkeypatch.setattr(tree.Targets, "after", shifted)


@pytest.mark.parametrize("fault", [sibling_leak, packed_positions, shifted_labels])
@pytest.mark.parametrize("name", [name for name, _ in CORPUS])
def test_faults_are_seen(fault: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = dict(CORPUS)[name]
    assert verify(model("llama-mqa"), sequences).exact
    fault(monkeypatch)
    if fault is not shifted_labels:  # which the trial, of logits, cannot see
        with pytest.raises(UnsupportedModelError, match="in a trial of six tokens"):
            TreeModel(model("llama-mqa"))
    monkeypatch.setattr(TreeModel, "_try_out", lambda _: None)
    verdict = verify(model("llama-mqa"), sequences)
    assert not verdict.exact
    assert verdict.gradient > 1e-3, "a fault of this size must not hide near the tolerance"


# --- who is refused ------


def refused(config: Any, cls: Any, **changes: Any) -> str:
    made = cls(config).eval()
    for name, value in changes.items():
        setattr(made.config, name, value)
    with pytest.raises(UnsupportedModelError) as caught:
        TreeModel(made)
    return str(caught.value)


def small(config: Any, **more: Any) -> Any:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return config(**(sizes | more))


def test_models_that_would_not_be_exact_are_refused() -> None:
    import transformers as hf

    llama = hf.LlamaForCausalLM(small(hf.LlamaConfig, attention_dropout=0.1)).train()
    with pytest.raises(UnsupportedModelError, match=r"attention_dropout = 0\.1"):
        TreeModel(llama).logprobs([[1, 2, 3]])
    size = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(**size)).train()
    with pytest.raises(UnsupportedModelError, match=r"resid_pdrop = 0\.1 .*call eval\(\)"):
        TreeModel(gpt2)
    mamba = hf.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    assert "linear_attention" in refused(mamba, hf.MambaForCausalLM)
    gemma = small(hf.Gemma2Config, head_dim=8, attn_logit_softcapping=50.0)
    assert "soft-capping" in refused(gemma, hf.Gemma2ForCausalLM)
    moe = small(hf.MixtralConfig, num_local_experts=2, output_router_logits=True)
    assert "auxiliary loss" in refused(moe, hf.MixtralForCausalLM)
    sinks = small(hf.GptOssConfig, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=8)
    assert "attention sinks" in refused(sinks, hf.GptOssForCausalLM)
    mixed = small(
        hf.Qwen3NextConfig,
        head_dim=8,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )
    assert "linear_attention" in refused(mixed, hf.Qwen3NextForCausalLM)


def made(cls: str, config: str, **more: Any) -> Any:
    import transformers as hf

    torch.manual_seed(0)
    return getattr(hf, cls)(small(getattr(hf, config), **more)).eval()


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: made("LlamaForCausalLM", "LlamaConfig", rope_parameters=LONGROPE), "'longrope' depend on the longest"),
        (
            lambda: made(
                "LlamaForCausalLM",
                "LlamaConfig",
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            ),
            "'dynamic' depend on the longest",
        ),
        (
            lambda: made("RobertaForCausalLM", "RobertaConfig", is_decoder=True, pad_token_id=1),
            "places tokens by something",
        ),
        (lambda: made("BertLMHeadModel", "BertConfig"), "sees more than what stands before"),
        (lambda: made("LlamaModel", "LlamaConfig"), "no language-model head"),
        (lambda: torch.nn.Linear(2, 2), "not a Hugging Face causal LM"),
        (
            lambda: made("OPTForCausalLM", "OPTConfig", ffn_dim=16, word_embed_proj_dim=16, dropout=0.1).train(),
            "dropout",
        ),
        (
            lambda: made("NemotronForCausalLM", "NemotronConfig"),
            "does not pass the tree on",
        ),
        (
            lambda: made("PhimoeForCausalLM", "PhimoeConfig", num_local_experts=2, sliding_window=2),
            "sliding window that its attention layers are not told of|off by",
        ),
    ],
    ids=["longrope", "dynamic", "roberta", "bert", "no head", "no model", "functional dropout", "nemotron", "phimoe"],
)
def test_what_a_model_does_not_declare_shows_in_a_trial(model: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        TreeModel(model())


def test_gradient_checkpointing_is_refused_while_it_is_on() -> None:
    llama = made("LlamaForCausalLM", "LlamaConfig")
    llama.gradient_checkpointing_enable()
    TreeModel(llama)  # in eval mode nothing is forwarded again
    with pytest.raises(UnsupportedModelError, match="gradient checkpointing"):
        TreeModel(llama.train())


def test_multi_head_latent_attention_has_values_of_another_size() -> None:
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    moe = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    deepseek = made("DeepseekV3ForCausalLM", "DeepseekV3Config", **sizes, **moe, head_dim=4).double()
    verdict = verify(deepseek, grown(3))
    assert verdict.exact, verdict


def test_frozen_parameters_are_left_alone() -> None:
    llama = made("LlamaForCausalLM", "LlamaConfig").double()
    for name, parameter in llama.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    verdict = verify(llama, grown(1))
    assert verdict.exact, verdict
    assert "q_proj" in verdict.worst
    llama.requires_grad_(False)
    with pytest.raises(ForgeError, match="nothing to compare"):
        verify(llama, grown(1))


def test_verify_refuses_what_does_not_repeat_itself() -> None:
    llama = made("LlamaForCausalLM", "LlamaConfig")
    llama.model.layers[0].mlp.register_forward_hook(lambda _m, _a, out: out + 0.1 * torch.randn_like(out))
    with pytest.raises(UnsupportedModelError, match=r"off by|differ from call to call"):
        verify(llama, grown(1))


@pytest.mark.parametrize(
    ("sequences", "complaint"),
    [
        ([[1, 2, -1]], "sequence 0: holds -1"),
        ([[1, 2, VOCAB]], f"token id {VOCAB}: the model knows {VOCAB} tokens"),
        ([[1.5, 2.5]], "must hold integers"),
        ([[True, False]], "must hold integers"),
        ([["1", "2"]], "must hold integers"),
        ([1, 2, 3], "must be flat"),
    ],
)
def test_what_is_no_token_is_refused(sequences: Any, complaint: str) -> None:
    with pytest.raises(ForgeError, match=complaint):
        TreeModel(model("llama-mqa")).logprobs(sequences)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ForgeError, match="temperature"):
            TreeModel(model("llama-mqa")).logprobs([[1, 2]], temperature)


def test_parts_of_a_composite_model_keep_their_attention() -> None:
    llama = made("LlamaForCausalLM", "LlamaConfig")
    llama.set_attn_implementation("eager")
    TreeModel(llama).logprobs([[1, 2, 3]])
    assert {m.config._attn_implementation for m in llama.modules() if hasattr(m, "config")} == {"eager"}


def test_a_model_is_left_as_it_was() -> None:
    made = model("llama-mqa")
    before = made.config._attn_implementation
    TreeModel(made).logprobs([[1, 2, 3], [1, 2, 4]])
    assert made.config._attn_implementation == before
    assert not made.get_output_embeddings()._forward_pre_hooks


def test_degenerate_sequences() -> None:
    out = TreeModel(model("llama-mqa")).logprobs([[], [3], [3, 4], [3, 4], [5]])
    assert [len(one) for one in out] == [0, 0, 1, 1, 0]
    assert out[2] == out[3]
    assert [len(one) for one in TreeModel(model("llama-mqa")).logprobs([[], [1]])] == [0, 0]


def test_a_verdict_says_what_it_found() -> None:
    found = {"loss": 1e-15, "logprobs": 1e-15, "gradient": 2e-12, "worst": "lm_head.weight"}
    verdict = Verdict(**found, limit=1e-12, slack=1e-10)
    assert str(verdict).startswith("NOT exact within 1.0e-12: loss 1.0e-15")
    assert "lm_head.weight" in str(verdict)
    assert Verdict(**found, limit=1e-11, slack=1e-9).exact
    for name in ("loss", "gradient", "logprobs"):
        assert not Verdict(**(found | {name: math.nan}), limit=1e-11, slack=1e-9).exact


# --- the attention backends, on their own ------


def layouts(sequences: Any) -> list[TreeLayout]:
    """The whole forest, and a chunk from its middle that has a past."""
    forest = Forest.of(sequences)
    size = len(forest)
    return [TreeLayout.of(forest), TreeLayout.chunk(forest, size // 3, size)] if size > 2 else [TreeLayout.of(forest)]


def qkv(layout: TreeLayout, heads: int, kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(layout.queries)
    shapes = [(1, heads, layout.queries, 8), *[(1, kv_heads, layout.keys, 8)] * 2]
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@settings(max_examples=40, deadline=None)
@given(sequences=agents.filter(any), window=st.sampled_from([None, 1, 3, 100]), apart=st.booleans())
def test_segments_attend_as_the_reference_does(
    heads: int, kv_heads: int, sequences: Any, window: int | None, apart: bool
) -> None:
    for layout in layouts(sequences):
        assert layout.pairs == layout.mask(slice(0, layout.queries), slice(0, layout.keys)).sum()
        q, k, v = qkv(layout, heads, kv_heads)
        weights = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        results = []
        for backend in (dense.attend, segments.attend):
            with planning(apart):
                out = backend(q, k, v, layout, 0.3, window)
            results.append([out, *torch.autograd.grad((out * weights).sum(), (q, k, v))])
        for reference, got in zip(*results, strict=True):
            torch.testing.assert_close(got, reference, rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(sequences=agents.filter(any), apart=st.booleans())
def test_segment_calls_cover_every_pair_once(sequences: Any, apart: bool) -> None:
    for layout in layouts(sequences):
        seen = np.zeros((layout.queries, layout.keys), dtype=int)
        with planning(apart):
            calls = segments.plan(layout)
        for call in calls:
            q, k = slice(call.q0, call.q1), slice(call.k0, call.k1)
            if call.masked:
                seen[q, k] += layout.mask(q, k)
            elif call.causal:
                seen[q, k] += np.tri(call.q1 - call.q0, call.k1 - call.k0, dtype=int)
            else:
                seen[q, k] += 1
        assert (seen == layout.mask(slice(0, layout.queries), slice(0, layout.keys))).all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=40, deadline=None)
@given(sequences=agents.filter(any), window=st.sampled_from([None, 3]))
def test_flex_sees_what_the_mask_says(sequences: Any, window: int | None) -> None:
    """FlexAttention has no backward pass on a CPU; its block mask and its forward pass can be held to the reference."""
    for layout in layouts(sequences):
        with torch.no_grad():
            q, k, v = (x.detach() for x in qkv(layout, 4, 2))
            got = flex.attend(q, k, v, layout, 0.3, window)
            torch.testing.assert_close(got, dense.attend(q, k, v, layout, 0.3, window), rtol=0, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99))
def test_flex_blocks_are_those_of_the_dense_mask(seed: int) -> None:
    draw = np.random.default_rng(seed)
    stem = draw.integers(0, 9, 300)
    sequences = [np.concatenate([stem[: draw.integers(0, 300)], draw.integers(0, 9, 200)]) for _ in range(4)]
    for layout in layouts(sequences):
        some, full = flex.blocks(layout)
        mask = layout.mask(slice(0, layout.queries), slice(0, layout.keys))
        for (i, j), seen in np.ndenumerate(some):
            block = mask[i * flex.BLOCK : (i + 1) * flex.BLOCK, j * flex.BLOCK : (j + 1) * flex.BLOCK]
            assert seen == block.any()
            assert full[i, j] == block.all()


def flash_on_paper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    scale: float,
    w: Any,
) -> torch.Tensor:
    """What a variable-length causal flash kernel computes, one sequence at a time: the kernels need a GPU."""
    out = torch.empty_like(q)
    for i in range(len(cu_q) - 1):
        a, b, x, y = (int(n) for n in (cu_q[i], cu_q[i + 1], cu_k[i], cu_k[i + 1]))
        assert b - a <= max_q
        assert y - x <= max_k
        keys, values = (t[x:y].repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        behind = torch.arange(y - x - (b - a), y - x)[:, None] - torch.arange(y - x)[None, :]
        mask = (behind >= 0) if w is None else (behind >= 0) & (behind < w)
        args = (t.transpose(0, 1)[None] for t in (q[a:b], keys, values))
        out[a:b] = torch.nn.functional.scaled_dot_product_attention(*args, mask, scale=scale)[0].transpose(0, 1)
    return out


@settings(max_examples=40, deadline=None)
@given(sequences=agents.filter(any), window=st.sampled_from([None, 3]))
def test_varlen_gathers_the_right_paths(sequences: Any, window: int | None) -> None:
    for layout in layouts(sequences):
        q, k, v = qkv(layout, 4, 2)
        with torch.no_grad():
            got = varlen.attend(q, k, v, layout, 0.3, window, kernel=flash_on_paper)
            torch.testing.assert_close(got, dense.attend(q, k, v, layout, 0.3, window), rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(sequences=agents.filter(any))
def test_magi_rectangles_are_the_mask(sequences: Any) -> None:
    for layout in layouts(sequences):
        seen = np.zeros((layout.queries, layout.keys), dtype=int)
        for q0, q1, k0, k1, kind in magi.ranges(layout):
            assert kind == magi.FULL or q1 - q0 == k1 - k0, "in a square, bottom-right and top-left causal are one"
            seen[q0:q1, k0:k1] += np.tri(q1 - q0, dtype=int) if kind == magi.CAUSAL else 1
        assert (seen == layout.mask(slice(0, layout.queries), slice(0, layout.keys))).all()


def test_backends_that_cannot_train_here_say_why() -> None:
    cpu = torch.device("cpu")
    assert attention.pick("auto", cpu) is segments.attend
    for name in ("flex", "varlen", "magi"):
        with pytest.raises(ValueError, match=rf"train.attention = '{name}' on cpu: .*auto picks one that runs"):
            attention.pick(name, cpu)  # type: ignore[arg-type]
