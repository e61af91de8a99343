"""Our router: every choice in seconds, and what it cannot know taken for as uncertain as it has proved to be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from forge.cost import CostModel
from forge.instances import InstanceView, RouterView, pairs
from forge.policies.router import drawn
from forge.policies.scheduler import FORBID
from forge.types import ForgeError

#: What the newest report counts in averages over an instance's reports, and a request in the rate of our own.
REPORT, RATE = 1 / 20, 1 / 64
#: Sessions whose home is remembered.
HOMES = 100_000


@dataclass(slots=True)
class Foreign:
    """Seconds of work that other routers have an instance do, as its reports tell: by the last one, on average, and how
    much that changes from one report to the next, which is how wrong a report is by the time it is used."""

    seen_s: float
    seconds: float
    mean: float = 0.0
    change: float = 0.0

    def learn(self, seen_s: float, seconds: float) -> None:
        """A report may have come."""
        if seen_s != self.seen_s:
            self.change += REPORT * (abs(seconds - self.seconds) - self.change)
            self.mean += REPORT * (seconds - self.mean)
            self.seen_s, self.seconds = seen_s, seconds

    def cautious(self) -> float:
        """What to expect now, half way from the last report to the mean, and the error on top."""
        return (self.seconds + self.mean) / 2 + self.change


class Choice(NamedTuple):
    """`seconds`: what it costs. `fetches`: with the longest prefix there is, from who holds it."""

    seconds: float
    in_flight: int
    instance: int
    fetches: bool


@dataclass(kw_only=True)
class Seconds:
    """The instance, and where the world moves KV the source, of the least estimated seconds:

    - to wait for the prompts that are there already: ours without a first token, as they are now; other routers', as
      reports make expect, and the expectation's error on top (`Foreign`): so routers in parallel come to prefer
      different instances, whose load each knows by itself, where they would all run to the one that last looked idle;
    - to compute what of the prompt is missing there, attention included, or to fetch the longest known prefix and
      compute the rest, whichever is less;
    - harm to others: the same work holds up those that this router sends there meanwhile (at the rate at which it
      sends), and, with `goal = "latency"`, every request that decodes there. With "ttft" seconds count that pass before
      first tokens, with "latency" all that requests take.

    Equal ones: fewest requests in flight, then by the draw. Where nobody is known to hold any of the prompt, the
    instance that a session's last request went to counts as holding that much: an agent between two requests has
    nothing in flight, and has a home all the same.

    Costs are the deployment's (`Seconds.of`): `token_s` of a prompt token without attention, `pair_s` of a (query, key)
    pair of it, `transfer_token_s` of a token's KV from another instance (None: the world moves none). Defaults:
    llama_3_1_70b on 8 h100_sxm.
    """

    __pydantic_config__ = FORBID
    reads_load: ClassVar[bool] = True
    kind: Literal["seconds"] = "seconds"
    token_s: float = 5.7e-5
    pair_s: float = 8.3e-10
    transfer_token_s: float | None = None
    goal: Literal["ttft", "latency"] = "ttft"
    _foreign: dict[int, Foreign] = field(default_factory=dict, init=False, repr=False)
    _homes: dict[str, tuple[int, int]] = field(default_factory=dict, init=False, repr=False)  # instance, prompt tokens
    _chosen: Choice | None = field(default=None, init=False, repr=False)
    _last_s: float = field(default=0.0, init=False, repr=False)
    _gap_s: float = field(default=0.0, init=False, repr=False)  # between our requests

    def __post_init__(self) -> None:
        for name in ("token_s", "pair_s", "transfer_token_s"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ForgeError(f"{name} = {value:g}: must be seconds, 0 or more")
        if not self.token_s:
            raise ForgeError(f"token_s = {self.token_s:g}: must be positive")

    @classmethod
    def of(cls, cost: CostModel, budget: int = 8192, bandwidth: float | None = None) -> Seconds:
        """For a deployment that computes `budget` prompt tokens an iteration. `bandwidth`: bytes/s at which an instance
        sends KV; None: it does not."""
        first, far = cost.prefill(budget), cost.prefill(budget, budget * 32)
        pair_s = (far - first) / (budget * budget * 32)
        token_s = (first - pairs(budget, budget) * pair_s) / budget
        moved_s = None if bandwidth is None else cost.on.kv_bytes * cost.on.devices / bandwidth
        return cls(token_s=token_s, pair_s=pair_s, transfer_token_s=moved_s)

    def route(self, view: RouterView) -> int:
        self._count(view.now)
        cached = view.cached or self._remembered(view)
        longest = max(cached.values(), default=0)
        choices = [self._choice(view, seen, cached.get(seen.instance, 0), longest) for seen in view.instances]
        best = min(choices)
        ties = [one.instance for one in choices if one[:2] == best[:2]]
        chosen = drawn(ties, view.draw)
        self._chosen = next(one for one in choices if one.instance == chosen)
        self._remember(view, chosen)
        return chosen

    def source(self, view: RouterView, instance: int) -> int | None:
        """Of those that hold the longest prefix, one by the draw: they share the sending."""
        chosen = self._chosen
        if chosen is None or chosen.instance != instance or not chosen.fetches:
            return None
        most = max(view.cached.values())
        return drawn(sorted(i for i, tokens in view.cached.items() if tokens == most), view.draw)

    # --- what a choice costs ------

    def _choice(self, view: RouterView, seen: InstanceView, held: int, longest: int) -> Choice:
        here, there = self._work(view.prompt_tokens, held), self._work(view.prompt_tokens, longest)
        prompt_s, fetches = here, False
        if self.transfer_token_s is not None and view.cached:
            moved_s = there + (longest - held) * self.transfer_token_s
            if moved_s < here:
                prompt_s, here, fetches = moved_s, there, True
        queue_s = self._seconds(seen.prefill_tokens, seen.prefill_pairs) + self._others(seen)
        held_up = (queue_s + prompt_s) / (self._gap_s * len(view.instances)) if self._gap_s else 0.0
        if self.goal == "latency":
            held_up += max(seen.running, seen.in_flight - seen.unanswered)
        return Choice(queue_s + prompt_s + here * held_up, seen.in_flight, seen.instance, fetches)

    def _others(self, seen: InstanceView) -> float:
        """Seconds of other routers' prompts that wait there."""
        seconds = self._seconds(seen.other_tokens, seen.other_pairs)
        foreign = self._foreign.get(seen.instance)
        if foreign is None:
            foreign = self._foreign[seen.instance] = Foreign(seen.reported_s, seconds)
        foreign.learn(seen.reported_s, seconds)
        return foreign.cautious()

    def _work(self, prompt: int, held: int) -> float:
        """Seconds to compute a prompt of which so much is held; its last token always is."""
        missing = max(1, prompt - held)
        return self._seconds(missing, pairs(missing, prompt))

    def _seconds(self, tokens: int, of_attention: int) -> float:
        return tokens * self.token_s + of_attention * self.pair_s

    # --- what it remembers ------

    def _count(self, now: float) -> None:
        """A request of ours. The first two give the first gap."""
        if self._homes:
            gap_s = now - self._last_s
            self._gap_s += RATE * (gap_s - self._gap_s) if self._gap_s else gap_s
        self._last_s = now

    def _remembered(self, view: RouterView) -> dict[int, int]:
        home = self._homes.get(view.trajectory)
        return {} if home is None else {home[0]: min(home[1], view.prompt_tokens)}

    def _remember(self, view: RouterView, chosen: int) -> None:
        self._homes.pop(view.trajectory, None)
        self._homes[view.trajectory] = chosen, view.prompt_tokens
        if len(self._homes) > HOMES:
            del self._homes[next(iter(self._homes))]
