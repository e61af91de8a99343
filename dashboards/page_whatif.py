"""What-if: a scenario under two policies, simulated at once, side by side."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass

import streamlit as st

from dashboards import controls, pictures, uploads, whatif
from dashboards.controls import Control, Value
from dashboards.ui import complain, opening, told, widget, widgets
from forge import scenario as scenarios
from forge.scenario import Scenario, parse, resolved
from forge.slips import slips
from forge.types import ForgeError

SIDES = ("A", "B")
UPLOADED = "an uploaded file"
CONTRAST = {"windowed_fifo": "greedy"}  # B begins with another scheduler than A, so that there is something to see
_ONE = threading.Lock()  # simulations of all tabs take turns: together they would all be late


@st.cache_resource(max_entries=24, show_spinner=False)
def _answer(text: str) -> whatif.Answer:
    with _ONE:
        return whatif.ask(parse(json.loads(text), "scenario"))


@dataclass(frozen=True, slots=True)
class Side:
    """A policy as the page has it. `scenario` None: what is set is no scenario."""

    name: str
    changes: dict[str, Value]
    scenario: Scenario | None


def page() -> None:
    opening(
        "What-if",
        "Look at the last column: by how much policy B differs from A on the very same simulated work, one seed each, "
        "so small differences are chance.",
    )
    base, items = _chosen()
    if base is None:
        return
    sides = [_side(place, name, base) for place, name in zip(st.columns(2), SIDES, strict=True)]
    answers: dict[str, whatif.Answer] = {}
    note = ""
    with st.spinner("Simulating…"):
        for side in sides:
            if side.scenario is None:
                continue
            shorter, note = whatif.shortened(side.scenario, items)
            with told(f"Policy {side.name}"):
                answers[side.name] = _answer(json.dumps(resolved(shorter)))
    if answers:
        seconds = sum(answer.seconds for answer in answers.values())
        st.info(f"{note} Simulating took {seconds:.2f} s.".strip())
        _show({f"policy {name}": answer for name, answer in answers.items()})


def _show(answers: dict[str, whatif.Answer]) -> None:
    pictures.sections({name: answer.records for name, answer in answers.items()}, "whatif-range")


# --- the scenario ------


def _chosen() -> tuple[Scenario | None, int]:
    """The scenario, and how many items of it to simulate."""
    with st.sidebar:
        name = st.selectbox("Scenario", [*uploads.shipped(), UPLOADED], key="scenario")
        if name == UPLOADED:
            file = st.file_uploader("A scenario in TOML", key="scenario-file")
            data = None if file is None else (file.getvalue(), file.name)
        else:
            data = None
            st.caption(uploads.opening(name))
        items = int(
            st.number_input(
                "Items to simulate at most",
                min_value=1,
                value=whatif.ITEMS,
                step=40,
                key="items",
                help="More of them say more, and take longer.",
            )
        )
    if name == UPLOADED and data is None:
        st.info("Upload a scenario on the left: a TOML file such as `scenarios/quickstart.toml`.")
        return None, items
    try:
        loaded = scenarios.load(name, tuning=True) if data is None else uploads.scenario_from(*data)
    except ForgeError as error:
        complain(error)
        return None, items
    with st.sidebar:
        seed = int(st.number_input("Seed", min_value=0, value=loaded.seed, step=1, key=f"{loaded.name}:seed"))
    return loaded.model_copy(update={"seed": seed}), items


# --- a policy ------


def _side(place: st.delta_generator.DeltaGenerator, name: str, base: Scenario) -> Side:
    with place, st.container(border=True):
        st.markdown(f"**Policy {name}**")
        asked = _changes(name, base)
        everything = [*controls.queue_controls(), *controls.fleet_controls(base)]
        changes = controls.changed(base, asked, everything)
        try:
            made = controls.applied(base, changes, f"policy {name}")
            text = controls.policy_file(made, changes, f"policy {name} of the dashboard, scenario {base.name}")
        except ForgeError as error:
            complain(error)
            return Side(name, changes, None)
        for line in slips(made):
            st.warning(line)
        st.download_button(
            f"Download policy.toml of {name}", text, "policy.toml", "application/toml", key=f"download-{name}"
        )
    return Side(name, changes, made)


def _changes(name: str, base: Scenario) -> dict[str, Value]:
    """What the controls of one side say."""
    key = f"{name}:{base.name}"
    asked = _policy("scheduler", base, key, CONTRAST if name == "B" else {})
    asked |= widgets([(one, controls.value_of(base, one)) for one in controls.queue_controls()], key, 2)
    with st.expander("Fleet, router, weight sync and the rest"):
        fleet = controls.fleet_controls(base)
        asked |= widgets([(one, controls.value_of(base, one)) for one in fleet], key, 3)
        for slot in controls.slots_for(base):
            asked |= _policy(slot, base, key, {})
    return asked


def _policy(slot: str, base: Scenario, key: str, instead: dict[str, str]) -> dict[str, Value]:
    """The kind of a slot's policy, and the fields that this kind has."""
    of = controls.kind_control(slot)
    held = str(controls.value_of(base, of))
    kind = str(widget(of, instead.get(held, held), f"{key}:{of.path}")) if len(of.choices) > 1 else held
    fields = controls.fields_controls(slot, kind)
    values: list[tuple[Control, Value]] = [
        (one, controls.value_of(base, one) if kind == held else one.default) for one in fields
    ]
    return {of.path: kind, **widgets(values, f"{key}:{kind}", 2 if len(values) % 3 == 1 else 3)}
