"""One event vocabulary, written by both worlds and read by every analysis, plot and replay.

A trace is JSON lines: one event each, `t` in seconds on the run's clock, `e` naming the kind. The first line is
`run_started` and carries the schema version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, ClassVar

from forge.types import ForgeError

SCHEMA = 2
#: schemas that `read` takes; policies' views of a trace of schema 1 had fewer fields, so it cannot be replayed
READABLE = (1, SCHEMA)


class TraceError(ForgeError):
    """A trace that cannot be read, or that contradicts itself; names the file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events. `t`: seconds since the run began (lives of a resumed run add up)."""

    e: ClassVar[str]
    t: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    e: ClassVar[str] = "run_started"
    schema: int
    world: str  # "sim" | "live"
    scenario: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted(Event):
    """An item got its position. `difficulty` is the domain's declared one, `members` its group size."""

    e: ClassVar[str] = "submitted"
    position: int
    domain: str
    difficulty: float
    members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Event):
    """A request was answered with 429: its agent asks again in `retry_s` seconds. It was never routed."""

    e: ClassVar[str] = "refused"
    position: int
    member: int
    turn: int
    retry_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed(Event):
    e: ClassVar[str] = "routed"
    request: str
    position: int
    member: int
    turn: int
    prompt_tokens: int
    instance: int
    cached_tokens: int = 0  # of the prompt, that the instance was believed to hold


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken(Event):
    e: ClassVar[str] = "first_token"
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed(Event):
    """A request left its instance. `versions`: first and last weights version that sampled a token of it."""

    e: ClassVar[str] = "completed"
    request: str
    tokens: int
    finish: str
    versions: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberDone(Event):
    """One trajectory of an item ended. `reward` null: it died, `reason` says why."""

    e: ClassVar[str] = "member_done"
    position: int
    member: int
    reward: float | None
    turns: int
    tokens: int
    tool_wait_s: float
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversed(Event):
    """How one trajectory's requests fit together: why completions did not simply go on from a reply, and how replies
    came back, by kind (forge.gateway.recovery). Of worlds that see requests."""

    e: ClassVar[str] = "conversed"
    position: int
    member: int
    forks: dict[str, int]
    echoes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Event):
    """Every member ended and enough survive. `tokens` were sampled; `reward` is the survivors' mean."""

    e: ClassVar[str] = "finished"
    position: int
    tokens: int
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead(Event):
    e: ClassVar[str] = "dead"
    position: int
    reason: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(Event):
    e: ClassVar[str] = "taken"
    position: int
    lag_items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked(Event):
    """The running head stepped aside (straggler escape): the head is the next waiting item from now on."""

    e: ClassVar[str] = "parked"
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack(Event):
    """On resume: taken but not committed, back at their positions as finished. Part of the `resumed` state."""

    e: ClassVar[str] = "rolled_back"
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStarted(Event):
    e: ClassVar[str] = "step_started"
    step: int
    positions: tuple[int, ...]
    partial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Event):
    """The checkpoint with this step is durable. Seconds are spans of wall time; null metrics: the world has none."""

    e: ClassVar[str] = "committed"
    step: int
    positions: tuple[int, ...]
    train_s: float
    data_s: float
    io_s: float
    tokens: int
    metrics: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported(Event):
    """An instance's report reached the routers: its load at `seen_s`, with the prompt tokens it had to compute and the
    (query, key) pairs of their attention, and the chains of KV blocks that changed since its last report, with the
    blocks of each it holds (forge.prefix_index)."""

    e: ClassVar[str] = "reported"
    instance: int
    running: int
    waiting: int
    free_tokens: int
    chains: tuple[tuple[int, int], ...] = ()
    seen_s: float = 0.0
    queued_tokens: int = 0
    queued_pairs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Event):
    """One instance serves a version from now on. `io_s`: seconds it spent loading."""

    e: ClassVar[str] = "loaded"
    instance: int
    version: int
    io_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(Event):
    """Every live instance serves `version`, which holds the first `items` committed items, up to `step`."""

    e: ClassVar[str] = "published"
    version: int
    step: int
    items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDown(Event):
    e: ClassVar[str] = "instance_down"
    instance: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceUp(Event):
    e: ClassVar[str] = "instance_up"
    instance: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage(Event):
    """Counters since the life began, per instance: busy seconds, steps, tokens prefilled and decoded; and of prompts
    those found in its KV instead, empty where nobody counted."""

    e: ClassVar[str] = "usage"
    busy_s: tuple[float, ...]
    steps: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    decode_tokens: tuple[int, ...]
    cached_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KvHits(Event):
    """Prompt tokens since the life began by where they were found when their request arrived: in the instance's own KV
    (`l1`), in its host memory, in the store of all, or nowhere. Of worlds that have tiers, and requests with a path."""

    e: ClassVar[str] = "kv_hits"
    l1: int
    l2: int
    l3: int
    missed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCall(Event):
    """One call of a policy method, in order. `view` is the crc32 of the view's canonical text."""

    e: ClassVar[str] = "policy"
    slot: str
    method: str
    args: dict[str, Any]
    draw: float
    view: int
    decision: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Event):
    """Held-out reward of the weights of `step`: mean over tasks, greedy or sampled."""

    e: ClassVar[str] = "evaluated"
    step: int
    label: str
    mean: float
    tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """A new life begins from the durable pool: policies are fresh, requests in flight are gone."""

    e: ClassVar[str] = "resumed"
    life: int
    queue: dict[str, Any]
    items: dict[str, tuple[str, float, float | None]]
    step: int
    version: int
    published_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    e: ClassVar[str] = "run_ended"
    reason: str  # "done" | "stopped"


KINDS: dict[str, type[Event]] = {cls.e: cls for cls in Event.__subclasses__()}


def encode(event: Event) -> str:
    """One JSON line, keys in declaration order, floats that read back exactly."""
    row: dict[str, Any] = {"t": event.t, "e": event.e}
    for f in fields(event):
        if f.name != "t":
            row[f.name] = getattr(event, f.name)
    return json.dumps(row, separators=(",", ":"), allow_nan=False)


def decode(line: str) -> Event:
    """Inverse of `encode`. Raises TraceError."""
    try:
        row = json.loads(line)
        cls = KINDS[row.pop("e")]
        event: Event = cls(**{k: _tuples(v) for k, v in row.items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"not a trace event: {line[:80]!r} ({error})") from None
    return event


def _tuples(value: Any) -> Any:
    """JSON has lists where events have tuples."""
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


class TraceWriter:
    """Appends events to a file; each reaches the operating system at once, so a killed process loses none."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)

    def __call__(self, event: Event) -> None:
        self._file.write(encode(event) + "\n")

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[Event]:
    """Events of a trace file. A torn last line (the process was killed while writing) is dropped.

    Raises TraceError for a missing file, one without an event, another schema version, or a line that is no event, with
    its number.
    """
    if not path.is_file():
        raise TraceError(f"{path}: no trace here; give a run folder that holds trace.jsonl")
    if not has_events(path):
        raise TraceError(f"{path}: the trace is empty: its run was killed before the first event; give another run")
    yield from Tail(path).new()


class Tail:
    """A trace file that may still be written: `new` gives the events that came since it was last asked, whole lines
    only. Raises TraceError as `read` does for lines; nothing has come where there is no file yet. Without `calls` lines
    of policy calls are passed over unread: a quarter of a trace."""

    def __init__(self, path: Path, *, calls: bool = True) -> None:
        self.path = path
        self._calls = calls
        self.number = 0  # of the last line given
        self._offset = 0

    def new(self) -> Iterator[Event]:
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.number += 1
                self._offset += len(line)
                if not self._calls and b',"e":"policy",' in line[:40]:
                    continue
                yield self._event(line.decode("utf-8", "replace"))

    def _event(self, line: str) -> Event:
        try:
            event = decode(line)
        except TraceError as error:
            raise TraceError(f"{self.path}:{self.number}: {error}") from None
        if self.number == 1 and not (isinstance(event, RunStarted) and event.schema in READABLE):
            found = f"schema {event.schema}" if isinstance(event, RunStarted) else f"{event.e!r} first"
            raise TraceError(f"{self.path}:1: a trace of schema {SCHEMA} begins with run_started; here is {found}")
        return event


def has_events(path: Path) -> bool:
    """Whether there is such a file, with a whole line in it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline().endswith(b"\n")


def cut_torn_tail(path: Path) -> None:
    """Before appending to the trace of a killed run: drop a half-written last line."""
    data = path.read_bytes()
    keep = data.rfind(b"\n") + 1
    if keep != len(data):
        with path.open("r+b") as file:
            file.truncate(keep)
