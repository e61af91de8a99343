"""Scenarios of synthetic agents on accelerators, small enough for tests: everything that can happen happens often."""

from __future__ import annotations

from typing import Any

from forge.scenario import Scenario, parse

AGENT: dict[str, Any] = {
    "calls": {"median": 6, "sigma": 0.8, "cap": 16},
    "system_tokens": 700,
    "task_tokens": {"median": 200, "sigma": 1.0, "cap": 2000},
    "output_tokens": {"median": 150, "sigma": 1.0, "tail_share": 0.1, "cap": 3000},
    "result_tokens": {"median": 200, "sigma": 1.0, "cap": 2000},
    "tool_wait": {"median": 2.0, "sigma": 1.5, "tail_share": 0.1, "tail_index": 1.0, "cap": 500},
    "sub_agents": {
        "rate": 0.15,
        "most": 3,
        "calls": {"median": 2, "cap": 5},
        "system_tokens": 300,
        "task_tokens": 90,
    },
    "context": {"limit_tokens": 9000, "reserve_tokens": 900, "summary_tokens": 300},
    "failures": {"crash": 0.05, "hang": 0.03, "timeout_s": 60.0, "kills": 0.3},
}
CODER = AGENT | {"system_tokens": 1500, "calls": {"median": 3, "sigma": 0.5, "cap": 8}, "item_share": 0.6}


def agents(
    *,
    items: int = 40,
    seed: int = 0,
    instances: int = 3,
    deployment: dict[str, Any] | None = None,
    agent: dict[str, Any] | None = None,
    **over: dict[str, Any],
) -> Scenario:
    """qwen3_8b on an H100 each, with little memory. `over` puts keys over those of queue, policy, engine, sim and
    train."""
    small = {"model": "qwen3_8b", "hardware": "h100_sxm", "budget": 2048, "kv_tokens": 40_000}
    tables: dict[str, dict[str, Any]] = {
        "queue": {"n": 16, "batch": 4, "concurrency": 12, "group": 4, "item_timeout_s": 900.0},
        "policy": {"router": {"kind": "cache_aware"}, "scheduler": {"kind": "windowed_fifo", "fraction": 0.5}},
        "engine": {"instances": instances, "slots": 32, "max_context": 9000},
        "train": {},
        "sim": {
            "deployment": small | (deployment or {}),
            "signals": {"period_s": 0.5, "delay_s": 0.1},
            "train_step_s": 2.0,
            "train_token_s": 2e-5,
            "load_s": 1.0,
            "agents": {"agent": AGENT | (agent or {}), "coder": CODER | (agent or {})},
        },
    }
    for name, table in over.items():
        tables[name] = tables[name] | table
    return parse(
        {
            "name": "agents",
            "seed": seed,
            "stop": {"items": items},
            "domains": [{"name": "agent", "weight": 2.0}, {"name": "coder"}],
            **tables,
        },
        "test",
    )
