"""Text and JSON of a comparison: the table in the terminal, and comparison.json. Pure."""

import math
from textwrap import wrap
from typing import Any

from rich.text import Text

from loadgen.comparison.bootstrap import CONFIDENCE
from loadgen.comparison.compare import Comparison, Versus
from loadgen.comparison.contrasts import Compared
from loadgen.plain_json import plain
from loadgen.report.figures import milliseconds, number, share

SCHEMA = "loadgen.comparison/v1"
SAME = "no significant difference"
_WIDTH = 112
_ONE_RUN = (
    "One run of each: the intervals do not include what differs from run to run, such as a restart or other load on "
    "the machine; those of `ab --repeats` do."
)
_FORCED = "FORCED: what differs may come of that, and says nothing of the servers."
_MANY_ROWS = (
    f"Each interval holds by itself with {CONFIDENCE:.0%} confidence: of twenty figures that are the same, one is "
    "expected to look different."
)


def value_text(figure: Compared, value: float) -> str:
    """A figure of one side, without its unit but for percent."""
    if figure.unit == "share":
        return share(value)
    return milliseconds(value) if figure.unit == "ms" else number(value)


def effect_text(figure: Compared, value: float) -> str:
    """A ratio, or a difference in percentage points."""
    if math.isnan(value):
        return "-"
    if figure.contrast == "difference":
        return f"{100 * value:+.1f} pp"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def interval_text(figure: Compared) -> str:
    """From where to where."""
    if not figure.judged:
        return "-"
    return f"{effect_text(figure, figure.effect.low)} to {effect_text(figure, figure.effect.high)}"


def conclusion(figure: Compared) -> str:
    """What it comes to, in a few words."""
    value = figure.effect.value
    if not figure.judged:
        return "not judged"
    if not figure.significant:
        return SAME
    where = "" if figure.of_servers else " in these runs"
    if figure.contrast == "difference":
        return f"{100 * abs(value):.1f} points {'higher' if value > 0 else 'lower'}{where}"
    if value >= 2:
        return f"{value:.3g} times as high{where}"
    return f"{100 * abs(value - 1):.2g} % {'higher' if value > 1 else 'lower'}{where}"


def good_or_bad(figure: Compared) -> str:
    """Whether it is "better" or "worse"; "" where it is no significant difference."""
    if not figure.significant:
        return ""
    same = 1.0 if figure.contrast == "ratio" else 0.0
    return "better" if (figure.effect.value > same) == (figure.better == "higher") else "worse"


def notes(comparison: Comparison) -> list[str]:
    """Returns remarks that apply to the whole comparison."""
    texts = [f"FORCED: {problem}" for problem in comparison.problems]
    if comparison.problems:
        texts.append(_FORCED)
    for versus in comparison.versus:
        left_out = versus.requests - versus.paired
        if left_out:
            texts.append(
                f"{versus.label}: {left_out:,} of {versus.requests:,} requests were not answered in every run; "
                "latencies are of the others"
            )
    if comparison.repeats == 1:
        texts.append(_ONE_RUN)
    texts.append(_MANY_ROWS)
    return texts


def title(comparison: Comparison) -> str:
    """Returns the sides that are compared."""
    others = ", ".join(versus.label for versus in comparison.versus)
    pairs = "" if comparison.repeats == 1 else f", {comparison.repeats} runs of each"
    return f"{others} against {comparison.baseline}{pairs}"


def basis(comparison: Comparison, versus: Versus) -> str:
    """What was compared."""
    part = "due in the steady state" if versus.steady else "of the whole run"
    draws = f"{comparison.resamples:,} draws of blocks of consecutive requests"
    return f"{versus.paired:,} requests {part}, paired; intervals from {draws}"


def remarks(versus: Versus) -> list[str]:
    """What is said of single figures, once for all that share it."""
    by_note: dict[str, list[str]] = {}
    for figure in versus.figures:
        if figure.note:
            by_note.setdefault(figure.note, []).append(figure.name)
    return [f"{', '.join(names)}: {note}" for note, names in by_note.items()]


def comparison_lines(comparison: Comparison) -> list[Text]:
    """The table for the terminal."""
    lines = [Text(f" {title(comparison)} ".center(_WIDTH, "="))]
    for versus in comparison.versus:
        lines.append(Text(basis(comparison, versus)))
        lines.append(Text(_row("", comparison.baseline, versus.label, "ratio", "95 % interval"), style="bold"))
        for figure in versus.figures:
            style = {"better": "green", "worse": "red", "": "dim"}[good_or_bad(figure)]
            lines.append(Text.assemble(_figure_row(figure), "  ", (conclusion(figure), style)))
        for remark in remarks(versus):
            lines += [Text(line, style="dim") for line in wrap(remark, _WIDTH, subsequent_indent="  ")]
        lines.append(Text("-" * _WIDTH))
    for note in notes(comparison):
        style = "bold red" if note.startswith("FORCED") else "dim"
        lines += [Text(line, style=style) for line in wrap(note, _WIDTH, subsequent_indent="  ")]
    lines.append(Text("=" * _WIDTH))
    return lines


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """What comparison.json holds."""
    return {
        "schema": SCHEMA,
        "baseline": comparison.baseline,
        "repeats": comparison.repeats,
        "workload_digest": comparison.digest,
        "measure": comparison.options.as_json(),
        "confidence": CONFIDENCE,
        "resamples": comparison.resamples,
        "forced": list(comparison.problems),
        "versus": [
            {
                "label": versus.label,
                "requests": versus.requests,
                "paired": versus.paired,
                "steady": versus.steady,
                "figures": {figure.key: _figure_document(figure) for figure in versus.figures},
            }
            for versus in comparison.versus
        ],
    }


def _figure_document(figure: Compared) -> dict[str, Any]:
    effect = plain(figure.effect)
    return {
        **{
            name: getattr(figure, name)
            for name in ("name", "unit", "contrast", "better", "block", "note", "significant")
        },
        "baseline": effect["first"],
        "other": effect["second"],
        "effect": effect["value"],
        "low": effect["low"],
        "high": effect["high"],
        "conclusion": conclusion(figure),
    }


def _figure_row(figure: Compared) -> str:
    unit = "" if figure.unit != "ms" else " (ms)"
    first, second = value_text(figure, figure.effect.first), value_text(figure, figure.effect.second)
    return _row(f"{figure.name}{unit}", first, second, effect_text(figure, figure.effect.value), interval_text(figure))


def _row(name: str, first: str, second: str, effect: str, interval: str) -> str:
    return f"{name:<29}{_cut(first):>14}{_cut(second):>14}{effect:>9}{interval:>20}"


def _cut(text: str) -> str:
    return text if len(text) <= 13 else f"{text[:12]}…"
