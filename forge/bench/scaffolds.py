"""`forge bench scaffolds`: random (scaffold, environment, seed) combinations, each played to its end through gateway
and pool with the deterministic engine, on which an expert answers in the format asked for."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from forge.agents.expert_policy import MAX_CONTEXT, ExpertBackend, ExpertPolicy
from forge.domains.registry import PURE, warm_up
from forge.formats import formats
from forge.gateway.fake_chat import FakeChatCodec
from forge.gateway.server import loop_factory
from forge.live.arena import Play, arena
from forge.live.recording import POOL, PoolRecording
from forge.pool.reader import PoolReader
from forge.rollout.engine import Sampling
from forge.scaffolds import Scaffold, combination, zoo
from forge.types import Json, Outcome, Trajectory

#: seeds of a combination
SEEDS = 10_000
#: of an episode
TIMEOUT_S = 120.0
AT_ONCE = 48
#: bytes of a reply
MOST = 4096


def run(count: int, seed: int, told: Callable[[int], None]) -> Json:
    """`told` hears how many episodes have ended."""
    environments = sorted(PURE)
    warm_up(environments)
    total = len(zoo()) * len(environments) * SEEDS
    drawn = Random(seed).sample(range(total), count)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = play([combination(index, environments) for index in drawn], Path(folder), told)
        kept = _kept(Path(folder))
    lost = [o.trajectory for o in outcomes if o.turns and o.trajectory not in kept]
    unexplained = [o for o in outcomes if o.reward is None and not (o.reason and o.detail)]
    figures = {
        "scaffolds": len(zoo()),
        "tool_formats": len(formats()),
        "combinations": total,
        "ended": len(outcomes) - len(lost),
        "unexplained_deaths": len(unexplained) + len(lost),
        "deaths": sum(o.reward is None for o in outcomes),
        "mean_reward": sum(o.reward or 0.0 for o in outcomes) / count,
        "completions": sum(len(one.completions) for one in kept.values()),
        "wall_s": time.monotonic() - began,
    }
    return {
        "protocol": f"{count} of {total} combinations, seed {seed}, {AT_ONCE} at once; expert on deterministic engine",
        "rows": _rows(outcomes),
        "deaths": dict(Counter(f"{o.reason}: {o.detail}" for o in outcomes if o.reward is None)),
        "faults": dict(sum((Counter(o.faults) for o in outcomes), Counter())),
        "forks": dict(Counter(c.fork for one in kept.values() for c in one.completions if c.fork)),
        "figures": figures,
        "reasons": {},
    }


def play(
    combinations: Sequence[tuple[Scaffold, str, int]], folder: Path, told: Callable[[int], None] = lambda _: None
) -> list[Outcome]:
    """Each to its end; the pool is left in `folder`."""
    plays, policies = [], {}
    for nth, (scaffold, environment, seed) in enumerate(combinations):
        task = PURE[environment]().task("train", seed, 0)
        plays.append(Play(name=f"{nth}", task=task, scaffold=scaffold, max_tokens=MOST))
        policies[f"{nth}"] = ExpertPolicy(scaffold, task)
    ended = 0

    def one_ended(_: Outcome) -> None:
        nonlocal ended
        ended += 1
        told(ended)

    def backend(recording: PoolRecording) -> ExpertBackend:
        return ExpertBackend(policies, defaults=Sampling(max_tokens=MAX_CONTEXT), recording=recording)

    async def played() -> list[Outcome]:
        async with arena(backend, FakeChatCodec(), folder) as place:
            return await place.play(plays, at_once=AT_ONCE, timeout_s=TIMEOUT_S, told=one_ended)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(played())


def _kept(folder: Path) -> dict[str, Trajectory]:
    """What the pool holds, by name."""
    with PoolReader(folder / POOL) as pool:
        items = sum(pool.counts().values())
        return {one.id: one for position in range(items) for one in pool.trajectories(position)}


def _rows(outcomes: Sequence[Outcome]) -> list[Json]:
    """By loop, dialect, context and style: how many ran, died, were solved."""
    by_part: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        for part, name in zip(("loop", "dialect", "context", "style"), outcome.scaffold.split("/"), strict=True):
            by_part[part, name].append(outcome)
    return [
        {
            "part": part,
            "name": name,
            "episodes": len(of),
            "mean_reward": sum(o.reward or 0.0 for o in of) / len(of),
            "deaths": sum(o.reward is None for o in of),
            "turns": sum(o.turns for o in of) / len(of),
        }
        for (part, name), of in sorted(by_part.items(), key=lambda one: (_PARTS.index(one[0][0]), one[0][1]))
    ]


_PARTS = ("loop", "dialect", "context", "style")
