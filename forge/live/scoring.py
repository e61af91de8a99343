"""`forge eval`: held-out tasks scored per scaffold with the embedded engine, without training.

`scores.json` of the run folder: {"model", "scaffolds": [{"scaffold", "mean", "low", "high", "gain", "died", "faults",
"turns"}], "spread", "scores": {scaffold: {task: score}}, "domains": {task: domain}, ...}.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge.domains.base import Split, Task
from forge.domains.registry import get_domain, warm_up
from forge.gateway.chat import HfChatCodec
from forge.gateway.local import EngineBackend
from forge.gateway.server import loop_factory
from forge.live.arena import Play, arena
from forge.live.engine_worker import make_engine
from forge.live.evaluation import HELD_OUT_SEED, held_out, key
from forge.live.recording import PoolRecording
from forge.metrics import spread
from forge.models import check_context, resolve
from forge.rollout.engine import Sampling
from forge.runs import RunFolder
from forge.scaffolds import get as get_scaffold
from forge.scenario import Scenario, parse
from forge.train import checkpoint
from forge.types import ForgeError, Json, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is scored: a folder of weights, and how it is to be read. `name` says it to people."""

    name: str
    weights: Path
    tool_prompt: str
    max_context: int
    domains: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`tasks` of them, spread evenly over the domains, each `samples` times in each of the scaffolds."""

    scaffolds: Sequence[str]
    tasks: int
    domains: Sequence[str] = ()
    split: Split = "held_out"
    temperature: float = 0.0
    samples: int = 1
    max_context: int | None = None
    slots: int = 64
    timeout_s: float = 300.0


def subject(name: str, runs: Path) -> Subject:
    """A run's last checkpoint, or a model. Raises ForgeError for what is neither."""
    try:
        folder = RunFolder.open(name, runs)
    except ForgeError as no_run:
        try:
            weights = resolve(name)
        except ForgeError as no_model:
            raise ForgeError(f"{name}: neither a run nor a model\n{no_run}\n{no_model}") from None
        domains = ("calc", "products", "chain", "shop", "gcd")
        return Subject(name=name, weights=weights, tool_prompt="template", max_context=512, domains=domains)
    newest = checkpoint.latest(folder.path / "checkpoints")
    if newest is None:
        raise ForgeError(f"{folder.path}: a run without a checkpoint: there are no trained weights; name a model")
    scenario = folder.scenario()
    return Subject(
        name=f"{folder.path.name} at step {checkpoint.read(newest).step}",
        weights=newest,
        tool_prompt=scenario.model.tool_prompt,
        max_context=scenario.engine.max_context,
        domains=tuple(scenario.mix()),
    )


def scenario_of(about: Subject, asked: Asked) -> Scenario:
    """As of a run, so that its folder is one. Raises ForgeError."""
    context = asked.max_context or about.max_context
    check_context(about.weights, context, "--max-context")
    domains = asked.domains or about.domains
    for name in domains:
        get_domain(name)
    data: Json = {
        "name": "eval",
        "stop": {"items": 1},
        "domains": [{"name": name} for name in domains],
        "agents": {"scaffolds": list(asked.scaffolds)},
        "model": {"path": str(about.weights), "tool_prompt": about.tool_prompt},
        "engine": {"slots": asked.slots, "max_context": context},
        "eval": {"tasks": asked.tasks},
    }
    return parse(data, "forge eval")


def score(about: Subject, asked: Asked, folder: RunFolder, told: Callable[[Outcome], None]) -> Json:
    """Play everything; what `scores.json` holds, which is written too. `told` hears of every episode."""
    scenario = folder.scenario()
    warm_up(one.name for one in scenario.domains)
    tasks = held_out(scenario, lambda name, index: get_domain(name).task(asked.split, HELD_OUT_SEED, index))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        outcomes = runner.run(_played(scenario, asked, tasks, folder, told))
    result = {"model": about.name, **_figures(asked, tasks, outcomes)}
    folder.write("scores.json", result)
    folder.end_life()
    return result


async def _played(
    scenario: Scenario, asked: Asked, tasks: Sequence[Task], folder: RunFolder, told: Callable[[Outcome], None]
) -> list[Outcome]:
    codec = HfChatCodec(scenario.model.path, scenario.model.tool_prompt)
    engine = make_engine(scenario, Path(scenario.model.path))
    sampling = Sampling(max_tokens=engine.max_context, temperature=asked.temperature)

    def backend(recording: PoolRecording) -> EngineBackend:
        return EngineBackend(engine, model=scenario.model.path, defaults=sampling, recording=recording)

    plays = [
        Play(name=f"{nth}.{index}.{sample}", task=task, scaffold=get_scaffold(name))
        for nth, name in enumerate(asked.scaffolds)
        for index, task in enumerate(tasks)
        for sample in range(asked.samples)
    ]
    async with arena(backend, codec, folder.path) as place:
        return await place.play(plays, at_once=asked.slots, timeout_s=asked.timeout_s, told=told)


def _figures(asked: Asked, tasks: Sequence[Task], outcomes: Sequence[Outcome]) -> Json:
    """`outcomes` by scaffold, then task, then sample. What died scores 0, and is counted with its reason."""
    each, samples = len(tasks) * asked.samples, asked.samples
    by_scaffold = {name: outcomes[i * each : (i + 1) * each] for i, name in enumerate(asked.scaffolds)}
    scores = {
        name: {
            key(task): sum(o.reward or 0.0 for o in of[i * samples : (i + 1) * samples]) / samples
            for i, task in enumerate(tasks)
        }
        for name, of in by_scaffold.items()
    }
    means, gains, between = spread.means(scores), spread.gains(scores), spread.spread(scores)
    rows = [
        {
            "scaffold": name,
            **means[name].to_dict(),
            "gain": gains[name].to_dict() if name in gains else None,
            "died": dict(Counter(o.reason.value for o in of if o.reason)),
            "faults": dict(sum((Counter(o.faults) for o in of), Counter())),
            "turns": sum(o.turns for o in of) / each,
        }
        for name, of in by_scaffold.items()
    ]
    return {
        "split": asked.split,
        "temperature": asked.temperature,
        "samples": samples,
        "tasks": len(tasks),
        "scaffolds": rows,
        "spread": between.to_dict() if between else None,
        "estimators": spread.ESTIMATORS,
        "domains": {key(task): task.domain for task in tasks},
        "scores": scores,
    }
