"""Sections of what rollout instances have around them: prefill instances, KV tiers, heads that draft."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from forge.sections import Positive, Seconds, Section

Rate = Annotated[float, Field(ge=1)]  # bytes/s
Chance = Annotated[float, Field(ge=0, le=1)]
Least = Annotated[float, Field(ge=0)]


class Prefill(Section):
    """Instances that compute prompts only, beside `engine.instances`: those decode, and are the ones that requests are
    routed to; which prompts, `policy.placement` says. `tp`, `ep`, `dp` are their own, all else is the deployment's.

    KV crosses at `bandwidth` bytes/s a device (by default the hardware's network), all devices of an instance together.
    `block_s`: of a block's messages, on the narrower side's cards; of the field: 66 ms less for 235 fewer blocks on one
    engine.
    """

    instances: Positive = 1
    tp: Positive = 1
    ep: Positive = 1
    dp: Positive = 1
    bandwidth: Rate | None = None
    transfer_s: Seconds = 0.0  # before the first byte
    block_s: Seconds = 0.0


class TierSizes(Section):
    """KV that instances evict: host memory of each (`l2`), a store of all (`l3`), 0 for none. Bandwidths in bytes/s,
    of one instance's host and of the whole store; latencies before the first byte of a fetch."""

    l2_gib: Least = 0.0
    l2_bandwidth: Rate = 50e9  # PCIe 5 x16
    l2_latency_s: Seconds = 0.0
    l3_gib: Least = 0.0
    l3_bandwidth: Rate = 25e9  # 200 Gb/s
    l3_latency_s: Seconds = 1e-3


class Speculation(Section):
    """Instances have a head that drafts; how deep, `policy.speculation` says. `acceptance`: of a draft whose
    predecessors were accepted, one for all depths (up to `most`) or one for each.

    A draft step takes `draft_share` of a decode step. Acceptance falls by exp(-drift) with every weights version,
    unless the head is trained along (`head_follows`).
    """

    acceptance: Chance | Annotated[tuple[Chance, ...], Field(min_length=1)] = 0.8
    most: Positive = 7
    draft_share: Least = 0.05
    drift: Least = 0.0
    head_follows: bool = False
    #: tokens of KV that a request is taken to hold where depth is weighed
    context: Annotated[int, Field(ge=0)] = 4096

    def by_depth(self) -> tuple[float, ...]:
        if isinstance(self.acceptance, tuple):
            return self.acceptance
        return (self.acceptance,) * self.most
