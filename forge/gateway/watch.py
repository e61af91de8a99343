"""What an operator sees of a gateway: Prometheus metrics of every request, and a line of JSON for each in a log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import prometheus_client as prometheus

from forge.gateway.choices import Choices
from forge.types import Completion, Json

#: seconds, for times to a first token and of whole requests
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_HUNG_UP = 499


@dataclass(slots=True)
class Seen:
    """One request on its way. `status` is what its client was told; 499: it hung up before anything was."""

    protocol: str
    trajectory: str = ""
    status: int = 200
    code: str | None = None
    stream: bool = False
    joined: bool = False  # a retry that got the answer of the request before it
    delivered: bool = False
    choices: Choices | None = field(default=None, repr=False)

    def hung_up(self) -> None:
        self.status = _HUNG_UP


class Watch:
    """Counters of one gateway. `log` gets a row for every request once it is answered.

    `forks` and `echoes` count, over all trajectories, why completions do not simply go on from a reply, and how replies
    came back (forge.gateway.recovery); they are Prometheus counters too.
    """

    def __init__(self, log: Callable[[Json], None] | None = None) -> None:
        self._log = log
        self.forks: Counter[str] = Counter()
        self.echoes: Counter[str] = Counter()
        self.registry = prometheus.CollectorRegistry()

        def counter(name: str, says: str, *labels: str) -> prometheus.Counter:
            return prometheus.Counter(f"forge_gateway_{name}", says, labels, registry=self.registry)

        def seconds(name: str, says: str, *labels: str) -> prometheus.Histogram:
            return prometheus.Histogram(
                f"forge_gateway_{name}_seconds", says, labels, registry=self.registry, buckets=_BUCKETS
            )

        self._requests = counter("requests", "Requests answered", "protocol", "status")
        self._refused = counter("refused", "Requests refused, by the code of the error", "code")
        self._undelivered = counter("undelivered", "Answers that their client did not wait for, or that broke")
        self._joined = counter("joined", "Retries that got the answer of the request before them")
        self._prompt = counter("prompt_tokens", "Tokens of prompts")
        self._sampled = counter("sampled_tokens", "Tokens sampled")
        self._forks = counter("forks", "Completions that do not simply go on from a reply", "reason")
        self._echoes = counter("echoes", "Replies that came back, by how they differed", "kind")
        self._malformed = counter("malformed_calls", "Tool calls in replies that were none")
        self._ended = counter("trajectories_ended", "Trajectories that are over")
        self._seconds = seconds("request", "From a request's first byte to its answer's last", "protocol")
        self._ttft = seconds("ttft", "From a request to the first token of its completion")
        self._in_flight = prometheus.Gauge("forge_gateway_in_flight", "Requests under way", registry=self.registry)

    @contextmanager
    def request(self, protocol: str) -> Iterator[Seen]:
        """Around one request; what is known of it is written into what this yields."""
        seen, began = Seen(protocol), time.perf_counter()
        self._in_flight.inc()
        try:
            yield seen
        finally:
            self._in_flight.dec()
            self._answered(seen, time.perf_counter() - began)

    def completed(self, completion: Completion, malformed: int, echoes: Counter[str]) -> None:
        """A completion is recorded; `echoes`: of the replies that came back with its request."""
        self._prompt.inc(len(completion.prompt_ids))
        self._sampled.inc(len(completion.sampled_ids))
        self._ttft.observe(completion.first_token_s - completion.received_s)
        self._malformed.inc(malformed)
        if completion.fork:
            self.forks[completion.fork] += 1
            self._forks.labels(completion.fork).inc()
        for kind, count in echoes.items():
            self.echoes[kind] += count
            self._echoes.labels(kind).inc(count)

    def trajectory_ended(self) -> None:
        self._ended.inc()

    def exposition(self) -> bytes:
        """In Prometheus' text format."""
        return prometheus.generate_latest(self.registry)

    def _answered(self, seen: Seen, seconds: float) -> None:
        self._requests.labels(seen.protocol, seen.status).inc()
        self._seconds.labels(seen.protocol).observe(seconds)
        if seen.code is not None:
            self._refused.labels(seen.code).inc()
        self._joined.inc(seen.joined)
        self._undelivered.inc(seen.choices is not None and not seen.delivered)
        if self._log is not None:
            self._log(_row(seen, seconds))


def _row(seen: Seen, seconds: float) -> Json:
    generations = seen.choices.generations if seen.choices else ()
    return {
        "time": round(time.time(), 3),
        "trajectory": seen.trajectory,
        "protocol": seen.protocol,
        "status": seen.status,
        "code": seen.code,
        "stream": seen.stream,
        "joined": seen.joined,
        "delivered": seen.delivered,
        "seconds": round(seconds, 6),
        "prompt_tokens": len(generations[0].job.prompt_ids) if generations else None,
        "sampled_tokens": sum(len(one.sampled_ids) for one in generations),
        "finish": [one.finish for one in generations],
        "completions": [
            {"index": one.linked.index, "parent": one.linked.parent, "fork": one.linked.fork}
            for one in generations
            if one.linked
        ],
    }
