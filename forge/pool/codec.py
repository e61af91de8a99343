"""A trajectory as compact bytes: every id, logprob, version and time reads back exactly.

Layout: the length of the compressed part (4 bytes); compressed, a line of JSON and all token ids (uint16 where they
fit, else int32); then, as they do not compress, the logprobs (float32 where that is exact, as it is for what a float32
engine reports, else float64). Versions are runs of equal ones in the JSON. A prompt is stored as what follows the
prefix it shares with the completion before it, so a conversation of T turns takes the room of its last turn, however
long its context is.
"""

from __future__ import annotations

import json
import zlib
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from forge.types import Completion, DeathReason, Json, Outcome, Trajectory

_LEVEL = 1  # higher levels cost time and save under 1%: what repeats is taken out before
_SCALARS = (
    *("trajectory", "index", "finish", "temperature", "received_s", "first_token_s", "finished_s", "instance"),
    *("parent", "fork", "constrained"),  # not in pools written before there were any
)
_OUTCOME = (
    *("trajectory", "reward", "reason", "turns", "tool_calls", "tool_errors", "tool_wait_s", "detail"),
    *("reward_parts", "scaffold", "faults", "contexts"),  # not in pools written before there were any
)
_scalars_of = attrgetter(*_SCALARS)
_outcome_of = attrgetter(*_OUTCOME)
_to_json = json.JSONEncoder(separators=(",", ":")).encode


def encode(trajectory: Trajectory) -> bytes:
    """Token ids must fit int32; numpy's OverflowError says when they do not."""
    ids: list[int] = []
    logprobs: list[float] = []
    rows: list[list[Any]] = []
    context: tuple[int, ...] = ()
    for c in trajectory.completions:
        shared = shared_prefix(context, c.prompt_ids)
        runs = [[version, len(list(run))] for version, run in groupby(c.versions)]
        rows.append([shared, len(c.prompt_ids) - shared, len(c.sampled_ids), runs, *_scalars_of(c)])
        ids += c.prompt_ids[shared:] + c.sampled_ids
        logprobs += c.logprobs
        context = c.prompt_ids + c.sampled_ids
    floats = _smallest_exact(logprobs)
    numbers = np.array(ids, "<u2" if not ids or (min(ids) >= 0 and max(ids) < 1 << 16) else "<i4")
    head = {
        "id": trajectory.id,
        "position": trajectory.position,
        "member": trajectory.member,
        "outcome": _outcome_of(trajectory.outcome),
        "completions": rows,
        "types": [numbers.dtype.str, floats.dtype.str],
    }
    text = _to_json(head).encode()
    packed = zlib.compress(text + b"\n" + numbers.tobytes(), _LEVEL)
    return len(packed).to_bytes(4, "little") + packed + floats.tobytes()


def decode(data: bytes) -> Trajectory:
    """Inverse of `encode`."""
    end = 4 + int.from_bytes(data[:4], "little")
    text, _, numbers = zlib.decompress(data[4:end]).partition(b"\n")
    head: Json = json.loads(text)
    ids: list[int] = np.frombuffer(numbers, head["types"][0]).tolist()
    logprobs: list[float] = np.frombuffer(data[end:], head["types"][1]).tolist()
    completions: list[Completion] = []
    at_id = at_logprob = 0
    context: list[int] = []
    for shared, tail, length, runs, *scalars in head["completions"]:
        prompt = context[:shared] + ids[at_id : at_id + tail]
        new = ids[at_id + tail : at_id + tail + length]
        completions.append(
            Completion(
                prompt_ids=tuple(prompt),
                sampled_ids=tuple(new),
                logprobs=tuple(logprobs[at_logprob : at_logprob + length]),
                versions=tuple(version for version, count in runs for _ in range(count)),
                **dict(zip(_SCALARS, scalars, strict=False)),
            )
        )
        at_id, at_logprob, context = at_id + tail + length, at_logprob + length, prompt + new
    return Trajectory(
        id=head["id"],
        position=head["position"],
        member=head["member"],
        completions=tuple(completions),
        outcome=_outcome(head["outcome"]),
    )


def shared_prefix(context: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    """Length of the common prefix; the usual case, a prompt that goes on from the context, is one comparison."""
    if prompt[: len(context)] == context:
        return len(context)
    n = min(len(context), len(prompt))
    differs = np.flatnonzero(np.array(context[:n]) != np.array(prompt[:n]))
    return int(differs[0]) if differs.size else n


def _smallest_exact(values: list[float]) -> np.ndarray[Any, np.dtype[Any]]:
    wide = np.array(values, "<f8")
    with np.errstate(over="ignore", under="ignore"):
        narrow = wide.astype("<f4")
    return narrow if narrow.astype("<f8").tobytes() == wide.tobytes() else wide


def _outcome(values: list[Any]) -> Outcome:
    fields = dict(zip(_OUTCOME, values, strict=False))
    reason = fields.pop("reason")
    return Outcome(reason=None if reason is None else DeathReason(reason), **fields)
