"""One generation: from prompt ids to pieces clients may see, and to the one record training gets.

Knows no protocol. What arrives is kept as a log of steps, so that a waiter who joins late (a retry) reads the same
answer from its beginning. The engine's ids are the truth; text and tool calls are a view of them.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from forge.gateway import conversation
from forge.gateway.backend import Backend
from forge.gateway.errors import ApiError
from forge.gateway.reading import ReplyPiece, ReplyReader
from forge.gateway.recovery import Fork, Place
from forge.rollout.engine import Delta, Sampling
from forge.types import Completion, Json

_run = secrets.token_hex(6)
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Step:
    """What became visible at once, and how many sampled ids it took up to here."""

    pieces: list[ReplyPiece]
    upto: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The conversation that a prompt was made of, and where in its trajectory's tree it belongs. `fork`: why the ids of
    the turns before could not be repeated. `is_sub_agent`: the client says so."""

    messages: Sequence[Json]
    tools: Sequence[Json]
    place: Place
    fork: Fork | None
    is_sub_agent: bool


@dataclass(frozen=True, slots=True)
class Linked:
    """A completion's number in its trajectory, which one it goes on from, and why not plainly. `echoes`: how that one's
    reply came back."""

    index: int
    parent: int | None = None
    fork: str | None = None
    echoes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to generate and how to read it. `live` asks for steps on the way, not only at the end. `asked` None: the
    prompt was no conversation."""

    asked: Asked | None = None
    trajectory: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    reader: ReplyReader
    live: bool


class Generation:
    """Runs a job in its own task. `steps` is what waiters read, `settle` makes the record.

    The record is made when the first waiter is about to get the last of the answer, exactly once: a generation
    that ends while nobody waits (its client hung up) and is never asked for again leaves no record.
    """

    def __init__(
        self,
        backend: Backend,
        job: Job,
        link: Callable[[Generation], Linked],
        record: Callable[[Generation, Completion], None],
    ) -> None:
        self.job = job
        #: no other generation of this or any other process has it; ids of the reply and its calls are made of it
        self.id = f"{_run}{next(_numbers):08x}"
        self.created_s = backend.now()
        self.finish = ""
        self.sampled_ids: list[int] = []
        self.logprobs: list[float] = []
        self._versions: list[int] = []
        self._backend = backend
        self._link = link
        self._record = record
        #: once it is recorded
        self.linked: Linked | None = None
        self._first_token_s = self._finished_s = 0.0
        self._instance = 0
        self._unread = 0
        self._log: list[Step] = []
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    @property
    def failed(self) -> bool:
        return self._task.done() and not self.finish

    @property
    def malformed(self) -> int:
        """Tool calls in the reply that were none."""
        return self.job.reader.malformed

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the reply."""
        return self.job.reader.stop_string

    def call_id(self, index: int) -> str:
        """The id of the reply's call number `index`: the same in every protocol, and whenever this reply is told."""
        return f"call_{self.id}{index:02x}"

    @property
    def message(self) -> Json:
        """The reply so far as the assistant message its client echoes, in the form of forge.gateway.conversation."""
        pieces = [piece for step in self._log for piece in step.pieces]
        return conversation.spoken(pieces, map(self.call_id, itertools.count()))

    def cancel(self) -> None:
        self._task.cancel()

    def nudge(self) -> None:
        """Have every waiter see a None step: nothing new, but alive."""
        self._wake()

    async def steps(self) -> AsyncIterator[Step | None]:
        """Every step from the beginning, until the reply is complete. Raises what the generation died of."""
        at = 0
        while True:
            while at < len(self._log):
                yield self._log[at]
                at += 1
            if self._task.done():
                break
            await self._news.wait()
            if at == len(self._log) and not self._task.done():
                yield None
        if self._task.cancelled():
            raise ApiError(503, "The generation was cancelled.", code="cancelled")
        self._task.result()

    def settle(self) -> None:
        """Record the completion, the first time."""
        if self.linked is not None:
            return
        linked = self.linked = self._link(self)
        completion = Completion(
            trajectory=self.job.trajectory,
            index=linked.index,
            parent=linked.parent,
            fork=linked.fork,
            prompt_ids=self.job.prompt_ids,
            sampled_ids=tuple(self.sampled_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self._versions),
            finish=self.finish,
            temperature=self.job.sampling.temperature,
            received_s=self.created_s,
            first_token_s=self._first_token_s,
            finished_s=self._finished_s,
            instance=self._instance,
            constrained=self.job.sampling.grammar is not None,
        )
        self._record(self, completion)

    async def _run(self) -> None:
        job = self.job
        deltas = self._backend.generate(job.trajectory, job.prompt_ids, job.sampling)
        finish = None
        async with aclosing(deltas) as stream:
            async for instance, delta in stream:
                self._take(instance, delta)
                finish = delta.finish
                if job.live and job.reader.stopped:
                    finish = "stop"
                    break  # the only early end: a backend sees all others through
        if finish in (None, "cancelled"):
            raise ApiError(503, "The generation was cancelled by the server.", code="cancelled")
        self._finished_s = self._backend.now()
        self._read(len(self.sampled_ids))
        self._publish(job.reader.close())
        self.finish = str(finish)

    def _take(self, instance: int, delta: Delta) -> None:
        """Keep a delta, up to the token that completed a stop string; later ones are no part of the reply."""
        if not self.sampled_ids:
            self._first_token_s = self._backend.now()
        self._instance = instance
        # One by one where something may end the reply between two ids.
        size = 1 if self.job.reader.may_stop else max(1, len(delta.token_ids))
        for start in range(0, len(delta.token_ids), size):
            part = slice(start, start + size)
            self.sampled_ids += delta.token_ids[part]
            self.logprobs += delta.logprobs[part]
            self._versions += delta.versions[part]
            if self.job.live:
                self._read(len(self.sampled_ids))
                if self.job.reader.stopped:
                    break

    def _read(self, upto: int) -> None:
        ids: Sequence[int] = self.sampled_ids[self._unread : upto]
        self._unread = upto
        if ids:
            self._publish(self.job.reader.feed(ids))

    def _publish(self, pieces: list[ReplyPiece]) -> None:
        # The first step may show nothing yet: it tells a streaming client that its reply has begun.
        if pieces or not self._log:
            self._log.append(Step(pieces, self._unread))
            self._wake()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # seen here: with no waiter left nobody else would look
        self._wake()

    def _wake(self) -> None:
        """Every waiter holds the event it waits on; the next news gets a new one."""
        news, self._news = self._news, asyncio.Event()
        news.set()
