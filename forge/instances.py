"""What routers see of the rollout instances, folded from events: half of `forge.views`, and all that a pure serving
simulation needs.

Some of it the router's own side knows at once, because requests pass through it: what is in flight where, and how far.
The rest instances report, a while ago: their load, and which prefixes they hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from forge.prefix_index import PrefixIndex

#: (chain, blocks) pairs, see `forge.prefix_index`; () where nobody knows.
Path = Sequence[tuple[int, int]]


@dataclass(slots=True)
class InstanceView:
    """One rollout instance.

    Known here: requests sent and not yet completed (`in_flight`), those of them without a first token (`unanswered`),
    the prompt tokens of all of them (`context_tokens`), the prompt tokens of the unanswered ones, those expected to be
    cached left out (`prefill_tokens`), with the (query, key) pairs of their attention (`prefill_pairs`); the weights
    `version` it serves.

    Reported: requests that run and wait there, tokens of KV free or evictable, the most that ever were
    (`capacity_tokens`), when that was seen (`reported_s`). Without what this router had itself under way at that time,
    other routers' are: requests (`others`), prompt tokens to be computed (`other_tokens`), their pairs (`other_pairs`).
    """

    instance: int
    in_flight: int = 0
    version: int = 0
    prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0
    free_tokens: int = 0
    unanswered: int = 0
    prefill_pairs: int = 0
    context_tokens: int = 0
    capacity_tokens: int = 0
    reported_s: float = 0.0
    others: int = 0
    other_tokens: int = 0
    other_pairs: int = 0


@dataclass(slots=True)
class RouterView:
    """For the router: one request to place. `instances` are the live ones, by id, as they are now: they go on changing,
    so a router reads them and keeps none. `cached`: leading tokens of the prompt that an instance is known to hold;
    instances that hold none are left out."""

    now: float
    draw: float
    trajectory: str
    turn: int
    prompt_tokens: int
    instances: tuple[InstanceView, ...]
    cached: dict[int, int] = field(default_factory=dict)

    def least_missing(self) -> list[int]:
        """Who has the fewest prompt tokens to compute before this request's first one; of those, the fewest requests in
        flight."""
        least, fewest, ties, cached = 1 << 62, 0, [0], self.cached
        for seen in self.instances:
            missing = seen.prefill_tokens - cached.get(seen.instance, 0)
            if missing < least or (missing == least and seen.in_flight < fewest):
                least, fewest, ties = missing, seen.in_flight, [seen.instance]
            elif missing == least and seen.in_flight == fewest:
                ties.append(seen.instance)
        return ties


def pairs(missing: int, prompt: int) -> int:
    """(query, key) pairs of the attention that computes a prompt's last `missing` tokens."""
    return missing * (2 * prompt - missing + 1) // 2


class _Sent:
    """A request in flight: where, what of its prompt has no first token yet."""

    __slots__ = ("missing", "pairs", "prompt", "state")

    def __init__(self, state: InstanceView, prompt: int, missing: int) -> None:
        self.state = state
        self.prompt = prompt
        self.missing = missing
        self.pairs = pairs(missing, prompt)


class Instances:
    """State of all instances. `block`: tokens of the KV blocks that paths count. `index`: what they cache, where
    several routers share it. Times in seconds, never going back; only whoever is sent reports needs them."""

    def __init__(self, count: int, block: int = 1, index: PrefixIndex | None = None) -> None:
        self._all = [InstanceView(i) for i in range(count)]
        self._live = [True] * count
        self._views = tuple(self._all)  # of the live ones
        self._requests: dict[str, _Sent] = {}
        self.index = PrefixIndex() if index is None else index
        self.block = block
        # By instance, since the time of its last report: (time, requests, prompt tokens, pairs) of ours from then on;
        # empty for one that never reported.
        self._ours: list[deque[tuple[float, int, int, int]]] = [deque() for _ in range(count)]

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def is_live(self, instance: int) -> bool:
        return 0 <= instance < len(self._all) and self._live[instance]

    def views(self) -> tuple[InstanceView, ...]:
        """Of the live ones, by id."""
        return self._views

    def _set_live(self, instance: int, live: bool) -> None:
        self._live[instance] = live
        self._views = tuple([state for state in self._all if self._live[state.instance]])

    def cached(self, path: Path) -> dict[int, int]:
        """Leading tokens of a path by instance."""
        return self.index.match(path, self.block)

    # --- what happens ------

    def routed(self, request: str, instance: int, prompt_tokens: int, cached: int, now: float) -> None:
        state = self._all[instance]
        sent = self._requests[request] = _Sent(state, prompt_tokens, prompt_tokens - cached)
        state.in_flight += 1
        state.context_tokens += prompt_tokens
        state.unanswered += 1
        state.prefill_tokens += sent.missing
        state.prefill_pairs += sent.pairs
        self._note(state, now)

    def first_token(self, request: str, now: float) -> None:
        sent = self._requests[request]
        if sent.missing:
            self._answered(sent)
            self._note(sent.state, now)

    def completed(self, request: str, now: float) -> bool:
        """False: no such request is in flight."""
        sent = self._requests.pop(request, None)
        if sent is None:
            return False
        state = sent.state
        state.in_flight -= 1
        state.context_tokens -= sent.prompt
        if sent.missing:
            self._answered(sent)
        self._note(state, now)
        return True

    def _answered(self, sent: _Sent) -> None:
        """Nothing of its prompt is to be computed any more."""
        state = sent.state
        state.unanswered -= 1
        state.prefill_tokens -= sent.missing
        state.prefill_pairs -= sent.pairs
        sent.missing = sent.pairs = 0

    def _note(self, state: InstanceView, now: float) -> None:
        ours = self._ours[state.instance]
        if ours:
            ours.append((now, state.in_flight, state.prefill_tokens, state.prefill_pairs))

    def loaded(self, instance: int, version: int) -> None:
        """What it held is of other weights; nobody may count on it."""
        self._all[instance].version = version
        self.index.clear(instance)

    def down(self, instance: int) -> None:
        """Its requests complete as lost, before or after this."""
        self._set_live(instance, False)
        self.index.clear(instance)

    def up(self, instance: int, version: int) -> None:
        self._set_live(instance, True)
        self.loaded(instance, version)

    def reported(
        self, instance: int, seen_s: float, running: int, waiting: int, free_tokens: int, tokens: int, pairs: int
    ) -> None:
        """Its load at `seen_s`. `tokens`, `pairs`: of prompts, that it had to compute."""
        state = self._all[instance]
        state.running, state.waiting, state.free_tokens = running, waiting, free_tokens
        state.capacity_tokens = max(state.capacity_tokens, free_tokens)
        state.reported_s = seen_s
        ours = self._ours[instance]
        if not ours:
            ours.append((seen_s, state.in_flight, state.prefill_tokens, state.prefill_pairs))
        while len(ours) > 1 and ours[1][0] <= seen_s:
            ours.popleft()
        _, own, own_tokens, own_pairs = ours[0]
        state.others = max(0, running + waiting - own)
        # Of nobody's requests is nothing to be computed: without them ours have more to compute than was expected.
        state.other_tokens = max(0, tokens - own_tokens) if state.others else 0
        state.other_pairs = max(0, pairs - own_pairs) if state.others else 0

    def stored(self, instance: int, chains: Iterable[tuple[int, int]]) -> None:
        """It told which chains' stored blocks changed, with the blocks they have now."""
        put = self.index.set
        for chain, blocks in chains:
            put(instance, chain, blocks)
