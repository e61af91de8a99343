"""The trainer and the publication of its weights: a step-time model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge.control import Control
from forge.policies.sync import SyncMode
from forge.sections_sim import Sim
from sim.clock import to_fs, to_s
from sim.rollout import Rollout


class Publisher:
    """Versions are numbered by the step they hold. One is published when the slowest live instance serves it."""

    def __init__(self, env: Any, control: Control, rollout: Rollout) -> None:
        self._env = env
        self._control = control
        self._rollout = rollout
        self._items = {0: 0}  # version -> committed items it holds
        self.newest = 0

    def publish(self, mode: SyncMode) -> None:
        """Begin to publish what is committed now."""
        self.newest = self._control.views.step
        self._items[self.newest] = len(self._control.queue.committed)
        self._rollout.load(self.newest, mode)

    def check(self) -> None:
        """Account a publication if the slowest live instance has moved on."""
        version = self._rollout.served()
        if version is not None and version > self._control.views.version:
            self._control.publish(to_s(self._env.now), version=version, step=version, items=self._items[version])


class Trainer:
    """`on_commit` is called after every durable step and its publication's beginning."""

    def __init__(
        self,
        env: Any,
        control: Control,
        rollout: Rollout,
        publisher: Publisher,
        sim: Sim,
        on_commit: Callable[[], None],
    ) -> None:
        self._env = env
        self._control = control
        self._rollout = rollout
        self._publisher = publisher
        self._sim = sim
        self._on_commit = on_commit

    def train(self, tokens: int) -> None:
        """Train on the batch that the queue has in training; `tokens` are forwarded."""
        self._env.process(self._step(tokens))

    def _step(self, tokens: int) -> Any:
        sim = self._sim
        train_s = sim.train_step_s + sim.train_token_s * tokens
        yield self._env.timeout(to_fs(sim.data_s) + to_fs(train_s) + to_fs(sim.save_s))
        mode = self._control.commit(
            to_s(self._env.now), train_s=train_s, data_s=sim.data_s, io_s=sim.save_s, tokens=tokens, metrics={}
        )
        self._control.account(self._rollout.usage())
        if mode is not None:
            self._publisher.publish(mode)
        self._on_commit()
