"""A trace as Chrome trace events, which ui.perfetto.dev opens: what ran where and when, on one time axis.

One process for the queue, with a lane an item in the order of submission; one for the trainer; one an instance, with
its requests as async slices, since they overlap. Timestamps and durations are microseconds. Streamed: kept in memory
is what is under way.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from forge import trace as ev
from forge.temporary import temporary_for
from forge.types import Json

QUEUE, TRAINER, INSTANCES = 1, 2, 10  # process ids; instance i is INSTANCES + i
MAIN = 0  # the thread that counters, instants and trainer spans are on; item lanes count from 1


def us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


@dataclass(slots=True)
class _Item:
    lane: int
    state: str  # its inner slice: running, finished, taken
    name: str


@dataclass(slots=True)
class Timeline:
    """`apply` every event in order and take what it gives; `close` ends what never ended."""

    _now: float = 0.0
    _out: list[Json] = field(default_factory=list)
    _requests: dict[str, tuple[int, str]] = field(default_factory=dict)  # -> instance, phase
    _in_flight: dict[int, int] = field(default_factory=dict)
    _items: dict[int, _Item] = field(default_factory=dict)  # running, finished or taken
    _passed: set[int] = field(default_factory=set)  # taken or dead, above the head
    _head: int = 0
    _counts: dict[str, int] = field(default_factory=lambda: {"running": 0, "finished": 0})
    _free: list[int] = field(default_factory=list)
    _lanes: int = 0
    _step: float | None = None  # since when a batch is in training
    _busy: dict[int, tuple[float, float]] = field(default_factory=dict)  # -> seconds, busy_s then
    _known: set[tuple[int, int]] = field(default_factory=set)  # (process, thread) that have their names

    def apply(self, event: ev.Event) -> list[Json]:
        self._now = max(self._now, event.t)
        match event:
            case ev.Routed() | ev.FirstToken() | ev.Completed():
                self._request(event)
            case ev.Submitted() | ev.Finished() | ev.Taken() | ev.Parked() | ev.Dead():
                self._item(event)
            case ev.StepStarted() | ev.Committed() | ev.Published():
                self._train(event)
            case ev.Loaded() | ev.InstanceDown() | ev.InstanceUp() | ev.Usage():
                self._instance(event)
            case ev.Resumed():
                self._resume(event)
        return self._drain()

    def close(self) -> list[Json]:
        self._end_all()
        return self._drain()

    def _end_all(self) -> None:
        for request in list(self._requests):
            self._end_request(request, {"finish": "unknown"})
        for position in list(self._items):
            self._end_item(position)
        if self._step is not None:
            self._emit("E", TRAINER)
            self._step = None

    def _drain(self) -> list[Json]:
        out, self._out = self._out, []
        return out

    # --- writing ------

    def _emit(self, ph: str, pid: int, tid: int = MAIN, **more: object) -> None:
        self._name(pid, tid)
        self._out.append({"ph": ph, "pid": pid, "tid": tid, "ts": us(self._now), **more})

    def _name(self, pid: int, tid: int) -> None:
        if (pid, tid) in self._known:
            return
        process = {QUEUE: "queue", TRAINER: "trainer"}.get(pid, f"instance {pid - INSTANCES}")
        thread = process if tid == MAIN else f"items, lane {tid}"
        named: list[tuple[str, Json]] = [("thread_name", {"name": thread})]
        if not any(p == pid for p, _ in self._known):
            named += [("process_name", {"name": process}), ("process_sort_index", {"sort_index": pid})]
        for name, args in named:
            self._out.append({"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args})
        self._known.add((pid, tid))

    def _span(self, pid: int, name: str, start: float, end: float, **args: object) -> None:
        """A slice known only at its end."""
        self._name(pid, MAIN)
        at = us(start)
        span = {"ph": "X", "pid": pid, "tid": MAIN, "ts": at, "dur": round(us(end) - at, 3), "name": name}
        self._out.append(span | {"args": args})

    def _count(self) -> None:
        self._emit("C", QUEUE, name="items", args=dict(self._counts))

    # --- requests ------

    def _request(self, event: ev.Routed | ev.FirstToken | ev.Completed) -> None:
        name = event.request
        match event:
            case ev.Routed():
                if name in self._requests:
                    self._end_request(name, {"finish": "unknown"})
                self._requests[name] = (event.instance, "prefill")
                args = {"request": name, "position": event.position, "member": event.member, "turn": event.turn}
                args |= {"prompt_tokens": event.prompt_tokens}
                self._async("b", event.instance, name, "request", args)
                self._async("b", event.instance, name, "prefill", {})
                self._flight(event.instance, 1)
            case ev.FirstToken():
                instance, phase = self._requests.get(name, (0, ""))
                if phase == "prefill":
                    self._async("e", instance, name, phase, {})
                    self._async("b", instance, name, "decode", {})
                    self._requests[name] = (instance, "decode")
            case ev.Completed():
                self._end_request(name, {"finish": event.finish, "tokens": event.tokens, "versions": event.versions})

    def _end_request(self, name: str, args: Json) -> None:
        if (known := self._requests.pop(name, None)) is not None:
            instance, phase = known
            self._async("e", instance, name, phase, {})
            self._async("e", instance, name, "request", args)
            self._flight(instance, -1)

    def _async(self, ph: str, instance: int, request: str, name: str, args: Json) -> None:
        self._emit(ph, INSTANCES + instance, cat="request", id=request, name=name, args=args)

    def _flight(self, instance: int, by: int) -> None:
        self._in_flight[instance] = self._in_flight.get(instance, 0) + by
        args = {"requests": self._in_flight[instance]}
        self._emit("C", INSTANCES + instance, name="requests in flight", args=args)

    # --- items ------

    def _item(self, event: ev.Submitted | ev.Finished | ev.Taken | ev.Parked | ev.Dead) -> None:
        position = event.position
        match event:
            case ev.Submitted():
                args = {"difficulty": event.difficulty, "members": event.members}
                self._begin_item(position, f"item {position} ({event.domain})", "running", args)
            case ev.Finished():
                self._move(position, "finished")
            case ev.Taken():
                self._move(position, "taken")
                if (item := self._items.get(position)) is not None:
                    self._flow("s", QUEUE, item.lane, position)
                self._emit("C", QUEUE, name="lag of the item taken", args={"items": event.lag_items})
                self._pass(position)
            case ev.Parked():
                self._pass(position)
            case ev.Dead():
                if (item := self._items.get(position)) is not None:
                    self._emit("i", QUEUE, item.lane, s="t", name="dead", args={"reason": event.reason})
                self._end_item(position)
                self._pass(position)
        self._count()

    def _begin_item(self, position: int, name: str, state: str, args: Json) -> None:
        if self._free:
            lane = heapq.heappop(self._free)
        else:
            self._lanes += 1
            lane = self._lanes
        self._items[position] = _Item(lane, state, name)
        self._emit("B", QUEUE, lane, name=name, args=args)
        self._emit("B", QUEUE, lane, name=state)
        if state in self._counts:
            self._counts[state] += 1

    def _move(self, position: int, state: str) -> None:
        if (item := self._items.get(position)) is None:
            return
        if item.state in self._counts:
            self._counts[item.state] -= 1
        if state in self._counts:
            self._counts[state] += 1
        item.state = state
        self._emit("E", QUEUE, item.lane)
        self._emit("B", QUEUE, item.lane, name=state)

    def _end_item(self, position: int) -> None:
        if (item := self._items.pop(position, None)) is not None:
            if item.state in self._counts:
                self._counts[item.state] -= 1
            self._emit("E", QUEUE, item.lane)
            self._emit("E", QUEUE, item.lane)
            heapq.heappush(self._free, item.lane)

    def _pass(self, position: int) -> None:
        """It no longer holds the head back."""
        if position >= self._head:  # a parked one has let it pass before
            self._passed.add(position)
        while self._head in self._passed:
            self._passed.remove(self._head)
            self._head += 1
        self._emit("C", QUEUE, name="head", args={"position": self._head})

    def _flow(self, ph: str, pid: int, tid: int, position: int) -> None:
        more = {"bp": "e"} if ph == "f" else {}
        self._emit(ph, pid, tid, cat="item", name="trained on", id=position, **more)

    # --- training and instances ------

    def _train(self, event: ev.StepStarted | ev.Committed | ev.Published) -> None:
        match event:
            case ev.StepStarted():
                self._step = event.t
                self._emit("B", TRAINER, name=f"step {event.step}", args={"items": list(event.positions)})
                for position in event.positions:
                    self._flow("f", TRAINER, MAIN, position)
            case ev.Committed():
                if self._step is not None:
                    self._parts(event, self._step)
                    self._emit("E", TRAINER, args={"tokens": event.tokens})
                self._step = None
                for position in event.positions:
                    self._end_item(position)
            case ev.Published():
                args = {"step": event.step, "items": event.items}
                self._emit("i", TRAINER, s="g", name=f"published {event.version}", args=args)

    def _parts(self, event: ev.Committed, started: float) -> None:
        """Data, train and save follow one another and end with the commit; none reaches outside the step."""
        at = event.t - event.data_s - event.train_s - event.io_s
        for name, seconds in (("data", event.data_s), ("train", event.train_s), ("save", event.io_s)):
            end = at + seconds
            if min(end, event.t) > max(at, started):
                self._span(TRAINER, name, max(at, started), min(end, event.t))
            at = end

    def _instance(self, event: ev.Loaded | ev.InstanceDown | ev.InstanceUp | ev.Usage) -> None:
        match event:
            case ev.Loaded():
                self._span(INSTANCES + event.instance, f"load {event.version}", max(0.0, event.t - event.io_s), event.t)
            case ev.InstanceDown():
                self._emit("i", INSTANCES + event.instance, s="p", name="down", args={"reason": event.reason})
            case ev.InstanceUp():
                self._emit("i", INSTANCES + event.instance, s="p", name="up", args={"version": event.version})
            case ev.Usage():
                self._usage(event)

    def _usage(self, event: ev.Usage) -> None:
        for i, busy in enumerate(event.busy_s):
            since, before = self._busy.get(i, (0.0, 0.0))
            if self._lanes and event.t > since:  # before the first item an engine does no work of the run
                share = max(0.0, busy - before) / (event.t - since)
                self._emit("C", INSTANCES + i, name="busy since the last report", args={"share": share})
            self._busy[i] = (event.t, busy)

    def _resume(self, event: ev.Resumed) -> None:
        """What was under way ended with its process; open items begin again in the state the pool has them in."""
        names = {position: item.name for position, item in self._items.items()}
        self._end_all()
        self._busy = dict.fromkeys(self._busy, (self._now, 0.0))
        self._emit("i", QUEUE, s="g", name=f"resumed, life {event.life}")
        states: list[str] = event.queue["states"]
        for position, state in enumerate(states):
            if state in ("running", "finished", "taken"):
                domain = event.items.get(str(position), ("?",))[0]
                self._begin_item(position, names.get(position, f"item {position} ({domain})"), state, {})
        waiting = [p for p, state in enumerate(states) if state in ("running", "finished")]
        parked = event.queue.get("parked", ())
        waiting = [p for p in waiting if p not in parked]
        self._head = min(waiting, default=len(states))
        self._passed = {p for p in range(self._head, len(states)) if p not in set(waiting)}
        self._count()


def trace_events(events: Iterable[ev.Event]) -> Iterator[Json]:
    """The Chrome trace events of a whole trace."""
    timeline = Timeline()
    for event in events:
        yield from timeline.apply(event)
    yield from timeline.close()


def write_perfetto(events: Iterable[ev.Event], path: Path) -> Path:
    """Stream them to a JSON file, which takes its name when it is whole."""
    temporary = temporary_for(path)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[')
            for i, row in enumerate(trace_events(events)):
                file.write((",\n" if i else "\n") + json.dumps(row, separators=(",", ":"), allow_nan=False))
            file.write("\n]}\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
