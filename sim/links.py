"""Links that carry KV, shared by the transfers that cross them.

A transfer crosses one or more ports (the network cards of the two instances, a host's memory bus, a file system) and
is as fast as the slowest lets it. Each port divides its bandwidth max-min fairly: equal shares, and what a transfer
that another port holds back leaves over is the others'. Whatever begins or ends changes the rates of all transfers it
meets, directly or through others, and of no more.

Exact: rates are whole bytes/s, what is left of a transfer is counted in bytes times femtoseconds, and one that would
end inside a femtosecond ends with it. A port leaves less than a byte/s a transfer unused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from forge.types import ForgeError
from sim.alarm import HAPPEN, Alarm
from sim.clock import FS, to_fs


class Transfer:
    """`size` bytes over `ports`. `left` of it at `at`, in bytes/s times fs; `rate` bytes/s, 0 before it has begun."""

    __slots__ = ("at", "done", "due", "left", "number", "ports", "rate", "size")

    def __init__(self, number: int, ports: tuple[int, ...], size: int, due: int, done: Callable[[], None]) -> None:
        self.number = number
        self.ports = ports
        self.size = size
        self.left = size * FS
        self.rate = 0
        self.at = self.due = due
        self.done = done


class Links:
    """`bandwidths` of the ports in bytes/s. `moved`: bytes of all transfers that have ended."""

    def __init__(self, env: Any, bandwidths: Sequence[int]) -> None:
        if min(bandwidths, default=1) < 1:
            raise ForgeError(f"bandwidth = {min(bandwidths)} bytes/s: must be at least 1")
        self._env = env
        self._bandwidths = bandwidths
        self._on: list[dict[Transfer, None]] = [{} for _ in bandwidths]
        self._due: list[tuple[int, int, Transfer]] = []  # heap; an entry whose time the transfer has not is void
        self._number = 0
        self._alarm = Alarm(env, HAPPEN, lambda _: self._ring())
        self._planned = -1
        self.moved = 0

    def send(self, ports: tuple[int, ...], size: int, done: Callable[[], None], after: int = 0) -> Transfer:
        """`done` is called at the end. The ports are free for others during the first `after` fs."""
        transfer = Transfer(self._number, ports, size, self._env.now + after, done)
        self._number += 1
        self._plan(transfer)
        self._wake()
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """It never ends; what it has moved is nobody's."""
        transfer.due = -1
        if transfer.rate:
            self._leave(transfer)
            self._share(transfer.ports)
            self._wake()

    def estimate(self, ports: tuple[int, ...], size: int) -> int:
        """Fs that `size` bytes would take if they began now, and all who are under way stayed."""
        rate = min(self._bandwidths[port] // (1 + len(self._on[port])) for port in ports)
        return -(-size * FS // max(1, rate))

    def rates(self) -> dict[int, list[int]]:
        """Bytes/s of the transfers on every port, in order of their begin."""
        return {port: [transfer.rate for transfer in on] for port, on in enumerate(self._on)}

    # --- inside ------

    def _plan(self, transfer: Transfer) -> None:
        heappush(self._due, (transfer.due, transfer.number, transfer))

    def _wake(self) -> None:
        due = self._due
        while due and due[0][0] != due[0][2].due:
            heappop(due)
        if due and due[0][0] != self._planned:
            self._planned = due[0][0]
            self._alarm.set(self._planned)

    def _ring(self) -> None:
        """Those that are due begin, or end."""
        now: int = self._env.now
        if now != self._planned:
            return
        self._planned = -1
        ended: list[Transfer] = []
        touched: set[int] = set()
        while self._due and self._due[0][0] == now:
            at, _, transfer = heappop(self._due)
            if at != transfer.due:
                continue
            touched.update(transfer.ports)
            if transfer.rate:
                self._leave(transfer)
                transfer.due = -1  # there may be two entries of one time
                ended.append(transfer)
            else:
                for port in transfer.ports:
                    self._on[port][transfer] = None
        self._share(touched)
        self._wake()
        for transfer in ended:
            self.moved += transfer.size
            transfer.done()

    def _leave(self, transfer: Transfer) -> None:
        for port in transfer.ports:
            del self._on[port][transfer]

    def _share(self, ports: Iterable[int]) -> None:
        """Set the rates of all transfers on the ports, and of those they compete with."""
        now: int = self._env.now
        found: dict[Transfer, None] = {}
        todo = sorted(set(ports))
        seen = set(todo)
        while todo:
            for transfer in self._on[todo.pop()]:
                found[transfer] = None
                for port in transfer.ports:
                    if port not in seen:
                        seen.add(port)
                        todo.append(port)
        for transfer, rate in self._fill(seen).items():
            if rate != transfer.rate:
                transfer.left -= transfer.rate * (now - transfer.at)
                transfer.at, transfer.rate = now, rate
                transfer.due = now + max(0, -(-transfer.left // rate))
                self._plan(transfer)

    def _fill(self, ports: set[int]) -> dict[Transfer, int]:
        """Max-min: the port with the least for each fixes its transfers' rates, then the next with what is left."""
        room = {port: self._bandwidths[port] for port in sorted(ports) if self._on[port]}
        count = {port: len(self._on[port]) for port in room}
        rates: dict[Transfer, int] = {}
        while room:
            least = min(room, key=lambda port: room[port] // count[port])
            share = max(1, room[least] // count[least])
            for transfer in self._on[least]:
                if transfer in rates:
                    continue
                rates[transfer] = share
                for port in transfer.ports:
                    room[port] -= share
                    count[port] -= 1
                    if not count[port]:
                        del room[port]
        return rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What moving KV costs: `token_bytes` a token, and for a block, in which memory is scattered, what else could have
    crossed in the time its messages take (`block_bytes`). `latency_fs` before the first byte."""

    block: int
    token_bytes: int
    block_bytes: int = 0
    latency_fs: int = 0

    def size(self, tokens: int) -> int:
        return tokens * self.token_bytes + -(-tokens // self.block) * self.block_bytes


def wire(block: int, token_bytes: float, bandwidth: float, block_s: float, latency_s: float) -> Wire:
    """With the time of a block's messages on a link of `bandwidth` bytes/s."""
    return Wire(
        block=block,
        token_bytes=max(1, round(token_bytes)),
        block_bytes=round(block_s * bandwidth),
        latency_fs=to_fs(latency_s),
    )
