"""`forge formats`: the tool-call formats there are, and how each looks."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from forge.cli import app
from forge.cli.options import AsJson, print_json
from forge.formats import FAMILIES, PUBLISHED, ToolCall, ToolResult, formats, get

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
_CALLS = [ToolCall("get_weather", '{"city": "Paris", "days": 2}'), ToolCall("get_weather", '{"city": "Oslo"}')]


@app.command("formats")
def show_formats(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]", help="A format, or a published model's name; none: families.", show_default=False
        ),
    ] = None,
    family: Annotated[str | None, typer.Option(help="List the ids of one family.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the tool-call formats that `--tool-prompt` and model.tool_prompt take, or show how one looks."""
    if name is not None:
        _show(name, as_json)
    elif family is not None:
        _list(family, as_json)
    else:
        _families(as_json)


def _show(name: str, as_json: bool) -> None:
    one = get(name)
    looks = {
        "id": one.id,
        "description": one.describe([_TOOL]),
        "turn": one.render("Let me see.", _CALLS),
        "results": one.render_results([ToolResult("get_weather", "12 C"), ToolResult("get_weather", "3 C")]),
    }
    if as_json:
        print_json(looks)
        return
    for key, text in looks.items():
        print(f"--- {key}\n{text}")


def _list(family: str, as_json: bool) -> None:
    get(family)  # which a family's plain name is
    ids = [one for one in formats() if one.partition(":")[0] == family]
    if as_json:
        print_json({"family": family, "formats": ids})
    else:
        print("\n".join(ids))


def _families(as_json: bool) -> None:
    counts = {one.family: sum(name.partition(":")[0] == one.family for name in formats()) for one in FAMILIES}
    if as_json:
        print_json({"formats": len(formats()), "families": counts, "published": PUBLISHED})
        return
    for one in FAMILIES:
        summary = re.split(r"\.\s", " ".join((one.__doc__ or "").split()) + " ")[0]
        print(f"{one.family:<14} {counts[one.family]:>5}  {summary}")
    print(f"{len(formats())} formats in {len(FAMILIES)} families; `--family NAME` lists ids, ID shows how one looks")
    print(f"as published for: {', '.join(PUBLISHED)}")
