"""What the pictures of several reports have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def palette() -> tuple[Any, str, str, str]:
    """pyplot in the project's style, drawing to files, and its three colours."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    from forge.report.drawing import BLUE, GREEN, ORANGE, STYLE

    plt.rcParams.update(STYLE)
    return plt, BLUE, ORANGE, GREEN


def save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=110)
    plt.close(figure)
