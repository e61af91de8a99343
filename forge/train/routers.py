"""What the routers of a mixture of experts did on a merged forest, counted as if every sample had been forwarded.

A token shared by m samples is routed once but counts m times, so that load and probabilities are those of the plain
path. Routing is dropless: an expert's capacity would make one token's route depend on the others', and such models are
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from forge.forest import Ints

#: router modules of transformers return (logits [T, E], scores [T, k], expert indices [T, k])
ROUTER = "TopKRouter"


@dataclass(frozen=True, slots=True)
class RouterStatistics:
    """Of one layer, each [E]: `load` is the share of routed tokens an expert got, `probability` its mean softmax."""

    load: Tensor
    probability: Tensor

    @property
    def imbalance(self) -> float:
        """`E * sum(load * probability)`: 1 when even (the balance loss of Switch Transformers, arXiv 2101.03961)."""
        return float(len(self.load) * (self.load * self.probability).sum())


@dataclass
class RouterWatch:
    """Filled by each forward pass within `watch_routers`: router outputs by module name, the last pass's."""

    logits: dict[str, Tensor] = field(default_factory=dict)
    chosen: dict[str, Tensor] = field(default_factory=dict)

    def statistics(self, multiplicity: Ints) -> dict[str, RouterStatistics]:
        """By module. `multiplicity` [T] is the forest's: through how many samples each forwarded token goes."""
        out = {}
        for name, logits in self.logits.items():
            weight = torch.tensor(multiplicity, dtype=torch.float64, device=logits.device)
            hits = torch.nn.functional.one_hot(self.chosen[name], logits.shape[-1]).sum(1).double()
            probability = torch.softmax(logits.double(), dim=-1)
            load = (weight[:, None] * hits).sum(0)
            out[name] = RouterStatistics(load / load.sum(), (weight[:, None] * probability).sum(0) / weight.sum())
        return out


@contextmanager
def watch_routers(model: nn.Module) -> Iterator[RouterWatch]:
    """Within, note what every router of the model decides. A model without experts gives an empty watch."""
    watch = RouterWatch()

    def noting(name: str) -> Any:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            logits, _, chosen = output
            watch.logits[name], watch.chosen[name] = logits.detach(), chosen.detach()

        return note

    routers = [(name, m) for name, m in model.named_modules() if type(m).__name__.endswith(ROUTER)]
    handles = [module.register_forward_hook(noting(name)) for name, module in routers]
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()
