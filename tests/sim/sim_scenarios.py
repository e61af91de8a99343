"""Scenarios of the simulator's tests, and strategies that make many."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st

from forge.policies.sync import SyncMode
from forge.scenario import Scenario, parse


def heavy_tail(items: int = 100, **queue: Any) -> Scenario:
    """Slow tools with a heavy tail, more admitted items than running ones: where the window matters."""
    return build(
        {"n": 12, "batch": 4, "concurrency": 8, "group": 2, "item_timeout_s": 1000.0, **queue},
        tool_wait={"median_s": 0.3, "sigma": 2.0, "cap_s": 30.0},
        sim={"train_step_s": 0.4, "domains": {"agent": {"turns": [0.2, 0.3, 0.3, 0.2]}}},
        items=items,
    )


def build(
    queue: dict[str, Any],
    *,
    policy: dict[str, Any] | None = None,
    tool_wait: dict[str, float] | None = None,
    sim: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    items: int = 40,
    seed: int = 0,
) -> Scenario:
    domains = [{"name": "agent", "weight": 2.0, "tool_wait": tool_wait or {}}, {"name": "reasoning"}]
    return parse(
        {
            "name": "test",
            "seed": seed,
            "stop": {"items": items},
            "queue": queue,
            "policy": policy or {},
            "domains": domains,
            "engine": {"slots": 8, **(engine or {})},
            "sim": sim or {},
        },
        "test",
    )


def with_scheduler(scenario: Scenario, kind: str, **config: Any) -> Scenario:
    data = scenario.model_dump(mode="json")
    data["policy"] = {"scheduler": {"kind": kind, **config}}
    return parse(data, "test")


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small runs over the whole space: every scheduler and sync mode, deaths, timeouts, crashes, any stop."""
    batch, k = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    n = draw(st.integers(k * batch, k * batch + 8))
    kinds: list[dict[str, Any]] = [{"kind": kind} for kind in ("strict_fifo", "greedy", "fffo")]
    kinds += [{"kind": "windowed_fifo", "fraction": f} for f in (0.1, 0.3, 0.7)]
    kinds += [{"kind": "adaptive_window", "lag_budget": draw(st.integers(n, 2 * n))}]
    if n > k * batch:
        escape = {"park_items": draw(st.integers(1, n - k * batch)), "park_reach": draw(st.integers(1, 9))}
        kinds += 2 * [{"kind": "windowed_fifo", **escape, "park_after_s": draw(st.sampled_from([0.0, 0.4, 3.0]))}]
    policy = {
        "scheduler": draw(st.sampled_from(kinds)),
        "router": {"kind": draw(st.sampled_from(["round_robin", "least_loaded"]))},
        "sync": {"k": k, "mode": draw(st.sampled_from(get_args(SyncMode)))},
    }
    queue = {
        "n": n,
        "batch": batch,
        "concurrency": draw(st.integers(1, n)),
        "group": draw(st.integers(1, 3)),
        "item_timeout_s": draw(st.sampled_from([1.0, 5.0, 100.0])),
    }
    sim = {
        "instance_mtbf_s": draw(st.sampled_from([None, 0.5, 3.0])),
        "instance_repair_s": draw(st.sampled_from([0.0, 1.0])),
        "load_s": draw(st.sampled_from([0.0, 0.3])),
        "domains": {"agent": {"death_rate": draw(st.sampled_from([0.0, 0.4])), "item_share": draw(st.floats(0, 1))}},
    }
    return build(
        queue,
        policy=policy,
        tool_wait={"median_s": draw(st.sampled_from([0.0, 0.2])), "sigma": 1.5, "cap_s": 20.0},
        sim=sim,
        engine={"instances": draw(st.integers(1, 3)), "slots": draw(st.integers(1, 4))},
        items=draw(st.integers(1, 30)),
        seed=draw(st.integers(0, 2**32)),
    )
