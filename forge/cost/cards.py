"""Descriptions of hardware and models, in TOML: the files that ship (`forge/hardware`, `forge/model_cards`), or yours.

    hardware("h200_sxm")        # by name
    model_card("my/model.toml") # by path

A key no description knows, a missing key and an impossible value are errors that name file and key.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from forge.types import ForgeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator and its links. Rates are peaks as the vendor states them, dense; what is reached of them are
    the efficiencies' business.

    `flops` in FLOP/s by format of the operands; a format that is absent computes as bf16. `bandwidth` of the device's
    memory, `link_bandwidth` to a neighbour in the node and `network_bandwidth` to another node, bytes/s one way.
    `memory` in bytes; the share `usable` of it holds weights and KV.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    usable: float = 0.92
    link_bandwidth: float
    network_bandwidth: float
    devices_per_node: int = 8

    def __post_init__(self) -> None:
        _positive(self)
        if "bf16" not in self.flops:
            raise ForgeError("flops.bf16: missing; every device needs it")
        if self.usable > 1:
            raise ForgeError(f"usable = {self.usable}: must be at most 1")

    def peak(self, number: str) -> float:
        """FLOP/s on operands of format `number`."""
        return self.flops.get(number, self.flops["bf16"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A transformer's shape. Widths are in elements.

    Attention is grouped-query (`kv_heads` of `head_dim`), or multi-head latent where `kv_lora_rank` is set: then
    `head_dim` counts the part of a query head without rotary position and `rope_head_dim` the part with, and one
    latent of `kv_lora_rank + rope_head_dim` a token and layer is cached. `window_layers` of the layers see `window`
    tokens at most; `index_dim` is the width of the keys by which a sparse attention chooses them. Layers beyond
    `dense_layers` have `experts`, `active_experts` of them chosen for a token, `shared_experts` always.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied_embeddings: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    value_dim: int = 0
    window: int = 0
    window_layers: int = 0
    index_dim: int = 0
    dense_layers: int = 0
    experts: int = 0
    active_experts: int = 0
    shared_experts: int = 0
    expert_intermediate: int = 0
    aliases: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        _positive(self, zero={f.name for f in fields(self) if f.default == 0})
        if self.window_layers > self.layers or self.dense_layers > self.layers:
            raise ForgeError(f"window_layers, dense_layers: must be at most layers = {self.layers}")
        if self.experts and not 0 < self.active_experts <= self.experts:
            raise ForgeError(f"active_experts = {self.active_experts}: must lie in [1, experts = {self.experts}]")
        if self.experts and not self.expert_intermediate:
            raise ForgeError("expert_intermediate: missing; a model with experts needs it")
        if self.heads % self.kv_heads:
            raise ForgeError(f"kv_heads = {self.kv_heads}: must divide heads = {self.heads}")
        if bool(self.window) != bool(self.window_layers):
            raise ForgeError("window, window_layers: give both or neither")

    @property
    def latent(self) -> int:
        """Cached width of multi-head latent attention, 0 without."""
        return self.kv_lora_rank + self.rope_head_dim if self.kv_lora_rank else 0

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's projections: `h d (2 n_q + 2 n_kv)`, or those of latent attention."""
        if not self.kv_lora_rank:
            return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        query = self.heads * (self.head_dim + self.rope_head_dim)
        value = self.value_dim or self.head_dim
        down = self.hidden * ((self.q_lora_rank or query) + self.latent)
        up = self.q_lora_rank * query + self.kv_lora_rank * self.heads * (self.head_dim + value)
        return down + up + self.heads * value * self.hidden

    @property
    def dense_weights(self) -> int:
        """Weights that every token passes through, head and embeddings left out."""
        mlp = 3 * self.hidden * self.intermediate * (self.layers - self.expert_layers)
        shared = 3 * self.hidden * self.expert_intermediate * self.shared_experts + self.hidden * self.experts
        return self.layers * self.attention_weights + mlp + self.expert_layers * shared

    @property
    def expert_weights(self) -> int:
        """Weights of one routed expert in one layer."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def weights(self) -> int:
        """All of them, norms and biases left out."""
        routed = self.expert_layers * self.experts * self.expert_weights
        return self.dense_weights + routed + self.head_weights * (1 if self.tied_embeddings else 2)

    @property
    def active_weights(self) -> int:
        """Those one token is multiplied with; embeddings are looked up, not multiplied."""
        routed = self.expert_layers * self.active_experts * self.expert_weights
        return self.dense_weights + routed + self.head_weights


def hardware(name: str | Path) -> Hardware:
    """A description that ships, or a file of yours."""
    return _load(Hardware, "hardware", name)


def model_card(name: str | Path) -> ModelCard:
    """A description that ships, by its name or an alias, or a file of yours."""
    try:
        return _load(ModelCard, "model_cards", name)
    except _NotFoundError:
        for path in sorted(folder("model_cards").glob("*.toml")):
            if str(name) in (card := read(ModelCard, path)).aliases:
                return card
        raise


def folder(kind: str) -> Path:
    """Where descriptions of a kind ship: `hardware` or `model_cards`."""
    return Path(str(resources.files("forge"))) / kind


Card = TypeVar("Card", Hardware, ModelCard)


class _NotFoundError(ForgeError):
    pass


def _load(kind: type[Card], where: str, name: str | Path) -> Card:
    given = Path(name)
    if given.is_file():
        return read(kind, given)
    shipped = folder(where) / f"{given.name.removesuffix('.toml')}.toml"
    if given.parent == Path() and shipped.is_file():
        return read(kind, shipped)
    known = ", ".join(sorted(p.stem for p in folder(where).glob("*.toml")))
    raise _NotFoundError(f"{name}: no such description; those that ship in forge/{where}: {known}")


def read(kind: type[Card], path: Path) -> Card:
    """Raises ForgeError naming the file and the key."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ForgeError(f"{path}: not a readable TOML file: {error}") from None
    known: dict[str, Field[Any]] = {f.name: f for f in fields(kind)}
    for key in data:
        if key not in known:
            raise ForgeError(f"{path}: {key}: unknown key; check its spelling")
    for key, spec in known.items():
        if key not in data and spec.default is MISSING:
            raise ForgeError(f"{path}: {key}: missing; add it")
    hints = get_type_hints(kind)
    values = {key: _value(path, key, value, hints[key]) for key, value in data.items()}
    try:
        return kind(**values)
    except ForgeError as error:
        raise ForgeError(f"{path}: {error}") from None


def _value(path: Path, key: str, value: Any, hint: Any) -> Any:
    """The value as its field wants it, or ForgeError."""
    if hint in (str, bool, int) and type(value) is hint:
        return value
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint == tuple[str, ...] and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    if hint == Mapping[str, float] and isinstance(value, dict):
        return {name: _value(path, f"{key}.{name}", one, float) for name, one in value.items()}
    wanted = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}.get(hint, "another type")
    raise ForgeError(f"{path}: {key} = {value!r}: must be {wanted}")


def _positive(card: Hardware | ModelCard, zero: frozenset[str] | set[str] = frozenset()) -> None:
    for spec in fields(card):
        value = getattr(card, spec.name)
        for name, one in value.items() if isinstance(value, Mapping) else [("", value)]:
            if isinstance(one, (int, float)) and not isinstance(one, bool):
                key = f"{spec.name}.{name}" if name else spec.name
                if not math.isfinite(one) or one < 0 or (one == 0 and spec.name not in zero):
                    raise ForgeError(f"{key} = {one}: must be positive")
