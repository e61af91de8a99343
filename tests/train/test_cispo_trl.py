"""CISPO against TRL's own code, run and not copied. Development only: TRL is no dependency of Forge.

pip install --no-deps trl==1.16.0 && pip install datasets pandas
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.train.cispo import CispoConfig, cispo_loss

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL's imports warn about their own dependencies
    grpo: Any = pytest.importorskip("trl.trainer.grpo_trainer", reason="development oracle, trl is not installed")


def trl_loss(logprobs: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, cap: float) -> Tensor:
    """`GRPOTrainer._compute_loss` on a stand-in trainer whose model returns `logprobs`."""
    length = logprobs.shape[1]
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, gather_for_metrics=lambda x: x
        ),
        args=SimpleNamespace(steps_per_generation=1, delta=None, use_bias_correction_kl=False),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type="cispo",
        epsilon_high=cap,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
    )
    inputs = {
        "prompt_ids": torch.zeros(len(logprobs), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(logprobs), 1),
        "completion_ids": torch.zeros(len(logprobs), length, dtype=torch.int64),
        "completion_mask": mask.to(logprobs.dtype),
        "advantages": advantages,
        "old_per_token_logps": rollout,
        "num_items_in_batch": mask.sum(),
    }
    loss: Tensor = grpo.GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_trl(seed: int) -> None:
    # TRL's epsilon_high is the absolute cap: its 5.0 is our e_high = 4.0.
    generator = torch.Generator().manual_seed(seed)
    new = -torch.rand(4, 9, generator=generator, dtype=torch.float64) * 5
    rollout = -torch.rand(4, 9, generator=generator, dtype=torch.float64) * 5
    advantages = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 9, generator=generator) < 0.7
    ours, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    loss = cispo_loss(ours, rollout, advantages, mask, float(mask.sum()), CispoConfig(e_high=4.0))
    expected = trl_loss(theirs, rollout, advantages, mask, cap=5.0)
    loss.backward()
    expected.backward()
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-12)
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)
