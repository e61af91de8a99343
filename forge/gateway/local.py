"""A backend that stands alone: one engine in a thread of this process. For `forge serve` and for tests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable

from forge.rollout.engine import Delta, Engine, EngineRequest, Sampling
from forge.types import Completion

logger = logging.getLogger(__name__)

Inbox = asyncio.Queue[Delta | Exception]


class EngineBackend:
    """Any trajectory id may generate; records are kept in memory, per trajectory.

    The thread alone touches the engine. It sleeps while there is nothing to do, and hands the deltas of a step to
    the event loop in one go. An engine that raises in `step` ends every request in flight with that error.
    """

    def __init__(self, engine: Engine, *, model: str = "forge", defaults: Sampling | None = None) -> None:
        self.model = model
        self.max_context = engine.max_context
        self.records: defaultdict[str, list[Completion]] = defaultdict(list)
        self._engine = engine
        self._defaults = defaults or Sampling()
        self._ids = itertools.count()
        self._start_s = time.monotonic()
        self._inboxes: dict[str, Inbox] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def now(self) -> float:
        return time.monotonic() - self._start_s

    def open(self, _trajectory: str) -> Sampling:
        return self._defaults

    def record(self, completion: Completion) -> None:
        self.records[completion.trajectory].append(completion)

    async def generate(
        self, _trajectory: str, prompt_ids: tuple[int, ...], sampling: Sampling
    ) -> AsyncGenerator[tuple[int, Delta], None]:
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
                yield 0, news
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
