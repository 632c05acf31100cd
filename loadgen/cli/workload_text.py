"""Description of a workload: what `--dry-run` and `trace inspect` print."""

from collections.abc import Iterable, Iterator, Mapping

from loadgen.report.figures import percent
from loadgen.trace.oracle import ideal_reuse
from loadgen.trace.schema import Trace
from loadgen.trace.stats import (
    BINS_S,
    CONTEXTS_TOKENS,
    PERCENTILES,
    ArrivalStatistics,
    LengthStatistics,
    arrival_statistics,
    statistics,
)
from loadgen.trace.window import tick_s

_LABEL = 10


def describe(trace: Trace, asked_rps: float | None = None) -> str:
    """Describes a workload: schedule, load, prefix sharing, contexts, and what became of every row.

    Args:
        trace: arrivals from 0.
        asked_rps: the mean rate of requests that its schedule was drawn for, if it was.
    """
    stats = statistics(trace)
    span_s = stats.arrivals.span_s
    lines = [
        f"{trace.name} ({trace.format}): {len(trace):,} requests",
        *_labelled("schedule", [*_pace(trace), *_schedule(stats.arrivals, asked_rps), *_warning(trace)]),
        *_labelled(
            "load",
            [
                _load("prompts", stats.input_tokens, span_s),
                _load("answers", stats.output_tokens, span_s),
            ],
        ),
        *_labelled("sharing", [_sharing(trace)]),
        *_labelled("context", [_contexts(stats.fitting)]),
        *_labelled("rows", _rows(trace)),
    ]
    return "\n".join(lines)


def overlong_warning(trace: Trace, max_model_len: int | None, *, can_scale: bool) -> str:
    """Returns a warning about requests that exceed a server's context; "" if all fit, or it is not known.

    Args:
        trace: what is going to be run.
        max_model_len: what the server says, in tokens.
        can_scale: the command has `--length-scale`.
    """
    lengths = trace.input_tokens + trace.output_tokens
    num_overlong = 0 if max_model_len is None else int((lengths > max_model_len).sum())
    if not num_overlong:
        return ""
    scale = ", or --length-scale to shorten all" if can_scale else ""
    return (
        f"warning: {num_overlong:,} of {len(trace):,} requests are longer than the server's context of "
        f"{max_model_len:,} tokens (the longest has {lengths.max():,}) and will be refused: --max-model-len "
        f"{max_model_len} leaves them out, --overlong clip with it cuts them{scale}"
    )


def inspect(trace: Trace) -> str:
    """All statistics of a trace as it was recorded, as a table."""
    stats = statistics(trace)
    arrivals = stats.arrivals
    header = "".join(f"{name:>11}" for name in ("sum", "mean", "min", *(f"p{p}" for p in PERCENTILES), "max"))
    lines = [
        f"{trace.name} ({trace.format}): {len(trace):,} requests",
        *_labelled(
            "schedule", [f"{_time(arrivals.span_s)}, {arrivals.distinct_times:,} distinct times", *_schedule(arrivals)]
        ),
        *_labelled("", _warning(trace)),
        f"{'tokens':<{_LABEL}}{header}",
        _table_row("prompts", stats.input_tokens),
        _table_row("answers", stats.output_tokens),
        *_labelled("sharing", [_sharing(trace)]),
        *_labelled("context", [_contexts(stats.fitting)]),
        *_labelled("rows", _rows(trace)),
        *_labelled("digest", [trace.digest]),
    ]
    return "\n".join(lines)


def _labelled(label: str, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield f"{label:<{_LABEL}} {text}"
        label = ""


def _pace(trace: Trace) -> Iterator[str]:
    if trace.format == "synthetic" or trace.span_s == 0:
        return
    how = "as recorded" if trace.speed == 1 else f"{trace.speed:.4g}x as fast as recorded"
    yield f"{_time(trace.span_s * trace.speed)} of trace in {_time(trace.span_s)} ({how})"


def _schedule(arrivals: ArrivalStatistics, asked_rps: float | None = None) -> Iterator[str]:
    if arrivals.mean_rate_rps is None or arrivals.gap_cv is None:
        yield "all at once"
        return
    asked = "" if asked_rps is None else f" ({asked_rps:g} requested; this is the random draw)"
    over = f"over {_time(arrivals.span_s)}, CV of gaps {arrivals.gap_cv:.2f}"
    yield f"{arrivals.mean_rate_rps:.4g} requests/s{asked} {over}"
    missing = ", ".join(str(bin_s) for bin_s in BINS_S if bin_s not in arrivals.bursts)
    too_short = f" (too short for bins of {missing} s)" if missing else ""
    if arrivals.bursts:
        idc = ", ".join(f"{burst.idc:.2f} in {bin_s} s" for bin_s, burst in arrivals.bursts.items())
        peak = ", ".join(f"{burst.peak_to_mean:.2f}" for burst in arrivals.bursts.values())
        yield f"index of dispersion {idc}; peak over mean {peak}{too_short}"
    else:
        yield f"index of dispersion —{too_short}"


def _warning(trace: Trace) -> Iterator[str]:
    tick = tick_s(trace)
    if tick is not None:
        distinct = arrival_statistics(trace.arrival_s).distinct_times
        yield (
            f"warning: the clock ticks every {tick:.4g} s, {distinct:,} times for {len(trace):,} requests: run as "
            "it stands these are synchronised bursts; --dequantize auto, or trace dequantize, spreads them"
        )


def _load(what: str, lengths: LengthStatistics, span_s: float) -> str:
    marks = ", ".join(f"p{p} {lengths.percentiles[p]:,.0f}" for p in (50, 90, 99))
    rate = f", {lengths.sum / span_s:,.0f} tokens/s" if span_s > 0 else ""
    return f"{what} {lengths.sum:,} tokens{rate}: mean {lengths.mean:,.1f}, {marks}, max {lengths.max:,}"


def _sharing(trace: Trace) -> str:
    if trace.blocks is None:
        return "not known; every prompt is its own and a prefix cache finds nothing"
    reuse = ideal_reuse(trace)
    return (
        f"an infinite prefix cache holds {percent(reuse.token_reuse, 2)}% of the prompt tokens "
        f"({percent(reuse.block_hit, 2)}% of the {trace.blocks.block_tokens}-token blocks; "
        f"{percent(reuse.requests_with_hit, 2)}% of the requests find some)"
    )


def _contexts(fitting: Mapping[int, float]) -> str:
    return "fit: " + ", ".join(f"{percent(fitting[context], 1)}% in {context:,}" for context in CONTEXTS_TOKENS)


def _rows(trace: Trace) -> Iterator[str]:
    accounting = trace.accounting
    yield f"{accounting.read:,} read = {accounting.kept:,} kept + {accounting.read - accounting.kept:,} left out"
    for reason, count in accounting.dropped.items():
        yield f"{count:,} left out: {reason}"
    for change, count in accounting.altered.items():
        yield f"{count:,} {change}"


def _table_row(name: str, lengths: LengthStatistics) -> str:
    cells = [f"{lengths.sum:,}", f"{lengths.mean:,.1f}", f"{lengths.min:,}"]
    cells += [f"{value:,.1f}" for value in lengths.percentiles.values()]
    return f"{name:<{_LABEL}}" + "".join(f"{cell:>11}" for cell in [*cells, f"{lengths.max:,}"])


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.4g} s"
    return f"{seconds / 60:.4g} min" if seconds < 7200 else f"{seconds / 3600:.4g} h"
