"""`forge bench tree`: what prefix-tree merging saves, against its bound and two baselines, in training a real step.

Both sides are the trainer's own code (`TrainEngine.gradient`): merged, and with `merge = "none"` one unpadded sample at
a time through the causal flash kernel. A long naive side is timed on every tenth sample and scaled by FLOPs. Seconds
are CPU seconds of one thread, or synchronised wall seconds on a GPU.

FLOPs of a gradient (forward 1, backward 2): 6 P tokens + 6 d V rows + 12 L H D pairs, where P are the weights of the
layers, rows the distinct logits, and pairs what attention sees. The bound is their ratio, flat over merged.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from forge.bench import workloads
from forge.bench.memory import Peak
from forge.bench.workloads import Workload
from forge.forest import Forest
from forge.train.attention import BACKENDS, TreeLayout, pick, unavailable
from forge.train.engine import TrainEngine, quiet
from forge.train.microbatch import inputs
from forge.train.step import TrainConfig
from forge.types import ForgeError, Json, TrainSample

#: The model every row is measured on, unless said otherwise: random weights, real shapes.
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1 << 17,
}
WHOLE = 10**9  # a token budget that never cuts
#: A naive side of more flat tokens than this is timed on a tenth of its samples, or less if that has more than
#: SAMPLED_TOKENS.
TENTH, SAMPLED_ABOVE, SAMPLED_TOKENS = 10, 40_000, 200_000
#: For forests of half a million distinct tokens: the model, and how many tokens are merged at once.
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
BUDGET = 1 << 16
REPEATS, SHORT_S = 3, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one way of forwarding a workload has to do."""

    tokens: int
    pairs: int
    rows: int

    def flops(self, model: Any) -> float:
        c = model.config
        embedded = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
        layers = sum(p.numel() for p in model.parameters()) - embedded
        width = c.num_attention_heads * c.head_dim
        return float(
            6 * layers * self.tokens
            + 6 * c.hidden_size * c.vocab_size * self.rows
            + 12 * c.num_hidden_layers * width * self.pairs
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One workload: sizes, ratios over merged, CPU seconds, peak MiB. None: not defined for it, or not to be had.

    `sampled`: the share of the naive side's samples that was timed.
    """

    workload: str
    model: str
    flat: int
    unique: int
    flat_over_unique: float
    attention_ratio: float
    flop_bound: float
    speedup_vs_per_request: float
    efficiency: float
    speedup_vs_trajectory: float | None
    merged_s: float
    per_request_s: float
    sampled: float
    merged_mib: float | None
    per_request_mib: float | None
    trajectory_mib: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """One side: seconds for all of it, its peak, and the share of samples that was run."""

    seconds: float
    mib: float | None
    share: float = 1.0


class Bench:
    """A model in `folder`, written there, and engines on it. `budget` bounds the tokens merged at once."""

    def __init__(self, folder: Path, device: str, shape: dict[str, int] | None = None, budget: int = WHOLE) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        quiet()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.device = device
        self.folder = folder
        LlamaForCausalLM(LlamaConfig(**{**SHAPE, **(shape or {})})).save_pretrained(self.folder)
        self.merged = self.engine(merge="tree", token_budget=budget)
        self.naive = self.engine(merge="none", token_budget=1)

    @property
    def name(self) -> str:
        model = self.merged.model
        c = model.config
        size = sum(p.numel() for p in model.parameters())
        return f"Llama {size / 1e6:.2g}M, {c.num_hidden_layers} layers of {c.hidden_size}, random weights"

    def engine(self, **options: Any) -> TrainEngine:
        settings = {"token_budget": WHOLE, "min_micro_batches": 1, "device": self.device, **options}
        return TrainEngine(self.folder, TrainConfig(**settings))

    def measured(self, engine: TrainEngine, samples: Sequence[TrainSample]) -> Measured:
        """The peak of the first run; the seconds of the fastest, where one is so short that noise would count."""
        peak = Peak(self.device)
        seconds = [self._once(engine, samples)]
        mib = peak.mib()
        while len(seconds) < REPEATS and seconds[0] < SHORT_S:
            seconds.append(self._once(engine, samples))
        return Measured(min(seconds), mib)

    def _once(self, engine: TrainEngine, samples: Sequence[TrainSample]) -> float:
        began = now(self.device)
        engine.gradient(samples)
        return now(self.device) - began

    def naive_side(self, samples: list[TrainSample]) -> Measured:
        """One sample at a time; of many, a stratified part, its seconds scaled by FLOPs."""
        tokens = sum(len(s.token_ids) for s in samples)
        every = max(TENTH, tokens // SAMPLED_TOKENS)
        if tokens <= SAMPLED_ABOVE or len(samples) < 2 * every:
            return self.measured(self.naive, samples)
        part = sorted(samples, key=lambda s: len(s.token_ids))[every // 2 :: every]
        scale = cost_flat(samples).flops(self.naive.model) / cost_flat(part).flops(self.naive.model)
        one = self.measured(self.naive, part)
        return Measured(one.seconds * scale, one.mib, len(part) / len(samples))

    def row(self, workload: Workload) -> Row:
        requests = workload.per_request()
        self.measured(self.merged, requests[:1])  # warm
        merged, naive = self.measured(self.merged, requests), self.naive_side(requests)
        try:
            trajectory: Measured | None = self.naive_side(workload.per_trajectory())
        except ForgeError:
            trajectory = None  # contexts are rewritten: there is no such baseline
        flat, unique = cost_flat(requests), cost_merged(requests)
        bound = flat.flops(self.merged.model) / unique.flops(self.merged.model)
        return Row(
            workload=workload.name,
            model=self.name,
            flat=flat.tokens,
            unique=unique.tokens,
            flat_over_unique=flat.tokens / unique.tokens,
            attention_ratio=flat.pairs / unique.pairs,
            flop_bound=bound,
            speedup_vs_per_request=naive.seconds / merged.seconds,
            efficiency=naive.seconds / merged.seconds / bound,
            speedup_vs_trajectory=trajectory.seconds / merged.seconds if trajectory else None,
            merged_s=merged.seconds,
            per_request_s=naive.seconds,
            sampled=naive.share,
            merged_mib=merged.mib,
            per_request_mib=naive.mib,
            trajectory_mib=trajectory.mib if trajectory else None,
        )


def now(device: str) -> float:
    """CPU seconds of this process, or wall seconds once the GPU has done what it was given."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def cost_flat(samples: Sequence[TrainSample]) -> Cost:
    lengths = [len(inputs(sample)) for sample in samples]
    rows = sum(sum(sample.loss) for sample in samples)
    return Cost(tokens=sum(lengths), pairs=sum(n * (n + 1) // 2 for n in lengths), rows=rows)


def cost_merged(samples: Sequence[TrainSample]) -> Cost:
    forest = Forest.of([inputs(sample) for sample in samples])
    rows: set[int] = set()
    for i, sample in enumerate(samples):
        nodes = forest.nodes_of(i)
        rows.update(int(nodes[t - 1]) for t in range(1, len(sample.loss)) if sample.loss[t])
    return Cost(tokens=len(forest), pairs=forest.pairs, rows=len(rows))


def overhead(bench: Bench, repeats: int = 5) -> float:
    """Extra time of the merged path where nothing is shared, as a share: eight random sequences of 1,024 tokens."""
    apart = workloads.agents(turns=1, group=8, prompt=0, step=1024, vocabulary=SHAPE["vocab_size"]).per_request()
    plain = bench.engine(merge="none")
    ratios = []
    for _ in range(repeats):  # side by side, so that a machine that drifts drifts for both
        flat_s = bench.measured(plain, apart).seconds
        ratios.append(bench.measured(bench.merged, apart).seconds / flat_s)
    return statistics.median(ratios) - 1


def attention_trees() -> dict[str, Forest]:
    """Two shapes of about 8k distinct tokens: one prompt group, and agents that fork."""
    import numpy as np

    draw = np.random.default_rng(0)

    def fresh(n: int) -> Any:
        return draw.integers(0, 1 << 30, n)

    stem = fresh(1024)
    group = [np.concatenate([stem, fresh(448)]) for _ in range(16)]
    forks = []
    spine = np.empty(0, dtype=np.int64)
    for _ in range(8):
        spine = np.concatenate([spine, fresh(512)])
        forks += [np.concatenate([spine, fresh(170)]) for _ in range(3)]
    return {"prompt 1024 + 16 x 448": Forest.of(group), "spine of 8 x 512, 3 forks of 170 each": Forest.of(forks)}


def attention_speedup(device: torch.device, heads: int = 8, width: int = 64, repeats: int = 3) -> dict[str, float]:
    """Forward and backward time of attention under one dense mask over ours, per tree."""
    ours = pick("auto", device)
    out = {}
    for name, forest in attention_trees().items():
        layout = TreeLayout.of(forest)
        q, k, v = (torch.randn(1, heads, len(forest), width, device=device, requires_grad=True) for _ in range(3))

        def once(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout) -> float:
            began = now(device.type)
            torch.autograd.grad(attend(q, k, v, layout, width**-0.5, None).sum(), (q, k, v))
            return now(device.type) - began

        for attend in (ours, BACKENDS["dense"]):
            once(attend, q, k, v, layout)  # plans and masks are made once a forest, not once a layer
        pairs = [(once(BACKENDS["dense"], q, k, v, layout), once(ours, q, k, v, layout)) for _ in range(repeats)]
        out[name] = statistics.median(dense / mine for dense, mine in pairs)
    return out


def peak_memory_ratio(device: str) -> float | None:
    """Peak memory of one micro-batch padded side by side, over the same samples merged. None on a CPU without Linux."""
    if device == "cpu" and sys.platform != "linux":
        return None
    return _peak("none", device) / _peak("tree", device)


def _peak(merge: str, device: str) -> float:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:  # a process of its own, for its peak never falls
        return float(pool.apply(_peak_mib, (merge, device)))


def _peak_mib(merge: str, device: str) -> float:
    with TemporaryDirectory() as folder:
        bench = Bench(Path(folder), device)
        engine = bench.engine(merge=merge)
    load = workloads.agents(turns=8, group=2, prompt=1024, step=64, vocabulary=SHAPE["vocab_size"]).per_request()
    engine.gradient(load[:1])
    mib = bench.measured(engine, load).mib
    assert mib is not None
    return mib


def rows(bench: Bench, factor: int, data: Path | None) -> list[Row]:
    """The stated agent workload, a plain chat, and tau-bench's airline trajectories where `data` has them."""
    vocabulary = SHAPE["vocab_size"]
    loads = [
        workloads.agents(turns=60, group=8, prompt=20_000 // factor, step=500 // factor, vocabulary=vocabulary),
        workloads.chat(vocabulary),
    ]
    if data is None or not (data / workloads.TAU_BENCH).is_file():
        return [bench.row(load) for load in loads]
    task = min(r["task_id"] for r in workloads.read_runs(data))
    loads += [
        workloads.airline(data, vocabulary, lambda r: r["task_id"] == task and r["trial"] == 0, "airline, one run"),
        workloads.airline(data, vocabulary, lambda r: r["task_id"] == task, "airline, one task group"),
    ]
    whole = workloads.airline(data, vocabulary, lambda _: True, "airline, whole forest")
    with TemporaryDirectory() as folder:
        small = Bench(Path(folder), bench.device, SMALL, BUDGET)
    return [*(bench.row(load) for load in loads), small.row(whole)]


def run(*, data: Path | None = None, factor: int = 10, device: str | None = None) -> Json:
    """All figures of the contract, `rows` as a table, and what they were measured on."""
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with TemporaryDirectory() as folder:
        bench = Bench(Path(folder), chosen)
        table = rows(bench, factor, data)
        spare = overhead(bench)
    attention = attention_speedup(torch.device(chosen))
    main = table[0]
    return {
        "figures": {
            "flat_over_unique": main.flat_over_unique,
            "attention_ratio": main.attention_ratio,
            "flop_bound": main.flop_bound,
            "speedup_vs_per_request": main.speedup_vs_per_request,
            "speedup_vs_trajectory": main.speedup_vs_trajectory,
            "efficiency": main.efficiency,
            "speedup_vs_dense_mask": min(attention.values()),
            "overhead_no_sharing": spare,
            "peak_memory_ratio": peak_memory_ratio(chosen),
        },
        "rows": [asdict(row) for row in table],
        "attention": attention,
        "workload": f"{main.workload} (p = 20k and d = 500 divided by {factor})",
        "model": main.model,
        "device": chosen,
        "unavailable": {b: unavailable(b, torch.device(chosen)) for b in BACKENDS},
    }
