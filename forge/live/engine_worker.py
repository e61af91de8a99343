"""The child process of one rollout instance: an `Engine` stepped in a loop, fed over a pipe.

In:  ("add", EngineRequest), ("cancel", id), ("load", folder | None, version, mode)
Out: ("ready", max_context), ("deltas", [Delta], counters), ("refused", id, text), ("loaded", version, seconds),
     ("load_failed", version, text)
`counters` is (busy_s, steps, prefill_tokens, decode_tokens, cached_tokens) since this process began.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forge.policies.sync import SyncMode
from forge.rollout.engine import Delta, Engine, EngineDied, EngineError, EngineRequest
from forge.scenario import Scenario

#: Tokens between the first and the last of a completion are sent in bundles: one message per token and request
#: would cost the gateway more than the engine spends on the token.
FLUSH_S = 0.05
#: where processes of engines write, unless a run has a folder for it
SCRATCH = Path(tempfile.gettempdir()) / "forge-engines"


def make_engine(scenario: Scenario, model_dir: Path, instance: int = 0, scratch: Path = SCRATCH) -> Engine:
    """The engine that the scenario names, serving `model_dir` as version 0. `scratch`: a folder for what its processes
    write, logs say."""
    section = scenario.engine
    if section.kind == "vllm":
        return vllm_engine(scenario, model_dir, instance, scratch / f"engine-{instance}")
    if section.kind == "fake":
        from forge.rollout.fake_engine import FakeEngine

        vocabulary = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        return FakeEngine(
            slots=section.slots, max_context=section.max_context, vocab_size=vocabulary, seed=scenario.seed
        )
    import torch
    from transformers.utils import logging

    from forge.rollout.torch_engine import TorchEngine

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    return TorchEngine(
        model_dir,
        slots=section.slots,
        max_context=section.max_context,
        dtype=getattr(torch, scenario.model.dtype),
        seed=scenario.seed,
    )


def vllm_engine(scenario: Scenario, model_dir: Path, instance: int, scratch: Path) -> Engine:
    """A server of vLLM, up, and what speaks to it. Raises ForgeError where it cannot start."""
    from forge.rollout.vllm.engine import VllmEngine
    from forge.rollout.vllm.server import start

    server = start(scenario, instance, model_dir, scratch)
    server.wait(scenario.engine.vllm.start_timeout_s)
    return VllmEngine(
        server, server.model, scratch, slots=scenario.engine.slots, max_context=scenario.engine.max_context
    )


@dataclass
class _Load:
    folder: Path | None
    version: int
    mode: SyncMode


@dataclass
class EngineLoop:
    """Take messages, step, send. A drain holds new requests back until the running ones are done."""

    pipe: Connection
    engine: Engine
    held: deque[EngineRequest] = field(default_factory=deque)
    load: _Load | None = None
    bundles: dict[str, list[Delta]] = field(default_factory=dict)
    flushed_at: float = 0.0

    def run(self) -> None:
        self.pipe.send(("ready", self.engine.max_context))
        while True:
            busy = self._busy()
            if not busy and self.load is None:
                self._take(self.pipe.recv())
            while self.pipe.poll():
                self._take(self.pipe.recv())
            self._load_if_due()
            if self._busy():
                self._send(self.engine.step())

    def _busy(self) -> bool:
        running, queued = self.engine.load_in_flight
        return running + queued > 0

    def _take(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("add", request):
                if self.load is not None and self.load.mode == "drain":
                    self.held.append(request)
                else:
                    self._add(request)
            case ("cancel", request_id):
                waiting = [r for r in self.held if r.id == request_id]
                for request in waiting:
                    self.held.remove(request)
                    self._ship([Delta(id=request.id, finish="cancelled")])
                self.engine.cancel(request_id)
            case ("load", folder, version, mode):
                self.load = _Load(folder, version, mode)  # a newer version supersedes one not yet loaded

    def _add(self, request: EngineRequest) -> None:
        try:
            self.engine.add(request)
        except EngineError as error:
            self.pipe.send(("refused", request.id, str(error)))

    def _load_if_due(self) -> None:
        load = self.load
        if load is None or (load.mode == "drain" and self._busy()):
            return
        began = time.perf_counter()
        try:
            self.engine.load(load.folder, load.version, recompute=load.mode == "abort")
        except EngineError as error:
            self.pipe.send(("load_failed", load.version, str(error)))
        else:
            self.pipe.send(("loaded", load.version, time.perf_counter() - began))
        self.load = None
        while self.held:
            self._add(self.held.popleft())

    def _send(self, deltas: list[Delta]) -> None:
        """First tokens and last tokens go at once, the rest in bundles."""
        out = []
        for delta in deltas:
            if delta.id not in self.bundles:
                self.bundles[delta.id] = []
                out.append(delta)
            else:
                self.bundles[delta.id].append(delta)
            if delta.finish is not None:
                bundle = self.bundles.pop(delta.id)
                if bundle:
                    out.append(_join(bundle))
        now = time.perf_counter()
        if now - self.flushed_at > FLUSH_S:
            self.flushed_at = now
            for request_id, bundle in self.bundles.items():
                if bundle:
                    out.append(_join(bundle))
                    self.bundles[request_id] = []
        if out:
            self._ship(out)

    def _ship(self, deltas: list[Delta]) -> None:
        stats = self.engine.stats
        counters = stats.busy_s, stats.steps, stats.prefill_tokens, stats.decode_tokens, stats.cached_tokens
        self.pipe.send(("deltas", deltas, counters))


def _join(bundle: list[Delta]) -> Delta:
    return Delta(
        id=bundle[0].id,
        token_ids=tuple(t for d in bundle for t in d.token_ids),
        logprobs=tuple(p for d in bundle for p in d.logprobs),
        versions=tuple(v for d in bundle for v in d.versions),
        finish=bundle[-1].finish,
    )


def main(
    pipe: Connection, scenario: Scenario, model_dir: Path, version: int, instance: int = 0, scratch: Path = SCRATCH
) -> None:
    """Entry point of the child: serve the weights in `model_dir` as `version`. Ends as a process that dies where its
    engine does, so that another takes its place."""
    engine = make_engine(scenario, model_dir, instance, scratch)
    engine.load(None, version)
    try:
        EngineLoop(pipe, engine).run()
    except EngineDied as error:
        sys.exit(str(error))
