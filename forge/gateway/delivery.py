"""How one answer reaches its client, whole or as a stream, for every protocol alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic

from forge.gateway import wire
from forge.gateway.choices import Choices
from forge.gateway.errors import ApiError, as_api_error
from forge.gateway.fields import parse_body
from forge.gateway.gateway import Gateway
from forge.gateway.protocol import Dialect, R, Reply
from forge.gateway.retries import Key
from forge.gateway.watch import Seen
from forge.gateway.wire import Headers, Receive, Scope, Send
from forge.rollout.engine import Sampling


class GenerateEndpoint(Generic[R]):
    """POST of a dialect: one request, answered from one or more generations.

    A stream is silent for `keep_alive_s` at most, from its head on; the head itself waits that long for a first token,
    so that what fails before is told by its status.
    """

    def __init__(self, gateway: Gateway, dialect: Dialect[R], *, max_body_bytes: int, keep_alive_s: float) -> None:
        self._gateway = gateway
        self._dialect = dialect
        self._max_body_bytes = max_body_bytes
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = dict(scope["headers"])
        with self._gateway.watch.request(self._dialect.name) as seen:
            try:
                body = await wire.read_body(headers, receive, self._max_body_bytes)
                seen.trajectory = wire.trajectory_of(scope, headers)
                await self._answer(body, headers, seen, receive, send)
            except wire.HungUp:
                seen.hung_up()
            except Exception as error:
                told = await send_error(send, self._dialect, error)
                seen.status, seen.code = told.status, told.code

    async def _answer(self, body: bytes, headers: Headers, seen: Seen, receive: Receive, send: Send) -> None:
        gateway, trajectory = self._gateway, seen.trajectory
        key: Key = (trajectory, self._dialect.name, body)
        ticket = gateway.join(key) if wire.is_retry(headers) else None
        seen.joined = ticket is not None
        try:
            # What is joined was let in once: neither a full engine nor a spent budget keeps its answer back.
            defaults = gateway.backend.open(trajectory) if ticket is None else Sampling()
            request = self._dialect.parse(parse_body(body), trajectory)
            if ticket is None:
                ticket = gateway.start(key, request, defaults, is_sub_agent=wire.is_sub_agent(headers))
            seen.choices, seen.stream = ticket.flight, request.stream
            delivery = _Delivery(ticket.flight, self._dialect.reply(request, ticket.flight), send, self._keep_alive_s)
            seen.delivered = await delivery.run(receive, stream=request.stream)
        finally:
            if ticket is not None:
                gateway.leave(ticket, delivered=seen.delivered, may_retry=wire.may_retry(headers))


class CountEndpoint(Generic[R]):
    """POST that asks how long a request's prompt is."""

    def __init__(self, gateway: Gateway, dialect: Dialect[R], *, max_body_bytes: int) -> None:
        self._gateway = gateway
        self._dialect = dialect
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = dict(scope["headers"])
        try:
            body = await wire.read_body(headers, receive, self._max_body_bytes)
            trajectory = wire.trajectory_of(scope, headers)
            self._gateway.backend.open(trajectory)
            tokens = self._gateway.count(self._dialect.parse(parse_body(body), trajectory))
            await wire.send_json(send, 200, wire.dump(self._dialect.counted(tokens)))
        except wire.HungUp:
            return
        except Exception as error:
            await send_error(send, self._dialect, error)


async def send_error(send: Send, dialect: Dialect[R], error: Exception) -> ApiError:
    """Returns what the client was told."""
    told = as_api_error(error)
    status, body = dialect.error(told)
    await wire.send_json(send, status, wire.dump(body), told.headers())
    return told


class _Delivery:
    """One client being answered."""

    def __init__(self, choices: Choices, reply: Reply, send: Send, keep_alive_s: float) -> None:
        self._delivered = False
        self._choices = choices
        self._reply = reply
        self._send = send
        self._keep_alive_s = keep_alive_s
        unkept = ", ".join(self._choices.unkept).encode()
        self._headers = [(wire.UNENFORCED, unkept)] if unkept else []

    async def run(self, receive: Receive, *, stream: bool) -> bool:
        """Answer, unless the client hangs up first; returns whether it got the whole answer.

        Raises what went wrong before the head was sent.
        """
        gone = asyncio.ensure_future(wire.until_hang_up(receive))
        writing = asyncio.ensure_future(self._stream(gone) if stream else self._whole(gone))
        try:
            await asyncio.wait((gone, writing), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            gone.cancel()
            writing.cancel()
        return self._delivered

    async def _whole(self, gone: asyncio.Future[None]) -> None:
        pieces = [
            [piece async for step in generation.steps() if step for piece in step.pieces]
            for generation in self._choices.generations
        ]
        self._choices.settle()
        delivered = not gone.done()
        await wire.send_json(self._send, 200, self._reply.whole(pieces), self._headers)
        self._delivered = delivered

    async def _stream(self, gone: asyncio.Future[None]) -> None:
        started = False
        beat = _Heartbeat(self._keep_alive_s, self._choices.nudge)
        try:
            async for choice, step in self._choices.steps():
                if not started:
                    await wire.start_events(self._send, self._headers)
                    await wire.send_events(self._send, self._reply.first())
                    started = True
                elif step is None:
                    await wire.send_events(self._send, self._reply.keep_alive())
                if step and step.pieces:
                    beat.rest()
                    await wire.send_events(self._send, self._reply.chunk(choice, step))
            self._choices.settle()
            delivered = not gone.done()
            await wire.send_events(self._send, self._reply.last(), more=False)
            self._delivered = delivered
        except Exception as error:
            if not started:
                raise
            await wire.send_events(self._send, self._reply.broken(as_api_error(error)), more=False)
        finally:
            beat.stop()


class _Heartbeat:
    """Calls `beat` whenever `period_s` have passed since it last did, or since the last `rest`."""

    def __init__(self, period_s: float, beat: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._period_s = period_s
        self._beat = beat
        self._since = self._loop.time()
        self._timer = self._loop.call_later(period_s, self._fire)

    def rest(self) -> None:
        self._since = self._loop.time()

    def stop(self) -> None:
        self._timer.cancel()

    def _fire(self) -> None:
        now = self._loop.time()
        if now - self._since >= self._period_s:
            self._since = now
            self._beat()
        self._timer = self._loop.call_later(self._since + self._period_s - now, self._fire)
