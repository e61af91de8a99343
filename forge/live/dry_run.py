"""What `forge run` would start, process by process, and what of it this machine lacks. Starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from forge.blackbox.recipe import folders_of, load
from forge.models import check_context, resolve
from forge.rollout.vllm.command import LOOPBACK, check_environment, host_of, launch
from forge.scenario import Scenario
from forge.types import ForgeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """`command`: as one would type it, or what a child of this process runs. `port`: 0 is any free one, None none."""

    name: str
    host: str
    command: str
    port: int | None = None


def processes(scenario: Scenario, folder: Path) -> list[Process]:
    """Of a run in `folder`, in the order they start."""
    live = scenario.live
    here = "this"
    agents = [f"{one.name} by {one.agent}" if one.agent else one.name for one in scenario.domains]
    return [
        Process(name="run", host=here, command="forge run: queue, policies, data pool, trace, gateway", port=live.port),
        Process(name="agents", host=here, command=f"child: {', '.join(agents)}"),
        *_trainer(scenario, here),
        *_engines(scenario, here, folder),
    ]


def lacking(scenario: Scenario) -> list[str]:
    """What this machine would need for it, one line each. Hosts of instances are not asked."""
    return [str(error) for error in map(_fault, _needs(scenario)) if error is not None]


def _needs(scenario: Scenario) -> Iterator[Callable[[], object]]:
    yield lambda: check_context(resolve(scenario.model.path), scenario.engine.max_context, "engine.max_context")
    for recipe in filter(None, (one.agent for one in scenario.domains)):
        yield partial(_check_recipe, recipe)
    if scenario.engine.kind == "vllm":
        yield lambda: check_environment(scenario)
    if scenario.train.device == "cuda" or (scenario.engine.kind == "vllm" and scenario.engine.vllm.gpus):
        yield lambda: _check_gpus(scenario)


def _fault(check: Callable[[], object]) -> ForgeError | None:
    try:
        check()
    except ForgeError as error:
        return error
    return None


def _check_recipe(name: str) -> None:
    """Raises ForgeError where its program or its folders are not there."""
    folders_of(load(name))


def _check_gpus(scenario: Scenario) -> None:
    """Raises ForgeError where this machine has fewer GPUs than its trainer and its own instances take."""
    found = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    vllm, train = scenario.engine.vllm, scenario.train
    wanted = train.ranks if train.engine == "deepspeed" else int(train.device == "cuda")
    if vllm.gpus and not vllm.hosts:
        wanted = max(wanted, vllm.first_gpu + vllm.gpus * scenario.engine.instances)
    if found < wanted:
        raise ForgeError(f"GPUs: {wanted} are needed on this machine, {found} found")


def _trainer(scenario: Scenario, here: str) -> Iterator[Process]:
    train = scenario.train
    if train.engine != "deepspeed":
        yield Process(name="trainer", host=here, command=f"child: {train.engine} on {train.device}")
    else:
        yield Process(name="trainer", host=here, command=f"child: deepspeed, asks {train.ranks} ranks")
        command = f"{sys.executable} -m forge.train.zero.launch PID FOLDER {train.ranks}"
        yield Process(name=f"ranks 0-{train.ranks - 1}", host=here, command=f"{command}   # ZeRO stage {train.zero}")


def _engines(scenario: Scenario, here: str, folder: Path) -> Iterator[Process]:
    engine = scenario.engine
    for index in range(engine.instances):
        yield Process(name=f"engine-{index}", host=here, command=f"child: {engine.kind}, {engine.slots} slots")
        if engine.kind == "vllm":
            host, port = host_of(scenario, index), engine.vllm.port + index if engine.vllm.port else 0
            scratch = folder.absolute() / f"engine-{index}"
            command = launch(scenario, index, scratch / "weights" / Path(scenario.model.path).name, port, scratch)
            yield Process(
                name=f"vllm-{index}", host=here if host == LOOPBACK else host, command=command.shell(), port=port
            )
