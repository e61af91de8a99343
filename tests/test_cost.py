"""The cost model: closed form, monotone sanity, known figures, descriptions and their errors."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.cost import CostModel, Deployment, Efficiencies, Precision, hardware, model_card, seconds, work
from forge.cost.cards import folder
from forge.cost.operators import covered
from forge.types import ForgeError

MODELS = sorted(path.stem for path in folder("model_cards").glob("*.toml"))
HARDWARE = sorted(path.stem for path in folder("hardware").glob("*.toml"))


def cost(model: str = "minimax_m2_5", tp: int = 4, **of_deployment: int) -> CostModel:
    precision = Precision(dense="fp8", experts="fp8")
    on = Deployment(model=model_card(model), hardware=hardware("h200_sxm"), precision=precision, tp=tp, **of_deployment)
    return CostModel(on)


deployments = st.builds(cost, st.sampled_from(MODELS), st.sampled_from([1, 2, 8]))


@given(deployments, st.integers(0, 256), st.integers(1, 10_000), st.integers(0, 500))
def test_closed_form_is_the_sum_of_iterations(model: CostModel, rows: int, each: int, k: int) -> None:
    context = rows * each
    stepped = sum(model.iteration(rows, context + rows * i) for i in range(k))
    assert model.decode(rows, context, k) == pytest.approx(stepped, rel=1e-12)


@given(
    deployments,
    st.integers(0, 256),
    st.integers(0, 10**8),
    st.integers(0, 256),
    st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 100_000)), min_size=1, max_size=5),
)
def test_a_run_is_iteration_after_iteration_to_the_last_bit(
    model: CostModel, rows: int, context: int, grown: int, chunks: list[tuple[int, int]]
) -> None:
    each = [model.iteration(rows, context + i * grown, [chunk]) for i, chunk in enumerate(chunks)]
    assert model.run(rows, context, grown, chunks) == each


@given(deployments, st.integers(0, 256), st.integers(0, 100_000))
def test_line_is_the_roofline(model: CostModel, rows: int, context: int) -> None:
    whole = float(seconds(work(model.on, rows, context), model.by))
    assert model.iteration(rows, context) == pytest.approx(whole, rel=1e-12)


@given(
    deployments,
    st.integers(0, 64),
    st.integers(0, 5_000),
    st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 100_000)), max_size=3),
    st.sampled_from(["flops", "bandwidth", "link_bandwidth"]),
    st.floats(1.0, 10.0),
)
def test_better_hardware_is_never_slower(
    model: CostModel, rows: int, each: int, prefill: list[tuple[int, int]], what: str, factor: float
) -> None:
    old = model.on.hardware
    value = {k: v * factor for k, v in old.flops.items()} if what == "flops" else getattr(old, what) * factor
    better = CostModel(replace(model.on, hardware=replace(old, **{what: value})), model.by)
    before = model.iteration(rows, rows * each, prefill)
    assert better.iteration(rows, rows * each, prefill) <= before * (1 + 1e-12)


@given(deployments, st.integers(1, 64), st.integers(0, 5_000), st.integers(1, 8192), st.integers(0, 100_000))
def test_more_work_is_never_faster(model: CostModel, rows: int, each: int, tokens: int, before: int) -> None:
    took = model.iteration(rows, rows * each, [(tokens, before)])
    slack = took * (1 - 1e-12)
    assert model.iteration(rows, rows * each + 100, [(tokens, before)]) >= slack
    assert model.iteration(rows + 1, rows * each, [(tokens, before)]) >= slack
    assert model.iteration(rows, rows * each, [(tokens + 1, before)]) >= slack
    assert model.iteration(rows, rows * each, [(tokens, before + 100)]) >= slack
    assert took >= model.iteration(rows, rows * each), "a chunk of prefill never makes an iteration shorter"


@pytest.mark.parametrize("name", [f.name for f in fields(Efficiencies)])
def test_each_efficiency_counts(name: str) -> None:
    """Overheads lengthen an iteration, shares of a peak shorten it; both of everything that has to be done."""
    base = cost("deepseek_v3")  # latent attention and experts: every operator has something to do
    more = replace(base.by, **{name: getattr(base.by, name) * 1.1})
    after = CostModel(base.on, more).iteration(16, 100_000, [(16, 1000)])
    before = base.iteration(16, 100_000, [(16, 1000)])
    longer = name.endswith("_s") or name in ("activation", "spread")
    assert after > before if longer else after < before


def test_factors_scale_decode_and_what_prefill_adds() -> None:
    base, chunk = cost(), [(4096, 1000)]
    twice = replace(base, decode_factor=2.0, prefill_factor=3.0)
    decode = base.iteration(64, 100_000)
    assert twice.iteration(64, 100_000) == pytest.approx(2 * decode)
    assert twice.decode(64, 100_000, 7) == pytest.approx(2 * base.decode(64, 100_000, 7))
    added = base.iteration(64, 100_000, chunk) - decode
    assert twice.iteration(64, 100_000, chunk) == pytest.approx(2 * decode + 3 * added)


def test_arrays_are_as_many_floats() -> None:
    one = cost()
    loads = [(1, 100), (16, 20_000), (64, 300_000)]
    works = [work(one.on, rows, context) for rows, context in loads]
    stacked = replace(works[0], **{f.name: np.array([getattr(w, f.name) for w in works]) for f in fields(works[0])})
    assert seconds(stacked, one.by) == pytest.approx([float(seconds(w, one.by)) for w in works])


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        ("llama_3_1_8b", 8.0, 7.5),
        ("llama_3_1_70b", 70.6, 69.5),
        ("qwen3_32b", 32.8, 32.0),
        ("qwen3_235b_a22b", 235, 21.6),
        ("minimax_m2_5", 229, 10.4),
        ("gpt_oss_120b", 116.8, 5.13),
        ("deepseek_v3", 671, 36.6),
        ("kimi_k2_5", 1026, 31.7),
        ("glm_5", 743, 40.1),
        ("smollm2_135m", 0.1345, 0.1345),
    ],
)
def test_weights_are_those_published(model: str, total: float, active: float) -> None:
    """Published totals, and active ones without the embedding table, which is looked up."""
    card = model_card(model)
    assert card.weights / 1e9 == pytest.approx(total, rel=5e-3)
    assert card.active_weights / 1e9 == pytest.approx(active, rel=5e-3)


@pytest.mark.parametrize(
    ("model", "kv"), [("minimax_m2_5", 253_952), ("llama_3_1_70b", 327_680), ("deepseek_v3", 70_272)]
)
def test_kv_bytes_are_fields(model: str, kv: int) -> None:
    """KV bytes a token in bf16."""
    assert cost(model, tp=1).on.kv_bytes == kv


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    assert cost("qwen3_235b_a22b", tp=8).on.kv_bytes == cost("qwen3_235b_a22b", tp=4).on.kv_bytes
    assert cost("minimax_m2_5", tp=8).on.kv_bytes == cost("minimax_m2_5", tp=4).on.kv_bytes / 2


def test_expert_coverage() -> None:
    """One token reads its k experts; thousands read all."""
    on = cost(tp=1).on
    one, many = (float(covered(work(on, rows), Efficiencies())) for rows in (1, 100_000))
    assert one == pytest.approx(8 / 256)
    assert many == pytest.approx(1.0)
    alone = work(on, 16)
    assert covered(alone, Efficiencies(spread=1.0)) == pytest.approx(1 - (1 - 8 / 256) ** 16)


def test_experts_over_replicas_exchange_tokens() -> None:
    wide = cost(tp=2, dp=4, ep=8).on
    assert wide.devices == 8
    assert work(wide, 16).collectives == 62 + 2 * 62, "an all-reduce after attention, dispatch and combine"
    assert wide.weight_bytes < cost(tp=2).on.weight_bytes


def test_a_window_bounds_attention() -> None:
    """gpt-oss: half of its layers see 128 tokens, so a long context costs half of what it would."""
    model = cost("gpt_oss_120b", tp=1)
    whole = replace(model.on.model, window=0, window_layers=0)
    full = CostModel(replace(model.on, model=whole), model.by)
    assert model.line(4)[1] == pytest.approx(full.line(4)[1] / 2)
    assert model.prefill(8192) < full.prefill(8192)


def test_cached_prefix_saves() -> None:
    assert cost().prefill(1000, 7000) < cost().prefill(8000)


@pytest.mark.parametrize("name", HARDWARE)
def test_shipped_hardware_loads(name: str) -> None:
    assert hardware(name).peak("bf16") > 0


@pytest.mark.parametrize("name", MODELS)
def test_shipped_models_load_by_name_and_alias(name: str) -> None:
    card = model_card(name)
    assert card.aliases
    assert all(model_card(alias) == card for alias in card.aliases)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (("layers = 32", "layerss = 32"), "layerss: unknown key"),
        (("layers = 32", ""), "layers: missing"),
        (("layers = 32", "layers = 'many'"), "layers = 'many': must be a whole number"),
        (("layers = 32", "layers = true"), "layers = True: must be a whole number"),
        (("layers = 32", "layers = 0"), "layers = 0: must be positive"),
        (("layers = 32", "layers = 32\nexperts = 4"), "active_experts = 0: must lie in"),
        (("layers = 32", "layers = 32\nwindow = 4"), "give both or neither"),
        (("kv_heads = 8", "kv_heads = 5"), "kv_heads = 5: must divide"),
        (("layers = 32", "layers = "), "not a readable TOML file"),
    ],
)
def test_faults_of_a_description_are_named(tmp_path: Path, edit: tuple[str, str], complaint: str) -> None:
    text = (folder("model_cards") / "llama_3_1_8b.toml").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(*edit), encoding="utf-8")
    with pytest.raises(ForgeError, match=r"mine\.toml") as error:
        model_card(path)
    assert complaint in str(error.value)


def test_unknown_keys_of_hardware_and_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = (folder("hardware") / "cpu.toml").read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    assert hardware(path) == hardware("cpu")
    path.write_text(text.replace("usable = 0.5", "usable = 2"), encoding="utf-8")
    with pytest.raises(ForgeError, match=r"usable = 2\.0: must be at most 1"):
        hardware(path)
    path.write_text(text.replace("fp32 = 160e9", "fp32 = 'fast'"), encoding="utf-8")
    with pytest.raises(ForgeError, match=r"flops.fp32 = 'fast': must be a number"):
        hardware(path)
    with pytest.raises(ForgeError, match=r"h900: no such description; those that ship in forge/hardware: a100_sxm"):
        hardware("h900")
    with pytest.raises(ForgeError, match=r"precision\.kv = 'fp3': must be one of"):
        Precision(kv="fp3")
    with pytest.raises(ForgeError, match="ep = 3: must divide"):
        cost(tp=4, ep=3)


@given(
    deployments,
    st.integers(0, 256),
    st.integers(0, 5_000),
    st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 100_000)), min_size=1, max_size=3),
)
def test_a_mixed_iteration_is_the_roofline(
    model: CostModel, rows: int, each: int, prefill: list[tuple[int, int]]
) -> None:
    """Parts are kept and added up; the whole is what one look at all operators gives."""
    whole = float(seconds(work(model.on, rows, rows * each, prefill), model.by))
    assert model.iteration(rows, rows * each, prefill) == pytest.approx(whole, rel=1e-9)
