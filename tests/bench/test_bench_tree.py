"""The tree benchmark's arithmetic against DESIGN's formulas, and one small run of every measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forge.bench import tree, workloads
from forge.train.microbatch import inputs
from forge.types import ForgeError


@pytest.mark.parametrize(("turns", "group", "prompt", "step"), [(6, 3, 100, 10), (1, 4, 50, 20), (10, 1, 0, 8)])
def test_sizes_are_those_of_the_formulas(turns: int, group: int, prompt: int, step: int) -> None:
    """DESIGN section 2: linear G(Tp + d T(T+1)/2) / (p + GTd), attention its sum of squares; the last token of a
    sample is only predicted, so that lengths are one less."""
    load = workloads.agents(turns=turns, group=group, prompt=prompt, step=step, vocabulary=1000)
    flat, merged = tree.cost_flat(load.per_request()), tree.cost_merged(load.per_request())
    lengths = [prompt + t * step - 1 for t in range(1, turns + 1)] * group
    assert flat.tokens == sum(lengths)
    assert flat.pairs == sum(n * (n + 1) // 2 for n in lengths)
    assert merged.tokens == prompt + group * (turns * step - 1)
    assert flat.rows == merged.rows == group * turns * (step // 2)
    whole = load.per_trajectory()
    assert [len(inputs(s)) for s in whole] == [prompt + turns * step - 1] * group
    assert sum(sum(s.loss) for s in whole) == flat.rows


def test_compaction_leaves_no_single_trajectory() -> None:
    load = workloads.agents(turns=6, group=2, prompt=20, step=10, vocabulary=1000, compact_every=2)
    lengths = [len(prompt) + len(completion) for prompt, completion in load.requests[0]]
    assert lengths == [30, 40, 40, 50, 40, 50], "folded to the prompt and a summary of one step every two turns"
    with pytest.raises(ForgeError, match="rewrites its context"):
        load.per_trajectory()


def test_airline_trajectories(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="historical_trajectories"):
        workloads.airline(tmp_path, 512, lambda _: True, "all")
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    said = [("system", "be good"), ("user", "hi"), ("assistant", "hello there")]
    messages = [{"role": r, "content": c} for r, c in said] + [{"role": "user", "content": "go"}, call]
    (tmp_path / "tau_bench").mkdir()
    runs = [{"task_id": t, "trial": 0, "traj": messages} for t in (1, 2)]
    (tmp_path / workloads.TAU_BENCH).write_text(json.dumps(runs))
    load = workloads.airline(tmp_path, 512, lambda run: run["task_id"] == 1, "one")
    ((first, second),) = load.requests
    assert second[0][: len(first[0]) + len(first[1])] == first[0] + first[1], (
        "the second request goes on from the first"
    )
    assert len(load.per_trajectory()) == 1


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tree.Bench:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return tree.Bench(tmp_path_factory.mktemp("model"), "cpu", {**shape, "num_key_value_heads": 2})


def test_a_row_measures_both_sides(small: tree.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    load = workloads.agents(turns=6, group=4, prompt=100, step=10, vocabulary=512)
    row = small.row(load)
    assert row.flop_bound > 1
    assert row.flat_over_unique == pytest.approx(row.flat / row.unique)
    assert row.speedup_vs_per_request == pytest.approx(row.per_request_s / row.merged_s)
    assert row.sampled == 1
    monkeypatch.setattr(tree, "SAMPLED_ABOVE", 100)
    tenth = small.row(load)
    assert tenth.sampled == pytest.approx(1 / 12)
    assert (tenth.flat, tenth.unique, tenth.flop_bound) == (row.flat, row.unique, row.flop_bound)


def test_bound_of_a_small_model(small: tree.Bench) -> None:
    """By hand: layers 3 x 32 x 64 + 4 x 32 x 32 weights and two norms, one layer of 32 channels of attention."""
    cost = tree.Cost(tokens=10, pairs=55, rows=4)
    layer = 3 * 32 * 64 + 4 * 32 * 32 + 2 * 32 + 32
    assert cost.flops(small.naive.model) == 6 * layer * 10 + 6 * 32 * 512 * 4 + 12 * 1 * 32 * 55


@pytest.mark.slow
def test_merging_needs_less_memory() -> None:
    """F/U is 10 here; activations fall with it, weights and their gradients do not."""
    ratio = tree.peak_memory_ratio("cpu")
    assert ratio is not None
    assert ratio > 3


def test_attention_trees_have_about_8k_tokens() -> None:
    assert all(7000 < len(forest) < 9000 for forest in tree.attention_trees().values())
    assert set(tree.attention_speedup(torch.device("cpu"), heads=1, width=8, repeats=1)) == set(tree.attention_trees())
