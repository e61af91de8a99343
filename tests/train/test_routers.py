"""Router statistics of a merged forest are those of every sample forwarded on its own."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_support import grown, model

from forge.forest import Forest
from forge.train.routers import watch_routers
from forge.train.tree import TreeModel
from forge.train.verify import plain_logprobs


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 999))
def test_multiplicity_makes_them_equal(seed: int) -> None:
    moe = model("mixtral-moe")
    sequences = [s for s in grown(seed) if len(s) > 1]
    if not sequences:
        return
    logits: dict[str, list[torch.Tensor]] = {}
    chosen: dict[str, list[torch.Tensor]] = {}
    with watch_routers(moe) as watch, torch.no_grad():
        for sequence in sequences:
            plain_logprobs(moe, [sequence])
            for name in watch.logits:
                logits.setdefault(name, []).append(watch.logits[name])
                chosen.setdefault(name, []).append(watch.chosen[name])
        TreeModel(moe).logprobs(sequences)
        merged = watch.statistics(Forest.of([s[:-1] for s in sequences]).multiplicity)
    assert len(merged) == 2
    for name, got in merged.items():
        flat, picks = torch.cat(logits[name]), torch.cat(chosen[name])
        load = torch.bincount(picks.flatten(), minlength=4).double()
        torch.testing.assert_close(got.load, load / load.sum(), rtol=0, atol=1e-12)
        torch.testing.assert_close(got.probability, torch.softmax(flat.double(), -1).mean(0), rtol=0, atol=1e-6)
        assert got.imbalance > 0
    assert not any(module._forward_hooks for module in moe.modules())


def test_a_model_without_experts_has_none() -> None:
    llama = model("llama-mqa")
    with watch_routers(llama) as watch:
        TreeModel(llama).logprobs([[1, 2, 3]])
    assert watch.statistics(Forest.of([[1, 2]]).multiplicity) == {}
