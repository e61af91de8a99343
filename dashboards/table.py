"""Tables of figures as HTML, for pages: grouped, right-aligned, differences in green and red with a word beside."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dashboards.comparison import Row
from forge.report.drawing import GREEN, RED

STYLE = (
    "<style>table.figures{width:100%;border-collapse:collapse;font-size:.9rem}"
    "table.figures td,table.figures th{border:0;border-bottom:1px solid #e6e6e6;padding:.22rem .5rem;text-align:right}"
    "table.figures td:first-child,table.figures th:first-child{text-align:left}"
    "table.figures tr.group td{font-weight:600;padding-top:.7rem;background:none}</style>"
)


def figures(rows: Sequence[Row], names: Sequence[str]) -> str:
    """`names`: of the runs, in the order of the rows' values."""
    heads = ["", *names, *([f"{names[1]} against {names[0]}"] if len(names) == 2 else [])]
    lines, group = [_line("th", heads)], ""
    for row in rows:
        if row.group != group:
            group = row.group
            lines.append(f'<tr class="group"><td colspan="{len(heads)}">{escape(group)}</td></tr>')
        cells = [escape(row.label), *map(escape, row.values)]
        if len(names) == 2:
            cells.append(_difference(row))
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    narrow = ' style="max-width:44rem"' if len(names) == 1 else ""
    return f'{STYLE}<table class="figures"{narrow}>{"".join(lines)}</table>'


def _difference(row: Row) -> str:
    if row.better is None:
        return escape(row.difference)
    colour, word = (GREEN, "better") if row.better else (RED, "worse")
    return f'<span style="color:{colour}">{escape(row.difference)} {word}</span>'


def plain(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Any rows of text."""
    lines = [_line("th", heads), *(_line("td", row) for row in rows)]
    return f'{STYLE}<table class="figures">{"".join(lines)}</table>'


def _line(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
