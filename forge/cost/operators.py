"""Roofline by operator: what one engine iteration has to do, and how long that takes.

`Work` is what an iteration does on one device, each operator in seconds at the hardware's peak rate; `Efficiencies`
says what share of the peaks is reached and what overheads come on top; `seconds` joins them. All three take floats,
or arrays of one shape: a simulator asks for one iteration, a fit for a thousand at once.

The usual roofline forms: per operator `t = ((Tc/e_c)^s + (Tm/e_m)^s)^(1/s)`, expert coverage `n (1-(1-k/n)^B)`,
all-reduce `2 (tp-1)/tp` of the activations twice a layer, KV bytes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from forge.cost.cards import Hardware, ModelCard
from forge.types import ForgeError

Number = float | NDArray[np.float64]

#: Bytes a weight, and the format the tensor cores compute in. Block scales are counted (one a 32 of 4-bit weights).
FORMATS = {"fp32": (4.0, "fp32"), "bf16": (2.0, "bf16"), "fp8": (1.0, "fp8"), "int4": (0.5625, "bf16")}
FORMATS["mxfp4"] = (0.53125, "bf16")
ACTIVATION_BYTES = 2.0
SHARPNESS = 3.0  # s of the smooth maximum: 1 adds compute and memory, infinity overlaps them wholly


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Formats of dense weights, routed experts and KV: keys of FORMATS. Head and embeddings are bf16 or wider."""

    dense: str = "bf16"
    experts: str = "bf16"
    kv: str = "bf16"

    def __post_init__(self) -> None:
        for spec in fields(self):
            if (value := getattr(self, spec.name)) not in FORMATS:
                raise ForgeError(f"precision.{spec.name} = {value!r}: must be one of {', '.join(FORMATS)}")

    @property
    def head(self) -> str:
        return "fp32" if self.dense == "fp32" else "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model on `tp * dp` devices: attention and dense layers split over `tp`, replicated `dp` times; experts split
    over all devices, whole ones over `ep` of them, each over the rest."""

    model: ModelCard
    hardware: Hardware
    precision: Precision = Precision()
    tp: int = 1
    ep: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.ep, self.dp) < 1:
            raise ForgeError(f"tp = {self.tp}, ep = {self.ep}, dp = {self.dp}: must be at least 1")
        if self.devices % self.ep:
            raise ForgeError(f"ep = {self.ep}: must divide tp * dp = {self.devices}")

    @property
    def devices(self) -> int:
        return self.tp * self.dp

    @property
    def weight_bytes(self) -> float:
        """On one device."""
        m, p = self.model, self.precision
        routed = m.expert_layers * m.experts * m.expert_weights * FORMATS[p.experts][0] / self.devices
        head = m.head_weights * (1 if m.tied_embeddings else 2) * FORMATS[p.head][0]
        return routed + (m.dense_weights * FORMATS[p.dense][0] + head) / self.tp

    @property
    def kv_bytes(self) -> float:
        """Of one token on one device, all layers; heads are replicated where there are fewer than devices. A window
        is not counted: engines keep such layers' blocks in the same pool."""
        m = self.model
        width = m.latent or 2 * max(1.0, m.kv_heads / self.tp) * m.head_dim
        return m.layers * width * FORMATS[self.precision.kv][0]

    @property
    def kv_tokens(self) -> float:
        """How many tokens of KV one replica holds; 0 or less where the weights do not fit."""
        h = self.hardware
        return (h.memory * h.usable - self.weight_bytes) / self.kv_bytes

    @property
    def link(self) -> float:
        """Bytes/s of the slowest link that a collective crosses."""
        h = self.hardware
        return h.link_bandwidth if self.devices <= h.devices_per_node else h.network_bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One iteration on one device: seconds at peak rate by operator, and counts of what has an overhead.

    `expert_read` is for all experts; of which `expert_tokens`, choosing the share `expert_share` each, need some.
    """

    dense_compute: Number = 0.0
    dense_read: Number = 0.0
    expert_compute: Number = 0.0
    expert_read: Number = 0.0
    expert_tokens: Number = 0.0
    expert_share: Number = 0.0
    head_compute: Number = 0.0
    head_read: Number = 0.0
    context_attention: Number = 0.0
    generation_attention: Number = 0.0
    activations: Number = 0.0
    link: Number = 0.0
    collectives: Number = 0.0
    layers: Number = 0.0
    expert_layers: Number = 0.0
    latent_layers: Number = 0.0
    launched_layers: Number = 0.0
    rows: Number = 0.0
    row_layers: Number = 0.0


#: What `work` makes of the number of sequences alone.
OF_HEADS = ("head_compute", "head_read", "rows", "row_layers")

#: What is proportional to the number of tokens.
OF_TOKENS = ("dense_compute", "expert_compute", "expert_tokens", "activations", "link")


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Shares of the peaks that are reached, and overheads in seconds. Defaults: what the fit of
    `hopper_serving_measured.csv` starts from, not its result.

    `activation` counts how often a token's hidden state crosses memory in a layer besides the GEMMs. Tokens choose
    alike: B of them cover the experts as `B^spread` independent ones would. `layer_s` comes
    per layer; on top `expert_layer_s` per layer with experts (routing, permutation) and `latent_layer_s` per layer of
    latent attention (more, smaller kernels). `row_s` comes per sequence, `row_layer_s` per sequence and layer,
    `collective_s` per collective, `step_s` per iteration. An iteration that prefills runs without a CUDA graph: the
    host needs `launch_s` a layer, which hides behind the device's time or hides it.
    """

    flops: Number = 0.6
    bandwidth: Number = 0.75
    expert_flops: Number = 0.4
    expert_bandwidth: Number = 0.6
    attention_flops: Number = 0.4
    attention_bandwidth: Number = 0.6
    link: Number = 0.5
    activation: Number = 10.0
    spread: Number = 0.9
    step_s: Number = 1e-3
    layer_s: Number = 4e-5
    expert_layer_s: Number = 4e-5
    latent_layer_s: Number = 3e-5
    launch_s: Number = 3e-4
    row_s: Number = 1e-5
    row_layer_s: Number = 2e-7
    collective_s: Number = 1e-5


def seconds(work: Work, by: Efficiencies) -> Number:
    """Of one iteration."""
    return by.step_s + roofline(device_seconds(work, by), work.launched_layers * by.launch_s)


def device_seconds(work: Work, by: Efficiencies) -> Number:
    """Of one iteration, without what the host adds."""
    total: Number = (
        roofline(work.dense_compute / by.flops, work.dense_read / by.bandwidth)
        + roofline(work.expert_compute / by.expert_flops, covered(work, by) * work.expert_read / by.expert_bandwidth)
        + roofline(work.head_compute / by.flops, work.head_read / by.bandwidth)
        + work.context_attention / by.attention_flops
        + work.generation_attention / by.attention_bandwidth
        + work.activations * by.activation
        + work.link / by.link
        + work.collectives * by.collective_s
        + work.layers * by.layer_s
        + work.expert_layers * by.expert_layer_s
        + work.latent_layers * by.latent_layer_s
        + work.rows * by.row_s
        + work.row_layers * by.row_layer_s
    )
    return total


def covered(work: Work, by: Efficiencies) -> Number:
    """Share of the experts that some token chooses: `1 - (1 - k/n)^B` for B independent tokens."""
    one: Number = 1.0 - (1.0 - work.expert_share) ** (work.expert_tokens**by.spread)
    return one


def roofline(compute: Number, memory: Number) -> Number:
    """Smooth maximum; never less than either."""
    total: Number = (compute**SHARPNESS + memory**SHARPNESS) ** (1.0 / SHARPNESS)
    return total


def work(on: Deployment, rows: float = 0, context: float = 0, prefill: Sequence[tuple[float, float]] = ()) -> Work:
    """An iteration that decodes one token for each of `rows` sequences, which hold `context` tokens together, and
    prefills chunks: (new tokens, tokens before them) each. Per replica; experts see the tokens of all replicas.
    """
    m, h, p = on.model, on.hardware, on.precision
    new = sum(tokens for tokens, _ in prefill)
    tokens = rows + new
    heads = rows + len(prefill)  # only a last token's logits are asked for
    dense = m.dense_weights / on.tp
    byte, number = FORMATS[p.dense]
    head_byte, head_number = FORMATS[p.head]
    return Work(
        dense_compute=2 * tokens * dense / h.peak(number),
        dense_read=dense * byte / h.bandwidth,
        head_compute=2 * heads * m.head_weights / on.tp / h.peak(head_number),
        head_read=m.head_weights / on.tp * head_byte / h.bandwidth,
        context_attention=sum(context_flops(on, *chunk) for chunk in prefill) / h.peak("bf16"),
        generation_attention=_generation_s(on, rows, context),
        activations=tokens * m.layers * m.hidden * ACTIVATION_BYTES / h.bandwidth,
        layers=m.layers,
        expert_layers=m.expert_layers,
        latent_layers=m.layers if m.latent else 0,
        launched_layers=m.layers if prefill else 0,
        rows=heads,
        row_layers=heads * m.layers,
        **_experts(on, tokens * on.dp),
        **_collectives(on, tokens),
    )


def _experts(on: Deployment, tokens: float) -> dict[str, float]:
    """Routed experts, one share of each in this layer and device; `seconds` says how many are read."""
    m, h = on.model, on.hardware
    if not m.expert_layers:
        return {}
    byte, number = FORMATS[on.precision.experts]
    one = m.expert_layers * m.expert_weights / on.devices
    return {
        "expert_compute": 2 * tokens * m.active_experts * one / h.peak(number),
        "expert_read": m.experts * one * byte / h.bandwidth,
        "expert_tokens": tokens,
        "expert_share": m.active_experts / m.experts,
    }


def _collectives(on: Deployment, tokens: float) -> dict[str, float]:
    """Two all-reduces a layer over `tp`; where experts span replicas, dispatch and combine are all-to-all instead of
    the second."""
    m, hidden = on.model, tokens * on.model.hidden * ACTIVATION_BYTES
    reduce = 2 * (on.tp - 1) / on.tp * hidden / on.link
    spread = m.expert_layers if on.dp > 1 else 0
    counted = (2 * m.layers - spread) if on.tp > 1 else 0
    n = on.devices
    exchange = 2 * m.active_experts * (n - 1) / n * hidden / on.tp / on.link
    return {"link": counted * reduce + spread * exchange, "collectives": counted + 2 * spread}


def pair_flops(on: Deployment) -> tuple[float, float]:
    """FLOP of one device for a (query, key) pair in prefill: 4 d a head, in layers that see all, an indexer that scores
    every pair with few heads included, and in those that see a window."""
    m = on.model
    width = m.heads / on.tp * (2 * (m.head_dim + m.rope_head_dim) + 2 * (m.value_dim or m.head_dim))
    return width * (m.layers - m.window_layers) + m.index_dim * 4 * m.window_layers, width * m.window_layers


def context_flops(on: Deployment, tokens: float, before: float) -> float:
    """Of one device, causal; a window bounds the pairs of its layers."""
    every, windowed = pair_flops(on)
    pairs = tokens * before + tokens * (tokens + 1) / 2
    return every * pairs + windowed * min(pairs, tokens * on.model.window)


def _generation_s(on: Deployment, rows: float, context: float) -> float:
    """At the peaks: linear in `context`, which is what the closed form rests on. A windowed layer is charged its whole
    window for every row."""
    m, h = on.model, on.hardware
    kv = on.kv_bytes / m.layers
    latent = 2 * m.heads / on.tp * (m.latent + m.kv_lora_rank)  # FLOP a token, keys and values in latent space
    token_s = max(kv / h.bandwidth, latent / h.peak("bf16"))
    index_s = m.index_dim * m.window_layers / h.bandwidth
    whole = m.layers - m.window_layers
    return context * (whole * token_s + index_s) + rows * m.window_layers * m.window * token_s
