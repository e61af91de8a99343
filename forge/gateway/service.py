"""What a gateway serves whoever runs it: health and metrics."""

from __future__ import annotations

from forge.gateway import wire
from forge.gateway.gateway import Gateway
from forge.gateway.wire import Receive, Scope, Send

_EXPOSITION = b"text/plain; version=0.0.4; charset=utf-8"


class Health:
    """GET /health: 200 while the backend can generate, else 503 and why not."""

    def __init__(self, gateway: Gateway) -> None:
        self._backend = gateway.backend

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        fault = self._backend.fault
        body = {"status": "ok" if fault is None else "unavailable", "model": self._backend.model, "fault": fault}
        await wire.send_json(send, 200 if fault is None else 503, wire.dump(body))


class Metrics:
    """GET /metrics, for Prometheus."""

    def __init__(self, gateway: Gateway) -> None:
        self._watch = gateway.watch

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await wire.send_whole(send, 200, self._watch.exposition(), _EXPOSITION)
