"""What pages share: the sentence that opens each, errors, controls as widgets, charts with what to look for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import streamlit as st

from dashboards import charts
from dashboards.controls import Control, Value
from dashboards.frames import Frame
from forge.types import ForgeError

STYLE = "<style>[data-testid=stMainBlockContainer]{padding-top:2.5rem}</style>"
RUNS = "FORGE_RUNS"  # environment: where run folders are kept


def runs_root() -> Path:
    return Path(os.environ.get(RUNS, "runs"))


def opening(title: str, look_for: str) -> None:
    """`look_for`: one sentence."""
    html(STYLE)
    st.header(title, anchor=False)
    st.caption(look_for)


def complain(error: Exception, about: str = "") -> None:
    """A user's error in its own words, a line a fault."""
    prefix = f"**{about}**  \n" if about else ""
    lines = str(error).splitlines()
    shown = lines[:8] + ([f"and {len(lines) - 8} more"] if len(lines) > 8 else [])
    st.error(prefix + "  \n".join(_literal(line) for line in shown))


def _literal(text: str) -> str:
    """Markdown would read keys and values as emphasis, math or links."""
    for sign in "\\`*_[]$<>~#|":
        text = text.replace(sign, "\\" + sign)
    return text


@contextmanager
def told(about: str = "") -> Iterator[None]:
    """A user's error within is shown, and what follows on the page still is."""
    try:
        yield
    except ForgeError as error:
        complain(error, about)


def widget(control: Control, value: Value, key: str) -> Value:
    """A control with this value to begin with; returns what it is set to."""
    label, tip = control.label, control.help or None
    match control.kind:
        case "choice":
            index = control.choices.index(str(value)) if str(value) in control.choices else 0
            chosen: Value = st.selectbox(label, control.choices, index, key=key, help=tip)
        case "yes_no":
            chosen = st.checkbox(label, bool(value), key=key, help=tip)
        case "whole":
            begin = None if value is None else int(value)
            least = None if control.low is None else int(control.low)
            chosen = st.number_input(label, value=begin, min_value=least, step=1, key=key, help=tip)
        case "number":
            begin_at = None if value is None else float(value)
            step = float(control.step)
            chosen = st.number_input(
                label, value=begin_at, min_value=control.low, step=step, format="%g", key=key, help=tip
            )
        case _:
            chosen = st.text_input(label, "" if value is None else str(value), key=key, help=tip)
    return chosen


def widgets(controls: list[tuple[Control, Value]], key: str, columns: int) -> dict[str, Value]:
    """Controls in a grid; what they are set to by their paths. Fields left empty are None."""
    found: dict[str, Value] = {}
    for first in range(0, len(controls), columns):
        row = st.columns(columns, vertical_alignment="bottom")
        for place, (control, value) in zip(row, controls[first : first + columns], strict=False):
            with place:
                found[control.path] = widget(control, value, f"{key}:{control.path}")
    return found


def chart(drawn: Any, look_for: str, *frames: Frame) -> None:
    """A chart, the sentence that says what to look for, and what was left out."""
    show(drawn)
    notes = " ".join(dict.fromkeys(frame.note for frame in frames if frame.note))
    st.caption(f"{look_for} {notes}" if notes else look_for)


def show(drawn: Any) -> None:
    st.altair_chart(charts.fitted(drawn), width="stretch")


def html(text: str) -> None:
    st.markdown(text, unsafe_allow_html=True)
