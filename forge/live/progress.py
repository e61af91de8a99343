"""What a person watches while a run goes: reward, step, lag, and the queue window position by position."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forge import trace as ev
from forge.control import Control
from forge.scenario import Scenario
from forge.types import ItemState

REFRESH_S = 0.5
PLAIN_S = 15.0  # between lines where the output is no terminal
SMOOTH = 40  # items the shown reward averages over


class Watcher:
    """An event sink that keeps the few figures the display shows."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.lag_last = 0
        self.lag_max = 0

    def __call__(self, event: ev.Event) -> None:
        match event:
            case ev.Finished(reward=float(reward)):
                self.rewards.append(reward)
            case ev.Taken():
                self.lag_last = event.lag_items
                self.lag_max = max(self.lag_max, event.lag_items)

    @property
    def reward(self) -> float | None:
        recent = self.rewards[-SMOOTH:]
        return sum(recent) / len(recent) if recent else None


def window_line(control: Control, width: int = 64) -> Text:
    """One character per position from the head on: running, finished, blocked outside the window."""
    queue = control.queue
    text = Text()
    for position in range(queue.head, min(len(queue), queue.head + width)):
        inside = queue.is_visible(position)
        match queue.states[position]:
            case ItemState.RUNNING:
                text.append("▷" if inside else "▹", style="cyan" if inside else "dim cyan")
            case ItemState.FINISHED:
                text.append("●" if inside else "◌", style="bold green" if inside else "yellow")
            case ItemState.DEAD:
                text.append("×", style="red")
            case _:
                text.append("·", style="dim")
    return text or Text("(empty)", style="dim")


class Progress:
    """Redraws until cancelled. On anything but a terminal it prints a line now and then."""

    def __init__(
        self, console: Console, scenario: Scenario, control: Control, watcher: Watcher, clock: Callable[[], float]
    ) -> None:
        self.console = console
        self.scenario = scenario
        self.control = control
        self.watcher = watcher
        self.clock = clock

    async def run(self) -> None:
        if not self.console.is_terminal:
            while True:
                await asyncio.sleep(PLAIN_S)
                self.console.print(self.line(), highlight=False, soft_wrap=True)
        with Live(self.render(), console=self.console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(self.render(), refresh=True)
                await asyncio.sleep(REFRESH_S)

    def line(self) -> str:
        views, watcher = self.control.views, self.watcher
        reward = "-" if watcher.reward is None else f"{watcher.reward:.2f}"
        return (
            f"{self.clock():6.0f} s  step {views.step:4d}  reward {reward}  head {views.queue.head}"
            f"  running {views.queue.running}  finished {len(views.queue.finished_order)}"
            f"  lag {watcher.lag_last} (max {watcher.lag_max})  dead {views.queue.dead}"
        )

    def render(self) -> RenderableType:
        views, queue, watcher = self.control.views, self.control.queue, self.watcher
        bound = queue.shape.lag_items_bound
        table = Table.grid(padding=(0, 3))
        reward = "-" if watcher.reward is None else f"{watcher.reward:.3f}"
        table.add_row(
            f"reward [bold green]{reward}[/] (last {SMOOTH} items)",
            f"step [bold]{views.step}[/]",
            f"weights v{views.version}",
            f"lag [bold]{watcher.lag_last}[/], max {watcher.lag_max}, bound {'none' if bound is None else bound}",
            f"dead {queue.dead}",
        )
        window = "everything" if queue.shape.window is None else f"W = {queue.shape.window} of N = {queue.shape.n}"
        legend = Text.from_markup(
            "[cyan]▷[/] running  [bold green]●[/] finished  [yellow]◌[/] finished, blocked outside the window  "
            "[dim]·[/] consumed"
        )
        total = self.scenario.stop.seconds
        bar = ProgressBar(total=total, completed=min(self.clock(), total or 0.0)) if total else Text("")
        head = Text.from_markup(f"window from position {queue.head} ({window}): ")
        body = Group(table, head.append_text(window_line(self.control)), legend, bar)
        return Panel(body, title=f"forge run: {self.scenario.name}", border_style="blue")
