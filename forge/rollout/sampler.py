"""One token per row from logits: temperature, top_p, greedy, and its log probability as sampled."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def sample(
    logits: Tensor,
    *,
    temperature: NDArray[np.float32],
    top_p: NDArray[np.float32],
    draws: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Token ids [n] and log probabilities [n] for logits [n, vocabulary], one draw in [0, 1) per row.

    A row of temperature 0 takes the argmax and its log probability under the plain softmax. Otherwise the inverse
    of the cumulative distribution is taken at the draw: the same draw gives the same token in any batch. A row
    whose logits are not finite comes back with a NaN log probability.
    """
    greedy = temperature == 0
    scale = torch.from_numpy(np.where(greedy, np.float32(1), temperature)).to(logits.device)
    logits = logits.float()
    # The maximum goes first so that a tiny temperature cannot overflow.
    logprobs = ((logits - logits.amax(-1, keepdim=True)) / scale[:, None]).log_softmax(-1)
    nucleus = np.flatnonzero((top_p < 1) & ~greedy)
    if nucleus.size:
        rows = torch.from_numpy(nucleus).to(logits.device)
        limit = torch.from_numpy(top_p[nucleus]).to(logits.device)
        logprobs[rows] = _renormalised_top_p(logprobs[rows], limit)
    ids = _inverse_cdf(logprobs, torch.from_numpy(draws).to(logits.device))
    if greedy.any():
        ids = torch.where(torch.from_numpy(greedy).to(logits.device), logits.argmax(-1), ids)
    chosen = logprobs.gather(-1, ids[:, None])[:, 0]
    return ids.cpu().numpy(), chosen.cpu().numpy()


def _renormalised_top_p(logprobs: Tensor, top_p: Tensor) -> Tensor:
    """Log probabilities [n, vocabulary] of the smallest set of likeliest tokens whose mass reaches top_p [n]."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    mass = ordered.exp()
    # A token stays if the likelier ones have not reached top_p yet; so the first always stays.
    dropped = mass.cumsum(-1) - mass >= top_p[:, None]
    dropped[:, 0] = False
    kept = ordered.masked_fill(dropped, -torch.inf).log_softmax(-1)
    return torch.empty_like(kept).scatter_(-1, order, kept)


def _inverse_cdf(logprobs: Tensor, draws: Tensor) -> Tensor:
    """First id [n] whose cumulative probability exceeds the draw [n]; never one of probability 0.

    Summed in fp64: over a vocabulary of 50k the rounding of an fp32 sum reaches the mass of rare tokens.
    """
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    target = draws[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Only a NaN row can point past the end.
    return ids.clamp_(max=logprobs.shape[-1] - 1)
