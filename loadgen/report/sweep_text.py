"""Text and JSON of a sweep: the table in the terminal, and sweep.json. Pure."""

import math
from collections.abc import Mapping
from textwrap import wrap
from typing import Any

from rich.text import Text

from loadgen.plain_json import plain
from loadgen.report.figures import milliseconds, number, share
from loadgen.report.rows import limits_text
from loadgen.report.terminal import STYLES
from loadgen.sweep.capacity import answer_text
from loadgen.sweep.load_level import UNITS, LoadLevel
from loadgen.sweep.sweep import Sweep

SCHEMA = "loadgen.sweep.sweep/v1"
AXIS_NAMES = {"rate": "requests per second, offered", "concurrency": "requests at once"}
COLUMNS = (
    "load", "verdict", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "normalized", "requests/s", "tokens/s",
    "tok/s/user", "goodput/s", "within",
)  # fmt: skip
"""Of the table. Latencies in ms; `normalized` is the mean; `within` is the share that kept every limit."""
_WIDTH, _COLUMN_WIDTH = 126, 11


def cells(load_level: LoadLevel, *, limits: bool) -> list[str]:
    """The figures of a load level, in the order of COLUMNS."""
    return [
        f"{load_level.load:g}",
        load_level.level,
        *(
            milliseconds(one)
            for one in (load_level.ttft.p50, load_level.ttft.p99, load_level.tpot.p50, load_level.tpot.p99)
        ),
        milliseconds(load_level.normalized.mean),
        number(load_level.requests_per_s),
        number(load_level.output_tokens_per_s),
        number(load_level.interactivity),
        number(load_level.goodput_per_s) if limits else "-",
        share(load_level.attainment) if limits else "-",
    ]


def conclusions(sweep: Sweep, slo: Mapping[str, float]) -> list[str]:
    """Returns the answers, and why there is none."""
    texts = [answer_text(one, sweep.load_levels, sweep.axis, limits_text(slo)) for one in sweep.answers]
    if sweep.stopped:
        texts.append(f"The sweep ended before its last load: {sweep.stopped}")
    if sweep.failure:
        texts.append(f"BROKEN OFF {sweep.failure}")
    return texts


def sweep_lines(sweep: Sweep, slo: Mapping[str, float]) -> list[Text]:
    """The table for the terminal."""
    lines = [Text(f" Sweep over {AXIS_NAMES[sweep.axis]} ".center(_WIDTH, "="))]
    lines.append(
        Text("".join(name.rjust(_COLUMN_WIDTH - (index == 0) * 3) for index, name in enumerate(COLUMNS)), "bold")
    )
    for load_level in sweep.load_levels:
        first, level, *rest = cells(load_level, limits=bool(slo))
        lines.append(
            Text.assemble(
                first.rjust(_COLUMN_WIDTH - 3),
                (level.rjust(_COLUMN_WIDTH), STYLES[load_level.level]),
                "".join(text.rjust(_COLUMN_WIDTH) for text in rest),
            )
        )
        if load_level.level == "INVALID" and load_level.reasons:
            lines += [
                Text(f"      {line}", style="dim") for line in wrap(f"not used: {load_level.reasons[0]}", _WIDTH - 6)
            ]
    lines.append(Text("-" * _WIDTH))
    for text in conclusions(sweep, slo):
        lines += [Text(line, style="bold") for line in wrap(text, _WIDTH, subsequent_indent="  ")]
    lines.append(Text("=" * _WIDTH))
    return lines


def sweep_document(sweep: Sweep, slo: Mapping[str, float]) -> dict[str, Any]:
    """What sweep.json holds."""
    return {
        "schema": SCHEMA,
        "axis": sweep.axis,
        "unit": UNITS[sweep.axis],
        "slo": dict(slo),
        "answers": [
            {**plain(one), "text": answer_text(one, sweep.load_levels, sweep.axis, limits_text(slo))}
            for one in sweep.answers
        ],
        "stopped": sweep.stopped,
        "failure": sweep.failure,
        "interrupted": sweep.interrupted,
        "rungs": [_load_level_document(load_level) for load_level in sweep.load_levels],
    }


def _load_level_document(load_level: LoadLevel) -> dict[str, Any]:
    document: dict[str, Any] = plain(load_level)
    for name in ("ttft", "tpot", "e2e", "normalized"):
        figures = document.pop(name)
        percentiles = {f"p{percentile:g}": value for percentile, value in figures.pop("percentiles")}
        document[f"{name}_ms"] = {**figures, **percentiles}
    document["attainment"] = None if math.isnan(load_level.attainment) else load_level.attainment
    document["used"] = load_level.counts
    return document
