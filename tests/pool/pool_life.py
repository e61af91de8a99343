"""One life of a made-up run, for the test that kills it: `python pool_life.py FOLDER ITEMS SEED`.

The whole path of a live run without models: Control accounts to pool and trace, producers deliver members in any
order and some twice, and the "model" is the list of positions it was trained on, carried from checkpoint to
checkpoint. Prints a line for every rollout it ends, and a last one when all items have ended.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

from pool_support import MEMBERS, task, trajectory

from forge import trace as ev
from forge.control import Control
from forge.policies import Policies, WindowedFifo
from forge.pool.store import Pool
from forge.queue import QueueShape
from forge.train import checkpoint
from forge.types import DeathReason

SHAPE = QueueShape(n=8, batch=3, window=2, publish_every=1, park_items=2, park_reach=4)
SCHEDULER = WindowedFifo(park_items=2, park_after_s=3.0, park_reach=4)


class Life:
    def __init__(self, folder: Path, items: int, seed: int) -> None:
        self.folder, self.items, self.rng = folder, items, Random(seed)
        self.now = 0.0
        self.attempts: dict[int, int] = {}
        self.pool = Pool(folder / "pool.sqlite")
        self.trace = ev.TraceWriter(folder / "trace.jsonl")
        self.control = Control(
            policies=Policies(scheduler=SCHEDULER),
            shape=SHAPE,
            instances=1,
            group=MEMBERS,
            seed=seed,
            sinks=(self.pool, self.trace),
        )
        self.trained: list[int] = []

    def begin(self) -> None:
        newest = checkpoint.latest(self.folder / "checkpoints")
        if newest is not None:
            self.trained = json.loads((newest / "model.json").read_text())
        position = None if newest is None else checkpoint.read(newest)
        self.control.resume(self.pool.resume(position, self.now))
        self.attempts = {item.position: item.attempt for item in self.pool.running_items()}
        self.take()  # what the last life left stale dies before anything is submitted, as in the live world

    def run(self) -> None:
        queue = self.control.queue
        while len(queue) < self.items or queue.open_items:
            self.now += 1.0
            while len(queue) < self.items and queue.may_submit():
                self.pool.put_task(len(queue), task(len(queue)))
                position = self.control.submit(self.now, domain="a", difficulty=1.0, members=MEMBERS)
                self.attempts[position] = 0
            if self.attempts:
                self.roll_out(self.rng.choice(sorted(self.attempts)))
            self.take()
            ending = len(queue) == self.items and not self.attempts
            if positions := self.control.start_step(self.now, ending=ending):
                self.train(positions)

    def take(self) -> None:
        self.control.take(self.now)
        while stale := self.control.queue.stale():
            for position in stale:
                self.attempts.pop(position, None)
                self.control.die(self.now, position, DeathReason.STALE, tokens=0)
            self.control.take(self.now)

    def roll_out(self, position: int) -> None:
        print(position, flush=True)
        attempt = self.attempts.pop(position)
        members = [m for m in range(MEMBERS) for _ in range(self.rng.choice((1, 1, 2)))]
        self.rng.shuffle(members)
        for member in members:
            self.pool.deliver(trajectory(position, member, attempt), attempt=attempt)
        if self.rng.random() < 0.1:
            self.control.die(self.now, position, DeathReason.ENVIRONMENT, tokens=0)
        else:
            self.control.finish(self.now, position, tokens=1, rewards=[0.0] * MEMBERS)

    def train(self, positions: list[int]) -> None:
        groups = self.pool.batch(positions)
        assert [[m.position for m in group] for group in groups] == [[p] * MEMBERS for p in positions]
        self.trained += positions
        step = self.control.views.step + 1
        where = checkpoint.Position(step=step, version=step, positions=tuple(positions))
        checkpoint.write(self.folder / "checkpoints", where, self.save)
        self.control.commit(self.now, train_s=0.0, data_s=0.0, io_s=0.0, tokens=1, metrics={})
        self.control.publish(self.now, version=step, step=step, items=len(self.control.queue.committed))

    def save(self, folder: Path) -> None:
        (folder / "model.json").write_text(json.dumps(self.trained))


def main() -> None:
    folder, items, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    path = folder / "trace.jsonl"
    if path.exists():
        ev.cut_torn_tail(path)
    life = Life(folder, items, seed)
    if not path.read_bytes():
        life.trace(ev.RunStarted(t=0.0, schema=ev.SCHEMA, world="live", scenario="kill", seed=seed))
    life.now = max(event.t for event in ev.read(path))
    life.begin()
    life.run()
    print("done", flush=True)
    life.trace.close()
    life.pool.close()


if __name__ == "__main__":
    main()
