"""KV blocks of an instance: shared chains, what decoding requests hold, and what prompts under way hold."""

from __future__ import annotations

from sim.decodes import Decodes
from sim.kv import ChainCache, Spill
from sim.request import Request


class Memory:
    """`capacity` blocks of `block` tokens. Decodes hold what they will when `planned` units are sampled: the end of the
    last iteration whose blocks are taken. `other`: private blocks of all that do not decode."""

    __slots__ = ("block", "cache", "capacity", "decodes", "other", "planned")

    def __init__(self, block: int, capacity: int, unit: int, listen: bool, spill: Spill | None) -> None:
        self.block = block
        self.capacity = capacity
        self.cache = ChainCache(listen, spill)
        self.decodes = Decodes(block, unit)
        self.other = 0
        self.planned = 0

    def fits(self, more: int) -> bool:
        """Whether `more` blocks are free beside all that is in use."""
        return self.other + self.cache.stored + more + self.decodes.settle(self.planned) <= self.capacity

    def evict(self, wanted: int = 0) -> bool:
        """Make room for `wanted` blocks beside what is in use; False where not all of it can be evicted."""
        cache = self.cache
        short = self.other + cache.stored + wanted + self.decodes.settle(self.planned) - self.capacity
        if short > 0:
            if short > cache.loose:
                return False
            cache.evict(short)
        return True

    def for_decodes(self) -> int:
        """Blocks that decodes could hold, were all evicted that may be."""
        cache = self.cache
        return self.capacity - self.other - cache.stored + cache.loose

    def room(self) -> int:
        """Blocks that are free or may be evicted."""
        return self.for_decodes() - self.decodes.settle(self.planned)

    def start(self, request: Request, kv: int) -> None:
        """It runs from now on, and has found `kv` tokens of its path here."""
        request.kv = kv
        request.held = self.cache.hold(request.path)
        request.share = sum([blocks for _, blocks in request.path])
        request.private = 0
        request.renewed = False

    def place(self, request: Request, kv: int) -> None:
        """A prompt under way now holds `kv` tokens: full blocks of its path are its chains', the rest its own."""
        shared = full = kv // self.block
        if shared > request.share:
            shared = request.share
        if not request.renewed and shared * self.block > request.kv:
            left, cache, held = shared, self.cache, request.held
            for i, (_, blocks) in enumerate(request.path):
                want = blocks if blocks < left else left
                if want > held[i].stored:
                    cache.store(held[i], want)
                left -= blocks
                if left <= 0:
                    break
        private = full - shared + (kv % self.block > 0)
        self.other += private - request.private
        request.private = private
        request.kv = kv
        self.evict()

    def decode(self, request: Request) -> None:
        """Its prompt is done: it grows with the others."""
        self.other -= request.private
        request.private = 0
        self.decodes.join(request)

    def release(self, request: Request, keep: bool) -> None:
        """A request that left the batch gives its blocks back; with `keep` its answer's go on its last chain."""
        if keep and request.path and not request.renewed:
            answer = request.kv // self.block - request.share
            self.cache.store(request.held[-1], request.path[-1][1] + answer)
        self.other -= request.private
        request.private = 0
        self.cache.release(request.held)
        request.held = ()
        request.order = -1

    def renew(self, prefilling: Request | None) -> None:
        """Other weights: nothing here can be hit any more, and who runs stores nothing more."""
        for request in self.decodes.all():
            request.renewed = True
        if prefilling is not None:
            prefilling.renewed = True
            prefilling.share = min(prefilling.kv // self.block, prefilling.share)
        self.cache.renew()
