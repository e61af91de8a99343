"""A trajectory as a page shows it: its turns in the order of the tree, their parts in time, tokens as coloured text."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dashboards.frames import Frame, thinned
from forge.report.conversation import Decode, Turn, token_rows, tree
from forge.types import Completion, Json, Trajectory

WAITS, PREFILL, DECODE = "agent and tools", "to first token", "decoding"
PARTS = [WAITS, PREFILL, DECODE]
BARS = 400  # of the time line
TOKENS = 3000  # of one turn as coloured text
FORKED = "with forks"
OUTCOMES = ["all", "rewarded", "not rewarded", "died", FORKED]

Colour = tuple[int, int, int]
SURE: Colour = (255, 255, 255)
UNLIKELY: Colour = (213, 94, 0)
VERSIONS: list[Colour] = [(222, 235, 247), (254, 230, 206), (229, 245, 224), (239, 237, 245)]


@dataclass(frozen=True, slots=True)
class Shown:
    """A turn of a tree, and the one it goes on from. `depth`: forks passed on the way to it."""

    turn: Turn
    depth: int
    before: Turn | None


def in_order(trajectory: Trajectory) -> list[Shown]:
    """Depth first: a conversation stands together, and the branches of a fork one level deeper."""
    return [shown for root in tree(trajectory) for shown in _below(root)]


def _below(root: Turn) -> Iterator[Shown]:
    waiting = [Shown(root, 0, None)]
    while waiting:
        shown = waiting.pop()
        yield shown
        deeper = shown.depth + (len(shown.turn.children) > 1)
        waiting += [Shown(child, deeper, shown.turn) for child in reversed(shown.turn.children)]


def matches(row: Json, outcome: str, domain: str | None) -> bool:
    """Whether a row of `forge.report.trajectories.rows` is one of those asked for."""
    reward = row["reward"]
    of_outcome = {
        "all": True,
        "rewarded": reward is not None and reward > 0,
        "not rewarded": reward is not None and reward <= 0,
        "died": row["death"] is not None,
        FORKED: bool(row["forks"]),
    }
    return of_outcome[outcome] and domain in (None, row["domain"])


def label(row: Json) -> str:
    ended = row["death"] if row["reward"] is None else f"reward {row['reward']:g}"
    turns = "1 turn" if row["turns"] == 1 else f"{row['turns']} turns"
    return f"{row['trajectory']}   {row['domain']}, {ended}, {turns}"


def time_line(shown: Sequence[Shown]) -> Frame:
    """Bars from the first request on: columns turn, part, start, end in seconds, and what the turn was. What lies
    between a turn and the one it goes on from is the agent's, and its tools'."""
    kept, note = thinned(shown, BARS // len(PARTS), "turns")
    begin = min((one.turn.completion.received_s for one in shown), default=0.0)
    rows: list[tuple[str, str, float, float, str]] = []
    for one in kept:
        c = one.turn.completion
        name, what = f"#{c.index}", f"prompt {len(c.prompt_ids)}, sampled {len(c.sampled_ids)}, {c.finish}"
        ready = c.received_s if one.before is None else min(one.before.completion.finished_s, c.received_s)
        times = [ready, c.received_s, c.first_token_s, c.finished_s]
        rows += [
            (name, part, start - begin, end - begin, what)
            for part, start, end in zip(PARTS, times, times[1:], strict=False)
            if end > start
        ]
    columns = zip(*rows, strict=True) if rows else [()] * 5
    return Frame(dict(zip(["turn", "part", "start", "end", "what"], map(list, columns), strict=True)), note)


def title(shown: Shown) -> str:
    c, branch = shown.turn.completion, "↳ " * shown.depth
    fork = f" [{c.fork}]" if c.fork else ""
    return (
        f"{branch}#{c.index}{fork}: {len(shown.turn.new_ids)} new prompt tokens of {len(c.prompt_ids)}, "
        f"{len(c.sampled_ids)} sampled, {c.finish}"
    )


def sampled_html(c: Completion, decode: Decode, *, by_version: bool) -> str:
    """What was sampled, a span a token: coloured by its logprob, or by the weights that sampled it; both are in its
    tip."""
    rows = token_rows(c, decode)
    spans = []
    for (text, logprob, version), token in zip(rows[:TOKENS], c.sampled_ids, strict=False):
        colour = VERSIONS[version % len(VERSIONS)] if by_version else _by_logprob(logprob)
        tip = f"id {token}, logprob {logprob:.3f}, weights {version}"
        spans.append(f'<span title="{tip}" style="background:rgb{colour}">{_visible(text)}</span>')
    left = f"… and {len(rows) - TOKENS:,} more" if len(rows) > TOKENS else ""
    return block("".join(spans) + left, "#111")


def prompt_html(turn: Turn, decode: Decode) -> str:
    """What the turn adds to the prompt of the one before."""
    text = decode(turn.new_ids[-TOKENS:])
    left = f"{len(turn.new_ids) - TOKENS:,} more before … " if len(turn.new_ids) > TOKENS else ""
    return block(left + _visible(text), "#777")


def block(inner: str, colour: str) -> str:
    style = f"white-space:pre-wrap;font-family:monospace;font-size:0.8rem;color:{colour};overflow-wrap:anywhere"
    return f'<div style="{style}">{inner}</div>'


def _visible(text: str) -> str:
    """Safe in a page, whoever wrote it; a line of Markdown would end at an empty line, so there is none."""
    return html.escape(text).replace("\n", "&#10;").replace("\r", "&#13;")


def _by_logprob(logprob: float) -> Colour:
    """White where the token was certain, through to orange where it had a probability of a hundredth and less."""
    share = min(1.0, max(0.0, -logprob / math.log(100)))
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(SURE, UNLIKELY, strict=True))
    return red, green, blue
