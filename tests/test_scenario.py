"""Scenario files: what is wrong is one clear line with the key's path; what is right reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.scenario import Scenario, apply_setting, load, parse, policy_toml, read_toml, resolved, scenarios_dir
from forge.sections import Stop
from forge.slips import slips
from forge.types import ForgeError

ONE_DRAFT = {"deployment": {"model": "qwen3_8b", "hardware": "h100_sxm"}, "speculation": {"acceptance": [0.5]}}

GOOD_TABLES = {"name": "x", "stop": {"items": 5}, "domains": [{"name": "a"}]}
GOOD = 'name = "x"\nstop = { items = 5 }\ndomains = [{ name = "a" }]\n'


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.toml"
    path.write_text(GOOD)
    return path


def base(**over: Any) -> dict[str, Any]:
    return {"name": "x", "stop": {"items": 5}, "domains": [{"name": "a"}]} | over


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"colour": 1}, "src: colour: unknown key"),
        ({"queue": {"nn": 1}}, "src: queue.nn: unknown key"),
        ({"policy": {"scheduler": {"kind": "greedy", "fraction": 0.5}}}, "policy.scheduler.fraction: unknown key"),
        ({"policy": {"planner": {}}}, "policy.planner: unknown key"),
        ({"queue": {"n": "many"}}, "queue.n = 'many':"),
        ({"queue": {"n": 2.5}}, "queue.n = 2.5:"),
        ({"queue": {"n": 0}}, "queue.n = 0:"),
        ({"stop": {}}, "stop: give at least one of seconds, steps, items"),
        ({"stop": {"items": 0}}, "stop.items = 0:"),
        ({"domains": []}, "domains"),
        ({"domains": [{"name": "a", "weight": -1}]}, "domains.0.weight = -1:"),
        ({"domains": [{"name": "a"}, {"name": "a"}]}, "a name appears twice"),
        ({"queue": {"n": 4, "batch": 8, "concurrency": 4}}, "queue would deadlock"),
        ({"policy": {"sync": {"k": 5}}}, "queue would deadlock"),
        ({"policy": {"sync": {"k": 0}}}, "k = 0: must be at least 1"),
        ({"policy": {"sync": {"mode": "never"}}}, "policy.sync.mode = 'never':"),
        ({"queue": {"n": 8, "concurrency": 9}}, "concurrency = 9 must not exceed n = 8"),
        ({"policy": {"scheduler": {"kind": "windowed_fifo", "fraction": 1.5}}}, "fraction = 1.5: must lie in (0, 1]"),
        ({"policy": {"scheduler": {"kind": "windowed_fifo", "fraction": 0}}}, "fraction = 0: must lie in (0, 1]"),
        ({"policy": {"scheduler": {"kind": "best"}}}, "policy.scheduler"),
        ({"sim": {"domains": {"a": {"turns": []}}}}, "sim.domains.a.turns"),
        ({"sim": {"domains": {"b": {}}}}, "sim.domains.b: no domain of the mix has that name; there are ['a']"),
        ({"stop": {"seconds": float("inf")}}, "stop.seconds = inf: must be a finite number"),
        ({"sim": {"step_s": float("nan")}}, "sim.step_s = nan: must be a finite number"),
        (
            {"policy": {"scheduler": {"kind": "windowed_fifo", "fraction": float("nan")}}},
            "fraction = nan: must be",
        ),
        ({"live": {"max_turns": 3}}, "live.max_turns: unknown key"),
        (
            {"sim": {"signals": {"period_s": 0.001}}},
            "sim.signals.period_s = 0.001: iterations of most deployments take longer, so such reports bring no news "
            "and take long to simulate; give at least 0.01",
        ),
    ],
)
def test_a_fault_is_one_line_with_its_path(over: dict[str, Any], message: str) -> None:
    with pytest.raises(ForgeError) as error:
        parse(base(**over), "src")
    lines = str(error.value).splitlines()
    assert all(line.startswith("src: ") for line in lines)
    assert message in str(error.value)


SCHEDULERS = "one of 'strict_fifo', 'greedy', 'fffo', 'windowed_fifo', 'adaptive_window'"
PROCESSORS = "one of 'survivors', 'drop_zero_variance', 'max_tokens', 'chain'"


@pytest.mark.parametrize(
    ("over", "line"),
    [
        ({"policy": {"scheduler": {"kind": "magic"}}}, f"policy.scheduler.kind = 'magic': must be {SCHEDULERS}"),
        ({"policy": {"scheduler": {"fraction": 2}}}, "policy.scheduler.fraction = 2: must lie in (0, 1]"),
        ({"policy": {"dispatch": {"refuse_above": -1}}}, "policy.dispatch.refuse_above = -1: must be at least 0"),
        ({"policy": {"scheduler": [1]}}, f"policy.scheduler = [1]: must be a table, whose kind is {SCHEDULERS}"),
        (
            {"policy": {"scheduler": {"kind": "windowed_fifo", "fraction": "x"}}},
            "policy.scheduler.fraction = 'x': must be a valid number",
        ),
        ({"policy": {"sync": {"kind": "never"}}}, "policy.sync.kind = 'never': must be 'every_k'"),
        ({"train": {"process": {"kind": "z"}}}, f"train.process.kind = 'z': must be {PROCESSORS}"),
        (
            {"train": {"process": {"kind": "chain", "steps": [{"kind": "z"}]}}},
            f"train.process.steps.0.kind = 'z': must be {PROCESSORS}",
        ),
        ({"train": {"process": {"kind": "max_tokens"}}}, "train.process.limit: missing; add it"),
        (
            {"train": {"batches": "auto"}},
            "train.batches = 'auto': must be a table, whose kind is one of 'by_items', 'by_tokens'",
        ),
        (
            {"policy": {"placement": {"kind": "apart"}}},
            "policy.placement.kind = 'apart': must be one of 'aggregated', 'disaggregated', 'conditional', "
            "'least_delay'",
        ),
        (
            {"policy": {"speculation": {"kind": "fixed", "tokens": 0}}},
            "policy.speculation.tokens = 0: must be at least 1; kind = 'off' drafts none",
        ),
        (
            {"sim": {"speculation": {"acceptance": [0.5, 2.0]}}},
            "sim.speculation.acceptance.1 = 2.0: must be less than or equal to 1",
        ),
        ({"policy": {"sync": {"k": 0}}}, "policy.sync.k = 0: must be at least 1"),
        (
            {"policy": {"speculation": {"kind": "fixed"}}, "sim": ONE_DRAFT},
            "policy.speculation.tokens = 3: sim.speculation says how 1 are accepted; lower it, or give acceptance "
            "(most) for more",
        ),
        ({"sim": [1]}, "sim = [1]: must be a table"),
        ({"domains": [3]}, "domains.0 = 3: must be a table"),
        ({"domains": {"name": "a"}}, "domains: must be a list, not a table"),
        ({"domains": []}, "domains = []: must have 1 or more elements"),
        ({"queue": ["x" * 99]}, f"queue = ['{'x' * 55}...: must be a table"),
    ],
)
def test_a_fault_among_several_types_is_one_line_with_the_choices(over: dict[str, Any], line: str) -> None:
    with pytest.raises(ForgeError) as error:
        parse(base(**over), "src")
    assert str(error.value) == f"src: {line}"


SECONDS = [
    *(f"sim.{key}_s" for key in ("step", "request_cpu", "request_latency", "data", "train_step", "save", "load")),
    *(f"sim.{key}_s" for key in ("row", "prefill_token", "train_token", "instance_mtbf", "instance_repair")),
    *("sim.signals.period_s", "sim.signals.delay_s", "stop.seconds", "queue.item_timeout_s"),
    *("sim.agents.a.failures.timeout_s", "sim.agents.a.tool_wait.cap"),
]


@pytest.mark.parametrize("key", SECONDS)
def test_times_too_long_to_simulate_are_refused_with_their_key(key: str) -> None:
    data = base(engine={"max_context": 200_000}, sim={"agents": {"a": {"tool_wait": {"median": 1.0}}}})
    apply_setting(data, f"{key}=1e13")
    with pytest.raises(ForgeError) as error:
        parse(data, "src")
    assert f"src: {key} = 10000000000000.0: must be less than 1" in str(error.value)


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(ForgeError) as error:
        parse({"colour": 1, "stop": {"items": 5}, "domains": [{"name": "a"}], "queue": {"n": "x"}}, "src")
    assert len(str(error.value).splitlines()) == 3  # colour, name missing, queue.n
    assert "name: missing" in str(error.value)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="no such scenario file; scenarios that ship"):
        load(tmp_path / "none.toml")
    with pytest.raises(ForgeError, match="no such file"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ForgeError, match="is a folder"):
        read_toml(tmp_path)
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(ForgeError, match="not valid TOML"):
        load(tmp_path / "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ForgeError, match="not a text file"):
        load(tmp_path / "binary.toml")


def test_settings_go_over_the_file(good: Path) -> None:
    given_sets = ["queue.n=16", "queue.batch=4", "seed=7", "policy.scheduler.kind=greedy", "model.path=some/where"]
    scenario = load(good, given_sets)
    assert (scenario.queue.n, scenario.queue.batch, scenario.seed) == (16, 4, 7)
    assert scenario.policy.scheduler.kind == "greedy"
    assert scenario.model.path == "some/where"


def test_another_kind_drops_the_old_ones_keys(good: Path) -> None:
    sets = ["policy.scheduler.kind=windowed_fifo", "policy.scheduler.fraction=0.5", "policy.scheduler.kind=strict_fifo"]
    assert load(good, sets).policy.scheduler.kind == "strict_fifo"
    assert load(good, sets[:2]).shape().window == 16


def test_a_kind_whose_other_keys_stay_the_same_keeps_them(good: Path) -> None:
    engine = load(good, ["engine.slots=3", "engine.kind=fake"]).engine
    assert (engine.kind, engine.slots) == ("fake", 3)
    batches = ["train.batches.kind=by_items", "train.batches.items=3", "train.batches.kind=by_tokens"]
    found = load(good, batches).train.batches
    assert found is not None
    assert found.kind == "by_tokens"


def test_more_lag_than_the_budget_is_refused_except_to_tune(good: Path) -> None:
    sets = ["policy.scheduler.kind=greedy", "queue.lag_budget=61"]
    with pytest.raises(ForgeError, match=r"queue\.lag_budget = 61: N \+ W - 2 = 62 items of lag are possible"):
        load(good, sets)
    assert load(good, sets, tuning=True).queue.lag_budget == 61
    assert load(good, [sets[0], "queue.lag_budget=62"]).queue.lag_budget == 62
    with pytest.raises(ForgeError, match="fffo has no window, so no bound"):
        load(good, ["policy.scheduler.kind=fffo", sets[1]])


def test_a_stop_is_reached_by_the_first_of_its_numbers() -> None:
    stop = Stop(seconds=2.0, items=5)
    assert [stop.reached(*at) for at in ((1.9, 99, 4), (2.0, 0, 0), (0.0, 0, 5))] == [False, True, True]
    assert Stop(steps=1).reached(0.0, 1, 0)


@pytest.mark.parametrize("setting", ["queue.n", "=3", "queue..n=3", ".=1"])
def test_a_malformed_setting_shows_how_to_write_one(good: Path, setting: str) -> None:
    with pytest.raises(ForgeError, match=r"write key\.path=value"):
        load(good, [setting])


def test_a_setting_below_a_value_is_refused(good: Path) -> None:
    with pytest.raises(ForgeError, match="name is not a table"):
        load(good, ["name.first=1"])
    with pytest.raises(ForgeError, match=r"queue\.nn: unknown key"):
        load(good, ["queue.nn=1"])


@given(st.integers(-5, 5) | st.booleans() | st.floats(-2, 2) | st.sampled_from(["greedy", "a b", "runs/x.toml"]))
def test_a_value_is_toml_or_a_bare_word(value: object) -> None:
    data: dict[str, Any] = {}
    text = str(value).lower() if isinstance(value, bool) else str(value)
    apply_setting(data, f"a.b={text}")
    assert data == {"a": {"b": value}}


def test_a_policy_file_replaces_policies_and_its_queue_numbers(good: Path, tmp_path: Path) -> None:
    tuned = parse(base(policy={"scheduler": {"kind": "windowed_fifo", "fraction": 0.5}}), "t").policy
    path = tmp_path / "policy.toml"
    path.write_text(policy_toml(tuned, {"queue": {"n": 20, "concurrency": 10}}, comment="tuned\nby a test"))
    assert path.read_text().startswith("# tuned\n# by a test\n")
    scenario = load(good, policy=path)
    assert (scenario.queue.n, scenario.queue.concurrency, scenario.shape().window) == (20, 10, 10)
    with pytest.raises(ForgeError, match="no such file"):
        load(good, policy=tmp_path / "none.toml")
    path.write_text("queue = 3\n")
    with pytest.raises(ForgeError, match=r"policy\.toml: queue = 3: must be a table"):
        load(good, policy=path)


def test_resolved_reads_back_equal() -> None:
    scenario = parse(base(policy={"router": {"kind": "round_robin"}}, sim={"domains": {"a": {"reward": 0.7}}}), "src")
    assert parse(resolved(scenario), "again") == scenario


@pytest.mark.parametrize("path", sorted(scenarios_dir().glob("*.toml")), ids=lambda p: p.stem)
def test_scenarios_that_ship_load_by_name_and_open_with_their_question(path: Path) -> None:
    assert load(path.stem).name == path.stem
    opening = path.read_text().split("\n\n")[0].split("name =")[0]
    assert opening.startswith("#")
    assert "?" in opening


def budgeted(scheduler: str, budget: int, concurrency: int = 4) -> Scenario:
    queue = {"n_from_lag_budget": True, "lag_budget": budget, "concurrency": concurrency, "batch": 2}
    data = {"name": "x", "stop": {"items": 5}, "domains": [{"name": "a"}], "queue": queue}
    return parse({**data, "policy": {"scheduler": {"kind": scheduler}}}, "x")


@pytest.mark.parametrize(("scheduler", "budget", "n"), [("strict_fifo", 30, 31), ("greedy", 31, 16)])
def test_n_follows_from_a_lag_budget(scheduler: str, budget: int, n: int) -> None:
    found = budgeted(scheduler, budget)
    assert found.queue.n == n
    assert (found.shape().lag_items_bound or 0) <= budget
    found.check_lag_budget()
    assert parse(resolved(found), "again") == found
    windowed = budgeted("windowed_fifo", budget)
    assert windowed.queue.n == budget + 2 - windowed.policy.scheduler.window(windowed.queue.n), "N = L - W + 2"


def test_an_n_that_no_budget_gives_is_refused() -> None:
    with pytest.raises(ForgeError, match=r"queue\.concurrency = 17: must not exceed n = 16"):
        budgeted("greedy", 30, 17)
    for kind in ("fffo", "adaptive_window"):
        with pytest.raises(ForgeError, match=f"{kind} has no window that follows from N; give queue"):
            budgeted(kind, 30)
    with pytest.raises(ForgeError, match="needs lag_budget; add it"):
        parse({**GOOD_TABLES, "queue": {"n_from_lag_budget": True}}, "x")


def test_an_escape_that_would_deadlock_is_refused_with_its_keys() -> None:
    parks = {"kind": "windowed_fifo", "park_items": 3, "park_reach": 5}
    queue = {"n": 8, "batch": 3, "concurrency": 4}
    data = {**GOOD_TABLES, "queue": queue, "policy": {"scheduler": parks, "sync": {"k": 2}}}
    with pytest.raises(ForgeError, match=r"= 6 > queue\.n = 8 - policy\.scheduler\.park_items = 3"):
        parse(data, "x")
    small = parse({**data, "policy": {"scheduler": parks}}, "x")
    assert small.shape().lag_items_bound == 8 + 2 - 2 + 5
    tight = small.model_copy(update={"queue": small.queue.model_copy(update={"lag_budget": 12})})
    with pytest.raises(ForgeError, match=r"N \+ W - 2 \+ park_reach = 13 items of lag are possible"):
        tight.check_lag_budget()


def test_policies_without_anything_to_decide_on_are_told() -> None:
    """A warning each; none of the defaults, and none where the world has what they ask for."""
    idle = {
        "speculation": ({"kind": "fixed"}, "sim.speculation"),
        "placement": ({"kind": "disaggregated"}, "sim.deployment.prefill"),
        "kv": ({"kind": "comes_back"}, "sim.agents"),
        "router": ({"kind": "cache_aware"}, "sim.signals"),
    }
    assert slips(load("quickstart")) == []
    for slot, (policy, key) in idle.items():
        (line,) = slips(load("quickstart", [f"policy.{slot}.kind={policy['kind']}"]))
        assert line.startswith(f"policy.{slot}.kind = '{policy['kind']}': there is no {key}")
    assert slips(load("campaign_m25", ["policy.kv.kind=comes_back"])) == []
