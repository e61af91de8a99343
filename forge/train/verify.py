"""Is the merged forward exact for *this* model and *this* batch? A differential check against the plain path.

The same loss of the same sequences twice: merged, and one sequence at a time by the model as it is. Errors are in the
norms of DESIGN section 2: `|dLoss| / sum|terms|`, and per parameter `||dg|| / max(||g||, 1e-3 ||g_all||)`, for plain
relative errors blow up where advantages cancel.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.overrides import TorchFunctionMode

from forge.train.attention import Backend
from forge.train.tree import TreeModel
from forge.train.tree_refusal import UnsupportedModelError
from forge.types import ForgeError

#: logprobs by sequence, [n - 1] each, to the terms whose sum is the loss
Terms = Callable[[Sequence[Tensor]], Sequence[Tensor]]

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
#: against float64 the merged path may err at most this many times as much as the plain one does
ROUNDING = 2.0
#: and by no more than this, whatever the plain path does: a sibling leak is off by 0.7
CAP, CAP_ROUGH = {torch.float32: 1e-3}, 0.3
#: how far logprobs may be off, in limits
SLACK = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Errors of the merged path; `worst` is the parameter with the largest. `limit` is what loss and gradient must not
    exceed, `slack` what logprobs must not, in nats."""

    loss: float
    logprobs: float
    gradient: float
    worst: str
    limit: float
    slack: float

    @property
    def exact(self) -> bool:
        # Not max(): a NaN must never pass.
        return self.loss <= self.limit and self.gradient <= self.limit and self.logprobs <= self.slack

    def __str__(self) -> str:
        found = f"loss {self.loss:.1e}, logprobs {self.logprobs:.1e}, gradients {self.gradient:.1e} ({self.worst})"
        return f"{'exact' if self.exact else 'NOT exact'} within {self.limit:.1e}: {found}"


@dataclass(frozen=True, slots=True)
class Result:
    """One path's loss, its terms' absolute sum, logprobs by sequence, gradients by parameter."""

    loss: float
    scale: float
    logprobs: list[Tensor]
    grads: dict[str, Tensor]


def verify(
    model: Any, sequences: Sequence[ArrayLike], terms: Terms | None = None, backend: Backend = "auto"
) -> Verdict:
    """Compare both paths on one batch. The model's gradients and mode are left as they were.

    float64 and float32 are held to DESIGN's bounds. A model in lower precision, or a float32 batch whose gradients
    cancel so far that the plain path itself is off by more, is compared like that path with a float64 copy: merging may
    err twice as much. Raises UnsupportedModelError.
    """
    terms = terms or (lambda logprobs: [-one for one in logprobs])
    tree = TreeModel(model, backend)
    dtype = next(model.parameters()).dtype
    with KeepFloat64() if dtype == torch.float64 else nullcontext():
        plain = evaluate(plain_logprobs(model, sequences), terms, model)
        again = plain_logprobs(model, sequences)
        merged = evaluate(tree.logprobs(sequences), terms, model)
    if any(not torch.equal(a, b) for a, b in zip(plain.logprobs, again, strict=True)):
        raise UnsupportedModelError(f"{type(model).__name__}: its own logprobs differ from call to call; call eval()")
    verdict = compare(merged, plain, TOLERANCE.get(dtype, 0.0))
    if verdict.exact or dtype == torch.float64:
        return verdict
    wide = copy.deepcopy(model).double()
    with KeepFloat64():
        reference = evaluate(plain_logprobs(wide, sequences), terms, wide)
    own = compare(plain, reference, 0.0)
    limit = min(max(verdict.limit, ROUNDING * max(own.loss, own.gradient)), CAP.get(dtype, CAP_ROUGH))
    return replace(compare(merged, reference, limit), slack=max(SLACK * verdict.limit, ROUNDING * own.logprobs))


def plain_logprobs(model: Any, sequences: Sequence[ArrayLike]) -> list[Tensor]:
    """As `TreeModel.logprobs`, one sequence a forward pass."""
    device = next(model.parameters()).device
    out = []
    for sequence in sequences:
        ids = torch.as_tensor(sequence, dtype=torch.int64, device=device)
        if len(ids) < 2:
            out.append(torch.zeros(0, device=device))
            continue
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        table = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
        out.append(table.gather(1, ids[1:, None])[:, 0])
    return out


def evaluate(logprobs: list[Tensor], terms: Terms, model: Any) -> Result:
    """Loss and gradients of one path; `.grad` is not touched."""
    wanted = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not wanted or not torch.is_grad_enabled():
        raise ForgeError("nothing to compare: no parameter requires a gradient, or gradients are switched off")
    none = next(iter(wanted.values())).new_zeros(0)
    parts = torch.cat([none, *(part.flatten() for part in terms(logprobs))])
    if parts.requires_grad:
        grads = torch.autograd.grad(parts.sum(), list(wanted.values()), materialize_grads=True)
    else:  # no sequence is longer than a token
        grads = tuple(torch.zeros_like(value) for value in wanted.values())
    parts = parts.detach()
    return Result(
        float(parts.sum()),
        float(parts.abs().sum()),
        [one.detach() for one in logprobs],
        dict(zip(wanted, grads, strict=True)),
    )


def compare(one: Result, other: Result, limit: float) -> Verdict:
    """The errors of `one` against `other`."""
    whole = torch.stack([grad.double().norm() for grad in other.grads.values()]).norm()
    errors = {
        name: float((one.grads[name].double() - grad.double()).norm() / max(grad.double().norm(), 1e-3 * whole, TINY))
        for name, grad in other.grads.items()
    }
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    gaps = [(a.double() - b.double()).abs().max() for a, b in zip(one.logprobs, other.logprobs, strict=True) if len(a)]
    return Verdict(
        loss=abs(one.loss - other.loss) / max(other.scale, float(TINY)),
        logprobs=float(torch.stack(gaps).max()) if gaps else 0.0,
        gradient=errors[worst],
        worst=worst,
        limit=limit,
        slack=SLACK * limit,
    )


TINY = torch.tensor(1e-300, dtype=torch.float64)


class KeepFloat64(TorchFunctionMode):
    """Within, float64 stays float64. transformers' RMSNorm (and some softmaxes) compute in float32 whatever comes in;
    there a difference of 1e-16 between two exact paths becomes one of 1e-7 wherever rounding tips."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            narrows = func in (Tensor.to, Tensor.type) and torch.float32 in (*args[1:], kwargs.get("dtype"))
            if func is Tensor.float or narrows:
                return first
            if kwargs.get("dtype") is torch.float32 and func in (torch.softmax, torch.nn.functional.softmax):
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
