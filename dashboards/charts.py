"""Charts of the pages, one function each from a frame to an Altair chart, in the colours of the reports."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from dashboards.frames import Frame, QueueWindow
from forge.report.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, RED
from forge.report.plots import STATE_COLOURS, STATE_LABELS

PAIR = [BLUE, ORANGE]  # the first run, the second
SECONDS = "seconds of the run"
EDGES = ["head", "end of the window"]
INK, FAINT = "#333333", "#E6E6E6"


def _theme() -> alt.theme.ThemeConfig:
    axis = {"labelColor": INK, "titleColor": INK, "titleFontWeight": "normal", "gridColor": FAINT, "labelFontSize": 12}
    legend = {
        "labelColor": INK,
        "title": None,
        "orient": "bottom",
        "labelFontSize": 12,
        "labelLimit": 300,
        "columns": 2,
    }
    title = {"anchor": "start", "fontSize": 14, "color": INK}
    return {"config": {"axis": axis, "legend": legend, "title": title, "view": {"stroke": None}}}


alt.theme.register("forge", enable=True)(_theme)


def fitted(drawn: alt.Chart) -> alt.Chart:
    """As wide as its place; heights are of the plot alone, so that axes and legends take nothing from it."""
    return drawn.properties(autosize=alt.AutoSizeParams(type="fit-x", contains="padding"))


def _data(frame: Frame) -> pd.DataFrame:
    return pd.DataFrame(frame.columns)


def _colours(field: str, domain: list[str], colours: list[str]) -> alt.Color:
    return alt.Color(f"{field}:N", scale=alt.Scale(domain=domain, range=colours), title=None)


def _runs(frame: Frame, otherwise: str = BLUE) -> Any:
    """By the column `run`, in the order given; where there is none, of one colour."""
    if "run" not in frame.columns:
        return alt.value(otherwise)
    names = list(dict.fromkeys(frame.columns["run"]))
    return _colours("run", names, PAIR[: len(names)])


def queue_window(window: QueueWindow, title: str, start_s: float, end_s: float, height: int = 420) -> alt.Chart:
    across = alt.X("start:Q", title=SECONDS, scale=alt.Scale(domain=[start_s, end_s], nice=False, clamp=True))
    data = _data(window.spans)
    within = alt.Scale(domain=[int(data["position"].min()) - 1, int(data["position"].max()) + 1], nice=False)
    up = alt.Y("position:Q", title="position", scale=within, axis=alt.Axis(tickMinStep=1, grid=False))
    data["state"] = data["state"].map(STATE_LABELS)
    positions = max(1, data["position"].nunique())
    colour = _colours("state", list(STATE_LABELS.values()), list(STATE_COLOURS.values()))
    bars = (
        alt.Chart(data)
        .mark_rule(strokeWidth=max(1.2, min(6.0, 0.7 * height / positions)))
        .encode(across, up, alt.X2("end"), color=colour, tooltip=["position", "state", "start", "end"])
    )
    edges = (
        alt.Chart(_data(window.edges))
        .mark_line(color="black", strokeWidth=1.2, interpolate="step-after", clip=True)
        .encode(
            x="t:Q",
            y="position:Q",
            strokeDash=alt.StrokeDash("edge:N", scale=alt.Scale(domain=EDGES, range=[[1, 0], [4, 3]]), legend=None),
        )
    )
    marks = (
        alt.Chart(_data(window.marks))
        .mark_point(size=22, filled=True, opacity=1)
        .encode(
            x="t:Q",
            y="position:Q",
            shape=alt.Shape(
                "what:N", scale=alt.Scale(domain=["taken", "dead"], range=["circle", "cross"]), legend=None
            ),
            fill=alt.Fill("what:N", scale=alt.Scale(domain=["taken", "dead"], range=["black", RED]), legend=None),
            tooltip=["position", "what", "t"],
        )
    )
    layers = alt.layer(bars, edges, marks).resolve_scale(color="independent", fill="independent", shape="independent")
    return layers.properties(title=title, height=height)


def states(frame: Frame, title: str, height: int = 220) -> alt.Chart:
    data = _data(frame)
    data["state"] = data["state"].map(STATE_LABELS)
    order = list(STATE_LABELS.values())
    data["rank"] = data["state"].map(order.index)
    return (
        alt.Chart(data)
        .mark_area(interpolate="step-after")
        .encode(
            alt.X("t:Q", title=SECONDS, scale=alt.Scale(nice=False)),
            alt.Y("items:Q", title="items", stack=True),
            color=_colours("state", order, list(STATE_COLOURS.values())),
            order="rank:Q",
        )
        .properties(title=title, height=height)
    )


def lag(frame: Frame, bound: int | None, title: str = "Lag of every item", height: int = 240) -> alt.Chart:
    dots = (
        alt.Chart(_data(frame))
        .mark_circle(size=24, opacity=0.6)
        .encode(
            alt.X("t:Q", title="seconds of the run, when taken", scale=alt.Scale(nice=False)),
            alt.Y("lag:Q", title="lag (items)", axis=alt.Axis(tickMinStep=1)),
            color=_runs(frame),
            tooltip=["position", "lag", "t"],
        )
    )
    if bound is None:
        return dots.properties(title=title, height=height)
    at = pd.DataFrame({"lag": [bound], "label": [f"bound: {bound}"]})
    line = alt.Chart(at).mark_rule(color=RED, strokeWidth=1.5).encode(y="lag:Q")
    text = alt.Chart(at).mark_text(color=RED, align="left", dx=4, dy=-7, x=0).encode(y="lag:Q", text="label:N")
    return (dots + line + text).properties(title=title, height=height)


def bars(
    frame: Frame, x: str, y: str, titles: tuple[str, str, str], colour: str = PURPLE, height: int = 240
) -> alt.Chart:
    """`titles`: of the chart, of x and of y. Beside each other by run where there are several."""
    offset = {"xOffset": alt.XOffset("run:N")} if "run" in frame.columns else {}
    return (
        alt.Chart(_data(frame))
        .mark_bar()
        .encode(
            alt.X(f"{x}:O", title=titles[1], axis=alt.Axis(labelAngle=0)),
            alt.Y(f"{y}:Q", title=titles[2]),
            color=_runs(frame, colour),
            tooltip=[x, y],
            **offset,
        )
        .properties(title=titles[0], height=height)
    )


def mixture(frame: Frame, feature: str, height: int = 170) -> alt.Chart:
    """One feature's batch means; of one run within the band of 95% of batches under random order."""
    data = _data(frame)
    base = alt.Chart(data[data["feature"] == feature]).encode(
        alt.X("step:Q", title="trainer step", scale=alt.Scale(nice=False))
    )
    up = alt.Scale(zero=False)
    line = base.mark_line(point=alt.OverlayMarkDef(size=14), strokeWidth=1.2).encode(
        alt.Y("mean:Q", title="mean of the batch", scale=up), color=_runs(frame)
    )
    band = base.mark_area(opacity=0.12, color=GREEN).encode(
        alt.Y("low:Q", title="mean of the batch", scale=up), alt.Y2("high")
    )
    layers = alt.layer(line) if "run" in frame.columns else alt.layer(band, line)
    return layers.properties(title=feature, height=height)


def lines(
    frame: Frame, x: str, y: str, titles: tuple[str, str, str], by: str = "", share: bool = True, height: int = 220
) -> alt.Chart:
    """`by`: the column that tells lines apart. `share`: y from 0 to 1, as percent."""
    domain = {"scale": alt.Scale(domain=[0, 1]), "axis": alt.Axis(format="%")} if share else {}
    names = list(dict.fromkeys(frame.columns[by])) if by else []
    colours = {"engines": BLUE, "trainer": ORANGE}
    others = [*PAIR, GREEN, PURPLE]
    range_ = [colours.get(name, others[i % 4]) for i, name in enumerate(names)]
    colour = _colours(by, names, range_) if by else alt.value(GREEN)
    return (
        alt.Chart(_data(frame))
        .mark_line(interpolate="step-after", strokeWidth=1.8)
        .encode(
            alt.X(f"{x}:Q", title=titles[1], scale=alt.Scale(nice=False)),
            alt.Y(f"{y}:Q", title=titles[2], **domain),
            color=colour,
            tooltip=[x, y, *([by] if by else [])],
        )
        .properties(title=titles[0], height=height)
    )


def distribution(frame: Frame, title: str, height: int = 240) -> alt.Chart:
    return (
        alt.Chart(_data(frame))
        .mark_line(interpolate="step-after", strokeWidth=1.8)
        .encode(
            alt.X("seconds:Q", title="seconds", scale=alt.Scale(type="log", nice=False), axis=alt.Axis(format="~g")),
            alt.Y("share:Q", title="share of requests", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
            color=_runs(frame),
            tooltip=[alt.Tooltip("seconds", format=".3g"), alt.Tooltip("share", format=".1%")],
        )
        .properties(title=title, height=height)
    )


def heat(frame: Frame, value: str, title: str, legend: str, downs: Frame | None = None) -> alt.Chart:
    """Instances against time, `value` as colour; in red when they were down."""
    data = _data(frame)
    count = data["instance"].nunique()
    share = value == "busy"
    scale = alt.Scale(domain=[0, 1], scheme="blues") if share else alt.Scale(scheme="blues")
    key = alt.Legend(orient="right", title=legend, **({"format": "%"} if share else {}))
    cells = (
        alt.Chart(data)
        .mark_rect()
        .encode(
            alt.X("start:Q", title=SECONDS, scale=alt.Scale(nice=False)),
            alt.X2("end"),
            alt.Y("instance:O", title="instance"),
            alt.Color(f"{value}:Q", title=legend, legend=key, scale=scale),
            tooltip=["instance", "start", "end", alt.Tooltip(value, format=".2f")],
        )
    )
    height = min(420, max(70, 18 * count))
    if downs is None or not downs:
        return cells.properties(title=title, height=height)
    down = alt.Chart(_data(downs)).mark_rect(color=RED).encode(x="start:Q", x2="end", y="instance:O")
    return (cells + down).properties(title=f"{title}; red: down", height=height)


def intervals(rows: list[tuple[str, float, float]], title: str, unit: str, height: int = 110) -> alt.Chart:
    """(name, low, high) as bars beneath each other, in the colours of runs."""
    data = pd.DataFrame(rows, columns=["run", "low", "high"])
    names = [row[0] for row in rows]
    return (
        alt.Chart(data)
        .mark_bar(size=18)
        .encode(
            alt.X("low:Q", title=unit, scale=alt.Scale(zero=False)),
            alt.X2("high"),
            alt.Y("run:N", title=None, sort=names),
            color=_colours("run", names, PAIR[: len(names)]).legend(None),
            tooltip=["run", "low", "high"],
        )
        .properties(title=title, height=height)
    )


def stacked_shares(frame: Frame, title: str, height: int = 120) -> alt.Chart:
    """Shares of prompt tokens by tier, a bar a run."""
    order = ["instance (L1)", "host memory (L2)", "shared store (L3)", "computed"]
    data = _data(frame)
    data["rank"] = data["tier"].map(order.index)
    data["run"] = data.get("run", "")
    return (
        alt.Chart(data)
        .mark_bar(size=22)
        .encode(
            alt.X("share:Q", title="share of prompt tokens", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
            alt.Y("run:N", title=None, sort=list(dict.fromkeys(data["run"]))),
            color=_colours("tier", order, [BLUE, GREEN, PURPLE, "#D4D4D4"]),
            order="rank:Q",
            tooltip=["tier", "tokens", alt.Tooltip("share", format=".1%")],
        )
        .properties(title=title, height=height)
    )


STANDINGS = {
    "dropped early": ("#CFCFCF", "cross"),
    "beaten by another": (GREY, "circle"),
    "beaten by none in everything": (BLUE, "circle"),
    "the scenario's own": (ORANGE, "square"),
    "chosen": ("#000000", "diamond"),
}


def front(frame: Frame, key: str, label: str, speed: str, speed_label: str, height: int = 300) -> alt.Chart:
    names, data = list(STANDINGS), _data(frame).rename(columns=lambda name: name.replace(".", "_"))
    key, speed = key.replace(".", "_"), speed.replace(".", "_")
    colours = [colour for colour, _ in STANDINGS.values()]
    shapes = alt.Scale(domain=names, range=[shape for _, shape in STANDINGS.values()])
    return (
        alt.Chart(data)
        .mark_point(filled=True, size=70, opacity=0.9)
        .encode(
            alt.X(key + ":Q", title=label, scale=alt.Scale(zero=False)),
            alt.Y(speed + ":Q", title=speed_label, scale=alt.Scale(zero=False)),
            color=_colours("what", names, colours).legend(columns=1),
            shape=alt.Shape("what:N", scale=shapes, title=None).legend(columns=1),
            tooltip=["set", "what", speed, key],
        )
        .properties(height=height)
    )


def reward(frame: Frame, height: int = 240) -> alt.Chart:
    names, colours = ["batch mean (sampled)", "moving mean", "held-out tasks"], [GREY, BLUE, RED]
    data = _data(frame)
    colour = _colours("what", names, colours)
    dash = [alt.StrokeDash("run:N", title=None)] if "run" in frame.columns else []
    x, y = alt.X("t:Q", title=SECONDS, scale=alt.Scale(nice=False)), alt.Y("reward:Q", title="mean reward")
    dots = alt.Chart(data[data["what"] == names[0]]).mark_circle(size=14, opacity=0.5).encode(x, y, color=colour)
    line = alt.Chart(data[data["what"] == names[1]]).mark_line(strokeWidth=2).encode(x, y, *dash, color=colour)
    held = alt.Chart(data[data["what"] == names[2]]).mark_point(size=70, filled=True, shape="diamond")
    return (dots + line + held.encode(x, y, color=colour)).properties(title="Reward", height=height)
