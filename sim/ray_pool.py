"""Tuning's runs on a Ray cluster. Its nodes need this version of Forge, with the `ray` extra."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from forge.types import ForgeError
from sim.sweep import Result, Run, Task, run_task


@contextmanager
def on_ray(address: str) -> Iterator[Run]:
    """Every task on one core of the cluster. Raises ForgeError without ray, and where no cluster answers."""
    try:
        import ray
    except ImportError:
        raise ForgeError("--ray: needs ray, here and on the nodes: pip install 'forge-rl[ray]'") from None
    try:
        ray.init(address=None if address == "local" else address, logging_level=logging.ERROR, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ForgeError(
            f"--ray {address}: no cluster there: {str(error).splitlines()[0]}; start one with `ray start --head`, or "
            f"give --ray local"
        ) from None
    remote = ray.remote(num_cpus=1)(run_task)

    def run(tasks: Sequence[Task]) -> Iterator[Result]:
        waiting = [remote.remote(task) for task in tasks]
        while waiting:
            done, waiting = ray.wait(waiting)
            yield from ray.get(done)

    try:
        yield run
    finally:
        ray.shutdown()
