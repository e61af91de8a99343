"""What a rank does with its share of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forge.train import microbatch
from forge.train.forward import loss_of
from forge.train.microbatch import MicroBatch
from forge.train.tree import TreeModel
from forge.train.zero.deepspeed import Zero, join
from forge.train.zero.messages import Seen, Setup, Work
from forge.train.zero.passes import Passes, Unit
from forge.train.zero.portions import Portion


class Stepper:
    """The model under DeepSpeed, ready for its first step."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.config = setup.config
        self.device = join(folder)
        self.zero = Zero(setup.model_dir, setup.config, setup.stage, self.device)
        model = self.zero.model
        tree = TreeModel(model, setup.config.attention) if setup.config.merge == "tree" else None
        self.passes = Passes(model, tree, weight=float(self.zero.world))
        if setup.optimizer is not None:
            self.zero.load_optimizer(setup.optimizer, self.passes.idle)

    def step(self, work: Work) -> Seen:
        units = [
            self.passes.unit(micro, loss_of(micro, self.config.cispo)) for micro in self._micro_batches(work.portion)
        ]
        self.passes.run(units, work.rounds, self.zero)
        norm = self.zero.step()
        return Seen(
            loss=float(sum(unit.loss for unit in units)),
            norm=norm,
            micro_batches=len(units),
            forward_tokens=sum(unit.micro.tokens for unit in units),
            padded_tokens=sum(unit.micro.input_ids.numel() for unit in units),
            logprobs=flat(units, lambda unit: unit.logprobs),
            rollout_logprobs=flat(units, lambda unit: unit.micro.rollout_logprobs),
            entropies=flat(units, lambda unit: unit.entropies),
        )

    def _micro_batches(self, portion: Portion) -> list[MicroBatch]:
        batches = []
        for part in portion.parts:
            samples = [portion.samples[i] for i in part.sequences]
            denominators = [portion.denominators[i] for i in part.sequences]
            if self.passes.tree is None:
                batches.append(microbatch.padded(samples, denominators, self.device, torch.float32))
            else:
                batches.append(microbatch.merged(samples, denominators, part, self.device, torch.float32))
        return batches


def flat(units: Sequence[Unit], of: Callable[[Unit], Tensor]) -> np.ndarray:
    """One figure of all loss tokens. A numpy array: torch would send a tensor as a handle to shared memory."""
    return np.concatenate([np.zeros(0, np.float32), *(of(unit).cpu().numpy() for unit in units)])
