"""A backend that stands alone: one engine in a thread of this process. For `forge serve` and for tests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from forge.gateway.backend import Overloaded
from forge.gateway.budget import Budget
from forge.gateway.report import Report
from forge.gateway.sessions import Recording, Sessions
from forge.policies.dispatch import Dispatch, Mixed
from forge.rollout.engine import Delta, Engine, EngineRequest, Sampling
from forge.types import Completion
from forge.views import AdmissionView

logger = logging.getLogger(__name__)

Inbox = asyncio.Queue[Delta | Exception]


class EngineBackend:
    """Any trajectory may generate that `sessions` lets; they keep its records while it is under way. `dispatch` is
    asked whether to refuse a request (429). `start_s`: where the clock begins.

    The thread alone touches the engine. It sleeps while there is nothing to do, and hands the deltas of a step to
    the event loop in one go. An engine that raises in `step` ends every request in flight with that error.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model: str = "forge",
        defaults: Sampling | None = None,
        budget: Budget | None = None,
        idle_s: float = math.inf,
        recording: Recording | None = None,
        dispatch: Dispatch | None = None,
        start_s: float = 0.0,
    ) -> None:
        self.model = model
        self.max_context = engine.max_context
        self.sessions = Sessions(self.now, budget=budget, idle_s=idle_s, recording=recording)
        self._dispatch = dispatch or Mixed()
        self._engine = engine
        self._defaults = defaults or Sampling()
        self._ids = itertools.count()
        self._start_s = time.monotonic() - start_s
        self._inboxes: dict[str, Inbox] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def now(self) -> float:
        return time.monotonic() - self._start_s

    @property
    def fault(self) -> str | None:
        return None if self._failure is None else f"the engine failed: {self._failure}"

    def open(self, trajectory: str) -> Sampling:
        turn = self.sessions.check(trajectory)
        if self._dispatch.refuses:
            now, in_flight = self.now(), len(self._inboxes)
            view = AdmissionView(now=now, draw=0.0, trajectory=trajectory, turn=turn, in_flight=in_flight, instances=1)
            retry_s = self._dispatch.refuse(view)
            if retry_s is not None:
                raise Overloaded(retry_s)
        return self._defaults

    def record(self, completion: Completion) -> None:
        self.sessions.record(completion)

    def report(self, trajectory: str, report: Report) -> None:
        self.sessions.report(trajectory, report)

    async def generate(
        self, trajectory: str, prompt_ids: tuple[int, ...], sampling: Sampling
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        with self.sessions.generating(trajectory):
            async with aclosing(self._deltas(prompt_ids, sampling)) as deltas:
                async for delta in deltas:
                    yield 0, delta

    async def _deltas(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        request = EngineRequest(id=f"r{next(self._ids)}", prompt_ids=prompt_ids, sampling=sampling)
        inbox = self._inboxes[request.id] = Inbox()
        loop = asyncio.get_running_loop()
        self._ensure_thread(loop)
        self._tell(lambda: self._add(request, loop))
        try:
            while True:
                if self._failure:
                    raise self._failure
                news = await inbox.get()
                if isinstance(news, Exception):
                    raise news
                yield news
                if news.finish:
                    break
        finally:
            del self._inboxes[request.id]
            # A no-op for what has finished.
            self._tell(lambda: self._engine.cancel(request.id))

    def close(self) -> None:
        """End the thread; requests in flight get no more news."""
        self._closing = True
        self._tell(lambda: None)
        if self._thread:
            self._thread.join()

    def _ensure_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(loop,), name="forge-engine", daemon=True)
            self._thread.start()

    def _tell(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """The engine's thread: commands, then a step, as long as there is either."""
        while not self._closing:
            with self._wake:
                while not self._commands and not any(self._engine.load_in_flight):
                    self._wake.wait()
            try:
                while self._commands:
                    self._commands.popleft()()
                deltas = self._engine.step()
            except Exception as error:
                logger.exception("gateway: the engine failed")
                self._failure = error
                self._post(loop, [(request_id, error) for request_id in list(self._inboxes)])
                return
            if deltas:
                self._post(loop, [(delta.id, delta) for delta in deltas])

    def _add(self, request: EngineRequest, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._engine.add(request)
        except ValueError as error:
            self._post(loop, [(request.id, error)])

    def _post(self, loop: asyncio.AbstractEventLoop, news: list[tuple[str, Delta | Exception]]) -> None:
        """To the event loop; a loop that has closed has no waiters."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._hand_out, news)

    def _hand_out(self, news: list[tuple[str, Delta | Exception]]) -> None:
        for request_id, item in news:
            inbox = self._inboxes.get(request_id)
            if inbox is not None:
                inbox.put_nowait(item)
