"""Progress of a run: a panel drawn four times a second on a terminal, else a line every few seconds."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from loadgen.record import LiveView
from loadgen.report.figures import milliseconds, number
from loadgen.report.live_figures import LiveFigures, Recent, look

_PANEL_EVERY_S = 0.25
_LINE_EVERY_S = 5.0
_RATE_OVER_S = 3.0
_SPARK_LENGTH = 40
_SPARKS = "▁▂▃▄▅▆▇█"
_LATE_MS, _TOO_LATE_MS = 10.0, 100.0


@contextmanager
def live_panel(
    console: Console, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[LiveView], None]]:
    """Returns a callback for a run's progress; calls that come too early are ignored.

    On a terminal a panel that stays as it last was; elsewhere a plain line every five seconds.

    Args:
        console: where to.
        clock: seconds, for when the next look is due.
    """
    history = History()
    if not console.is_terminal:
        yield _every(
            _LINE_EVERY_S, clock, lambda view: console.print(line(history.add(look(view)), history), soft_wrap=True)
        )
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        yield _every(
            _PANEL_EVERY_S, clock, lambda view: live.update(panel(history.add(look(view)), history), refresh=True)
        )


class History:
    """The last looks: token rate and the curve of requests in flight come from several."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[float, int]] = deque()
        self._in_flight: deque[int] = deque(maxlen=_SPARK_LENGTH)

    def add(self, figures: LiveFigures) -> LiveFigures:
        """Notes a look, and gives it back."""
        self._tokens.append((figures.elapsed_s, figures.tokens))
        while len(self._tokens) > 2 and self._tokens[1][0] <= figures.elapsed_s - _RATE_OVER_S:
            self._tokens.popleft()
        self._in_flight.append(figures.in_flight)
        return figures

    @property
    def tokens_per_s(self) -> float:
        """Over the last three seconds or two looks; NaN before the second one."""
        (then_s, before), (now_s, now) = self._tokens[0], self._tokens[-1]
        return (now - before) / (now_s - then_s) if now_s > then_s else math.nan

    @property
    def sparkline(self) -> str:
        """Requests in flight, from none to the most lately."""
        most = max(self._in_flight, default=0)
        return "".join(_SPARKS[round(count / most * (len(_SPARKS) - 1)) if most else 0] for count in self._in_flight)


def line(figures: LiveFigures, history: History) -> str:
    """One look on one line."""
    return (
        f"{_time(figures)}: offered {figures.offered:,} of {figures.total:,}, done {figures.done:,}, "
        f"in flight {figures.in_flight:,}{_waiting(figures)}, failed {figures.failed:,}; "
        f"last 10 s: TTFT {_recent(figures.ttft)}, TPOT {_recent(figures.tpot)}; "
        f"{number(history.tokens_per_s)} tok/s; sent late {milliseconds(figures.lag_ms)} ms (p99)"
    )


def panel(figures: LiveFigures, history: History) -> RenderableType:
    """One look as a panel."""
    counts = Table.grid(padding=(0, 3))
    counts.add_row(
        _labelled("offered", f"{figures.offered:,}", f" of {figures.total:,}"),
        _labelled("done", f"{figures.done:,}"),
        _labelled("failed", f"{figures.failed:,}", style="bold red" if figures.failed else "bold"),
        _labelled("output", number(history.tokens_per_s), " tok/s"),
    )
    latencies = Table.grid(padding=(0, 2))
    latencies.add_row(
        Text("last 10 s", style="dim"),
        _labelled("TTFT p50", milliseconds(figures.ttft.p50), " ms"),
        _labelled("p99", milliseconds(figures.ttft.p99), " ms"),
        _labelled("TPOT p50", milliseconds(figures.tpot.p50), " ms"),
        _labelled("p99", milliseconds(figures.tpot.p99), " ms"),
    )
    flight = Text.assemble(("in flight ", "dim"), (f"{figures.in_flight:>4,} ", "bold"), (history.sparkline, "blue"))
    flight.append(_waiting(figures))
    progress = Bar(max(figures.total, 1), 0, figures.done, color="blue", bgcolor="grey30")
    return Panel(
        Group(progress, counts, flight, latencies, _lag(figures.lag_ms)),
        title=f"chairlift-loadgen  {_time(figures)}",
        title_align="left",
        border_style="dim",
        width=80,
    )


def _every(period_s: float, clock: Callable[[], float], show: Callable[[LiveView], None]) -> Callable[[LiveView], None]:
    due_s = -math.inf

    def on_progress(view: LiveView) -> None:
        nonlocal due_s
        now_s = clock()
        if now_s >= due_s:
            due_s = now_s + period_s
            show(view)

    return on_progress


def _time(figures: LiveFigures) -> str:
    if figures.elapsed_s < 0:
        return f"starts in {-figures.elapsed_s:.1f} s"
    return f"{figures.elapsed_s:.0f} s of {figures.duration_s:.0f} s"


def _waiting(figures: LiveFigures) -> str:
    return f"  (+{figures.waiting:,} waiting)" if figures.waiting else ""


def _recent(recent: Recent) -> str:
    return f"p50 {milliseconds(recent.p50)} p99 {milliseconds(recent.p99)} ms"


def _labelled(label: str, value: str, unit: str = "", *, style: str = "bold") -> Text:
    return Text.assemble((f"{label} ", "dim"), (value, style), (unit, "dim"))


def _lag(lag_ms: float) -> Text:
    if math.isnan(lag_ms):
        return Text("○ nothing sent lately", style="dim")
    style, words = ("green", "on time")
    if lag_ms > _LATE_MS:
        style, words = ("yellow", "late") if lag_ms <= _TOO_LATE_MS else ("bold red", "too late, or held back by a cap")
    return Text.assemble(("● ", style), words, (f"  sent {milliseconds(lag_ms)} ms after due (p99)", "dim"))
