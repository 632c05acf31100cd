"""One line per request: where its time went."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from loadgen.measure.metrics import Metrics
from loadgen.measure.samples import Samples
from loadgen.record import RunData
from loadgen.report.figures import duration
from loadgen.report.palette import BLUE, GREY, INK, MUTED, ORANGE, RED, TEAL, VIOLET
from loadgen.report.plot_style import Picture, headline, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]

_MAX_ROWS = 120
_ROW_IN = (0.045, 0.14)
_STALL_OVER_MEDIAN = 4.0
_MIN_STALL_MS = 100.0
_TOO_SHORT_TO_SEE = 0.002
# Where the median line is a smaller share of the time between first and last, all begin at zero: about three in flight.
_TOO_SHORT_TO_READ = 0.025

_Line = tuple[int, float, float]
"""Row, from, until; seconds."""


def requests_in_time(run: RunData, metrics: Metrics, samples: Samples) -> Picture:
    """Draws consecutive requests around the moment when most were in the system: waiting, prefill, decode, stalls.

    Over the time of the run; where lines would be too short to read, over the time since each request was due.
    """
    rows = _around_the_peak(samples)
    median_ms = metrics.whole.latencies.chunk_gap.p50
    stall_ms = max(_MIN_STALL_MS, _STALL_OVER_MEDIAN * (0.0 if np.isnan(median_ms) else median_ms))
    lines = _lines(run, samples, rows, stall_ms)
    aligned = _too_short_to_read(lines)
    if aligned:
        due_s = samples.scheduled_s
        lines = {kind: [_since(line, due_s[line[0]]) for line in drawn] for kind, drawn in lines.items()}
    with styled():
        height_in = min(_ROW_IN[1], max(_ROW_IN[0], 1.4 / max(len(rows), 1)))
        figure = new_figure(1.0 + height_in * max(len(rows), 10))
        axes = figure.subplots()
        shown = [("One line per request", INK), *_draw_lines(axes, lines, stall_ms, row_points=height_in * 72)]
        if len(rows):
            axes.set_ylim(rows[-1] + 1.5, rows[0] - 1.5)
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("since each request was due" if aligned else "seconds from the start")
        if aligned:
            axes.xaxis.set_major_formatter(FuncFormatter(lambda at_s, _: duration(at_s * 1e3)))
        axes.set_ylabel("request")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        headline(axes, *shown)
    which = _caption(rows, len(run.requests), aligned=aligned, has_elsewhere=("elsewhere", VIOLET) in shown)
    return Picture(
        name="requests",
        title="Request by request",
        caption=which,
        alt=f"A line per request from when it was due to its last token, in order of arrival. {which}",
        figure=figure,
    )


def _draw_lines(
    axes: "Axes", lines: "dict[str, list[_Line]]", stall_ms: float, *, row_points: float
) -> list[tuple[str, str]]:
    """Draws the lines of every kind and sets the range of x.

    Args:
        axes: to draw on.
        lines: by kind, see `_lines`.
        stall_ms: the gap that counts as a stall.
        row_points: height of a row, in points.
    Returns: name and colour of each kind that the headline explains.
    """
    until_s = max((end_s for kind in lines.values() for _, _, end_s in kind), default=1.0)
    from_s = min((start_s for kind in lines.values() for _, start_s, _ in kind), default=0.0)
    names = {
        "client": ("waiting in the client", GREY),
        "queued": ("queued", ORANGE),
        "first": ("until the first token", ORANGE),
        "prefill": ("prefill", TEAL),
        "elsewhere": ("elsewhere", VIOLET),
        "decode": ("decode", BLUE),
        "stall": (f"gap over {duration(stall_ms)}", RED),
        "failed": ("no answer", INK),
    }
    shown = []
    for kind, (name, colour) in names.items():
        seen = [line for line in lines[kind] if line[2] - line[1] > _TOO_SHORT_TO_SEE * (until_s - from_s)]
        if not lines[kind] or (kind == "client" and not seen):
            continue
        # One path, broken between lines: a fifth of the size of one path each.
        x = [at for _, start_s, end_s in lines[kind] for at in (start_s, end_s, np.nan)]
        y = [at for row, _, _ in lines[kind] for at in (row, row, np.nan)]
        width = row_points * (0.45 if kind == "failed" else 0.72)
        axes.plot(x, y, color=colour, linewidth=width, solid_capstyle="butt")
        if kind != "elsewhere" or seen:
            shown.append((name, MUTED if colour == GREY else colour))
    axes.set_xlim(from_s, until_s)
    return shown


def _caption(rows: "Rows", num_requests: int, *, aligned: bool, has_elsewhere: bool) -> str:
    text = "All requests."
    if len(rows) < num_requests:
        text = (
            f"Requests {rows[0]:,} to {rows[-1]:,} of {num_requests:,}: those around the moment when most were in the "
            "system."
        )
    if aligned:
        text += " Each line begins when its request was due."
    if has_elsewhere:
        text += " Elsewhere: the rest of TTFT, before and after the server's own account, drawn after it."
    return text


def _around_the_peak(samples: Samples) -> "Rows":
    """Indexes of at most as many consecutive requests as can be distinguished."""
    due = samples.scheduled_s
    if len(due) <= _MAX_ROWS:
        return np.arange(len(due))
    until = np.where(np.isnan(samples.ended_s), samples.last_s, samples.ended_s)
    come, gone = np.sort(due[~np.isnan(due)]), np.sort(until[~np.isnan(until)])
    there = np.arange(1, len(come) + 1) - np.searchsorted(gone, come, side="right")
    fullest_s = come[int(np.argmax(there))] if len(come) else 0.0
    peak = (
        int(np.searchsorted(due, fullest_s)) if not np.isnan(due).any() else int(np.nanargmin(np.abs(due - fullest_s)))
    )
    first = min(max(0, peak - _MAX_ROWS * 2 // 3), len(due) - _MAX_ROWS)
    return np.arange(first, first + _MAX_ROWS)


def _lines(run: RunData, samples: Samples, rows: "Rows", stall_ms: float) -> dict[str, list[_Line]]:
    """What was when, by kind; stalls lie over decode."""
    found: dict[str, list[_Line]] = {
        kind: [] for kind in ("client", "queued", "first", "prefill", "elsewhere", "decode", "stall", "failed")
    }

    def add(kind: str, row: int, from_s: float, until_s: float) -> None:
        if until_s > from_s:  # false for NaN
            found[kind].append((row, from_s, until_s))

    for row in rows.tolist():
        sent_s, first_s, last_s = (
            float(column[row]) for column in (samples.last_sent_s, samples.first_s, samples.last_s)
        )
        add("client", row, float(samples.scheduled_s[row]), sent_s)
        if not samples.completed[row]:
            add("failed", row, sent_s, float(samples.ended_s[row]))
            continue
        queued_s = sent_s + float(samples.server_queued[row]) / 1e3
        if np.isnan(queued_s) or queued_s > first_s:
            add("first", row, sent_s, first_s)
        else:
            add("queued", row, sent_s, queued_s)
            started_s = min(queued_s + float(samples.server_prefill[row]) / 1e3, first_s)
            add("prefill", row, queued_s, started_s)
            add("elsewhere", row, started_s, first_s)
        add("decode", row, first_s, last_s)
    own = run.chunks[np.isin(run.chunks["request"], rows[samples.completed[rows]])]
    own = own[np.argsort(own["request"], kind="stable")]
    gap_ms = np.diff(own["arrived_ns"]) / 1e6
    for place in np.flatnonzero((np.diff(own["request"]) == 0) & (gap_ms > stall_ms)).tolist():
        from_ns, until_ns = own["arrived_ns"][place : place + 2]
        add("stall", int(own["request"][place]), from_ns / 1e9, until_ns / 1e9)
    return found


def _too_short_to_read(lines: dict[str, list[_Line]]) -> bool:
    """Whether the median request takes next to nothing of the time that is drawn."""
    begin_s: dict[int, float] = {}
    end_s: dict[int, float] = {}
    for row, from_s, until_s in (line for drawn in lines.values() for line in drawn):
        begin_s[row] = min(begin_s.get(row, from_s), from_s)
        end_s[row] = max(end_s.get(row, until_s), until_s)
    if not begin_s:
        return False
    taken_s = [end_s[row] - begin_s[row] for row in begin_s]
    return float(np.median(taken_s)) < _TOO_SHORT_TO_READ * (max(end_s.values()) - min(begin_s.values()))


def _since(line: _Line, due_s: float) -> _Line:
    row, from_s, until_s = line
    return row, from_s - due_s, until_s - due_s
