"""`forge bench blackbox`: every agent program of others that is installed, headless, on one task with a verifier.

The gateway is the real one and so is the sandbox; the policy is scripted: a call that does the task, then a word. Each
program does it in peace, under 429 with Retry-After, 500, an answer cut in the middle and one that does not come, then
with its compaction triggered, and with a sub-agent where it has any. What the gateway recovered is compared with what
blackbox.toml expects.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from forge.agents.loop import ToolClock
from forge.bench.blackbox_cases import VARIANTS, Case, Change, Script, Variant, changed, load_cases
from forge.bench.blackbox_faults import Cutter
from forge.bench.blackbox_policy import ScriptedPolicy
from forge.blackbox.catalog import PROGRAMS
from forge.blackbox.install import is_installed
from forge.blackbox.launcher import Gateway, Launch, Played
from forge.blackbox.recipe import load, program_folder
from forge.domains.registry import get_domain
from forge.gateway.app import create_app
from forge.gateway.fake_chat import FakeChatCodec
from forge.gateway.recovery import Node
from forge.gateway.server import serve
from forge.sections import ToolWait
from forge.types import Json

#: a task of the domain coding whose solution is a short function
_SEED, _INDEX = 0, 1
TRAJECTORY = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program in one variant. `shape`: the tree that the gateway recovered; `expected`: those it may be."""

    program: str
    version: str
    variant: str
    finished: bool
    outcome: str
    prompts: Sequence[int]  # tokens, which are bytes here, of those that were answered
    requests: int
    statuses: Mapping[str, int]
    protocol: str
    streamed: bool
    shape: str
    expected: Sequence[str]
    gives_up: str  # why it is expected not to finish; "": it is to
    echoes: Mapping[str, int]
    seconds: float
    output: str

    @property
    def as_expected(self) -> bool:
        return self.finished == (not self.gives_up) and self.shape in self.expected


def run(names: Sequence[str], variants: Sequence[Variant], progress: Callable[[str], None]) -> Json:
    """Raises ForgeError where a name is not known. Programs that are not installed are left out, with the reason."""
    return asyncio.run(_run(names, variants or VARIANTS, progress))


async def _run(names: Sequence[str], variants: Sequence[Variant], progress: Callable[[str], None]) -> Json:
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for name, case in load_cases(names).items():
        program = load(case.recipe).program
        assert program is not None
        if not is_installed(program_folder(program), PROGRAMS[program]):
            left_out[name] = f"not installed; forge blackbox install {program}"
            continue
        for variant in variants:
            if why := _why_not(case, variant):
                left_out[f"{name}, {variant}"] = why
                continue
            progress(f"{name}: {variant}")
            rows.append(await play(name, case, variant))
    protocol = "one coding task a run; the policy is scripted, gateway, programs and sandbox are real"
    listed = [asdict(row) | {"as_expected": row.as_expected} for row in rows]
    return {"protocol": protocol, "rows": listed, "left_out": left_out, "figures": counted(listed), "reasons": {}}


def counted(rows: Sequence[Json]) -> Json:
    """The figures."""
    return {
        "runs": len(rows),
        "finished": sum(row["finished"] for row in rows),
        "gave_up_as_they_do": sum(bool(row["gives_up"]) and not row["finished"] for row in rows),
        "as_expected": sum(row["as_expected"] for row in rows),
    }


def _why_not(case: Case, variant: Variant) -> str:
    if variant in case.left_out:
        return case.left_out[variant]
    if variant in ("compaction", "sub_agent") and variant not in case.variants:
        return "no case"
    return ""


async def play(name: str, case: Case, variant: Variant) -> Row:
    """One run."""
    domain = get_domain("coding")
    task = domain.task("train", _SEED, _INDEX)
    change = case.variants.get(variant, Change())
    policy = ScriptedPolicy(Script(case, change, task), max_context=change.max_context)
    if variant in ("429", "500", "stall"):
        policy.faults.append(variant)
    log: list[Json] = []
    app = create_app(policy, FakeChatCodec(), log=log.append)
    server = await serve(app)
    cutter = Cutter((urlsplit(server.url).hostname or "", server.port), cuts=int(variant == "cut"))
    recipe = load(case.recipe)
    assert recipe.program is not None
    began = time.monotonic()
    try:
        gateway = Gateway(url=await cutter.start(), model=policy.model)
        program = changed(recipe, case.always, change)
        played = await Launch(program, gateway, TRAJECTORY, domain, task, ToolClock(ToolWait(), "")).play()
        tree = app.state.gateway.tree(TRAJECTORY)
    finally:
        cutter.stop()
        await server.stop()
    version, seconds = PROGRAMS[recipe.program].version, time.monotonic() - began
    return _row(name, version, case, variant, played, log, shape(tree.nodes), dict(tree.echoes), seconds)


def _row(
    name: str,
    version: str,
    case: Case,
    variant: Variant,
    played: Played,
    log: Sequence[Json],
    found: str,
    echoes: Mapping[str, int],
    seconds: float,
) -> Row:
    outcome = played.outcome
    return Row(
        program=name,
        version=version,
        variant=variant,
        finished=outcome.reward == 1.0,
        outcome=f"{outcome.reason}: {outcome.detail}" if outcome.reward is None else f"reward {outcome.reward:g}",
        prompts=[row["prompt_tokens"] for row in log if row["prompt_tokens"]],
        requests=len(log),
        statuses={str(status): count for status, count in sorted(Counter(row["status"] for row in log).items())},
        protocol=", ".join(sorted({row["protocol"] for row in log})),
        streamed=any(row["stream"] for row in log),
        shape=found,
        expected=case.expected(variant),
        gives_up=case.gives_up.get(variant, ""),
        echoes=echoes,
        seconds=round(seconds, 1),
        output=played.result.output[-2000:] if played.result else "",
    )


def shape(nodes: Mapping[int, Node]) -> str:
    """A trajectory's tree in a line: every conversation by why it begins and how many completions follow plainly, those
    that fork off it in parentheses. "root 2 (resample 1), sub_agent 1"."""
    return ", ".join(_told(nodes, number) for number, node in nodes.items() if node.parent is None)


def _told(nodes: Mapping[int, Node], first: int) -> str:
    forks: list[int] = []
    length = len(list(_chain(nodes, first, forks)))
    inside = ", ".join(_told(nodes, fork) for fork in forks)
    return f"{nodes[first].fork} {length}" + (f" ({inside})" if inside else "")


def _chain(nodes: Mapping[int, Node], first: int, forks: list[int]) -> Iterator[int]:
    at: int | None = first
    while at is not None:
        yield at
        plain = [one for one in nodes[at].children if nodes[one].fork is None]
        forks += [one for one in nodes[at].children if nodes[one].fork is not None]
        at = plain[0] if plain else None
