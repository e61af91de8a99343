"""One completion to sample, as an instance keeps it."""

from __future__ import annotations

from typing import Any

from sim.kv import Entry
from sim.sessions import Path


class Request:
    """What is asked, then what became of it. `output` is the hidden truth, read by the instance alone.

    `prompt`, `output` in tokens; `path` and `keep` as in `sim.sessions.Step`. `ready`: its KV arrives with it, and its
    first token is sampled (a decode instance's). `hold`: it keeps its KV when it ends, until `Instance.let_go`
    (a prefill instance's). `owner` is for whoever sent it.
    `sampled`: tokens so far. `hit`: tokens found when it was first admitted, None before. `versions`: first and last
    weights version that sampled a token.
    """

    __slots__ = (
        "cancelled",
        "finish",
        "held",
        "hit",
        "hold",
        "id",
        "keep",
        "kv",
        "order",
        "output",
        "owner",
        "path",
        "phase",
        "preemptions",
        "private",
        "prompt",
        "ready",
        "renewed",
        "sampled",
        "share",
        "target",
        "versions",
    )

    def __init__(
        self,
        id: Any,
        prompt: int,
        output: int,
        path: Path = (),
        *,
        keep: bool = False,
        ready: bool = False,
        hold: bool = False,
        owner: Any = None,
    ) -> None:
        self.id = id
        self.prompt = prompt
        self.output = output
        self.path = path
        self.keep = keep
        self.ready = ready
        self.hold = hold
        self.owner = owner
        self.sampled = 1 if ready else 0
        self.hit: int | None = None
        self.preemptions = 0
        self.versions = (0, 0)
        self.cancelled = False
        self.order = -1  # of admission; -1: it does not run

    # What follows belongs to the instance while the request runs.
    kv: int  # tokens held, while its prompt is computed; all it held, when it has ended
    target: int  # tokens its prefill ends with
    finish: int  # where the instance's count of sampled units stands when it ends
    phase: int  # units held when that count is 0
    share: int  # blocks of its path
    private: int  # private ones of a prefill, or of one that holds its KV
    held: tuple[Entry, ...]
    renewed: bool  # other weights were loaded while it ran: it stores nothing any more
