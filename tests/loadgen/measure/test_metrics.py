"""Every figure of a run against a slow reference in plain Python that knows only the definitions."""

import math
import random
import statistics
from dataclasses import fields
from typing import NamedTuple

import numpy as np
import pytest

from loadgen.errors import OptionError
from loadgen.measure.metrics import Latencies, MeasureOptions, measure
from loadgen.measure.quantiles import Distribution
from loadgen.record import ABSENT, RunData, Status
from tests.support.loadgen.runs import Answered, run_of, synthetic_run, with_requests

_SLO = {"ttft": 60.0, "tpot": 14.0, "itl": 40.0, "e2el": 400.0}
_PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_UNANSWERED = (Status.ERROR, Status.TIMEOUT, Status.CANCELLED, Status.IN_FLIGHT)


def _random_run(seed: int) -> RunData:
    """Requests of every fate: few and many messages, lost times, usage that says more or nothing, equal times."""
    draw = random.Random(seed)
    played, due_s = [], 0.0
    server_counts = draw.random() < 0.5
    for _ in range(draw.randint(1, 60)):
        due_s = round(due_s + draw.choice([0.0, draw.expovariate(20.0)]), 6)
        status = draw.choice([Status.OK] * 12 + [*_UNANSWERED, Status.DROPPED, Status.UNSENT])
        sent_s = due_s + draw.choice([0.0, draw.random() * 0.02])
        chunks, at_s = [], sent_s + draw.random() * 0.1
        for _ in range(draw.choice([1, 1, 2, draw.randint(3, 20)])):
            chunks.append((round(at_s, 6), draw.choice([1, 1, draw.randint(2, 5)])))
            at_s += draw.choice([0.0, 0.01, draw.random() * 0.05])
        if status in (Status.DROPPED, Status.UNSENT) or (status == Status.ERROR and draw.random() < 0.7):
            chunks = []
        tokens = sum(count for _, count in chunks)
        played.append(
            Answered(
                due_s=due_s,
                sent_s=sent_s,
                chunks=tuple(chunks),
                ended_s=None if status in (Status.DROPPED, Status.UNSENT, Status.IN_FLIGHT) else at_s + 0.001,
                status=status,
                input_tokens=draw.randint(1, 50),
                output_tokens=max(1, tokens + draw.choice([0, 0, -1, 3])),
                server_input_tokens=draw.randint(1, 50) if server_counts else ABSENT,
                server_output_tokens=draw.choice([ABSENT, tokens, tokens + draw.randint(1, 9), max(0, tokens - 1)]),
                cached_tokens=draw.randint(0, 5) if server_counts else ABSENT,
                lost_chunks=draw.choice([0, 0, 0, 1]) if chunks else 0,
            )
        )
    return run_of(played, ended_s=at_s + 2.0)


class _Request(NamedTuple):
    """One request as the definitions see it; times in ms."""

    status: Status
    due: float
    sent: float
    ended: float
    times: list[float]
    tokens: list[float]
    n: int
    messages: int
    whole: bool


def _read(run: RunData) -> list[_Request]:
    """Row by row, message by message, without numpy."""
    found = []
    for index, row in enumerate(run.requests):
        own = sorted(
            (int(chunk["arrived_ns"]), place, int(chunk["tokens"]))
            for place, chunk in enumerate(run.chunks)
            if chunk["request"] == index
        )
        counted = int(row["num_tokens"])
        n = stated if (stated := int(row["server_output_tokens"])) > 0 else counted
        found.append(
            _Request(
                Status(int(row["status"])),
                _ms(row["scheduled_ns"]),
                _ms(row["sent_ns"]),
                _ms(row["ended_ns"]),
                [at_ns / 1e6 for at_ns, _, _ in own],
                [tokens * n / counted for _, _, tokens in own],
                n,
                int(row["num_chunks"]),
                len(own) == int(row["num_chunks"]),
            )
        )
    return found


def _ms(value_ns: object) -> float:
    return math.nan if int(value_ns) == ABSENT else int(value_ns) / 1e6  # type: ignore[call-overload]


def _values(request: _Request) -> dict[str, list[tuple[float, float]]]:
    """(value, weight) of each latency of one completed request."""
    if not request.times:
        return {"client_wait": [(request.sent - request.due, 1)], "e2e_status": [(request.ended - request.due, 1)]}
    first, last = request.times[0], request.times[-1]
    one = {
        "ttft": first - request.due,
        "service_ttft": first - request.sent,
        "e2e": last - request.due,
        "service_e2e": last - request.sent,
        "e2e_status": request.ended - request.due,
        "normalized": (last - request.due) / request.n,
        "client_wait": request.sent - request.due,
    }
    if request.n >= 2 and request.messages >= 2:
        one["tpot"] = (last - first) / (request.n - 1)
    values = {name: [(value, 1.0)] for name, value in one.items()}
    if request.whole and len(request.times) >= 2:
        gaps = [later - earlier for earlier, later in zip(request.times, request.times[1:], strict=False)]
        values["chunk_gap"] = [(gap, 1.0) for gap in gaps]
        values["itl"] = [(gap / k, k) for gap, k in zip(gaps, request.tokens[1:], strict=True)]
        values["max_stall"] = [(max(gaps), 1.0)]
        values["ttst"] = [(gaps[0], 1.0)]
    return values


def _is_good(request: _Request) -> bool:
    if request.status != Status.OK or not request.times:
        return False
    values = {name: max(value for value, _ in pairs) for name, pairs in _values(request).items()}
    return (
        values["ttft"] <= _SLO["ttft"]
        and values["e2e"] <= _SLO["e2el"]
        and values.get("tpot", 0.0) <= _SLO["tpot"]
        and (values["itl"] <= _SLO["itl"] if "itl" in values else request.whole)
    )


def _mean_height(ordered: list[tuple[float, float]], low: float, high: float) -> float:
    """Of values laid side by side, each as wide as its weight, between two places."""
    area = running = 0.0
    for value, weight in ordered:
        area += value * max(0.0, min(high, running + weight) - max(low, running))
        running += weight
    return area / (high - low)


def _assert_sums_up(found: Distribution, pairs: list[tuple[float, float]], name: str) -> None:
    if not pairs:
        assert found.n == 0, name
        assert math.isnan(found.mean), name
        return
    total = sum(weight for _, weight in pairs)
    mean = sum(value * weight for value, weight in pairs) / total
    assert found.n == round(total), name
    assert found.mean == pytest.approx(mean, abs=1e-6), name
    variance = sum(weight * (value - mean) ** 2 for value, weight in pairs) / total
    assert found.std == pytest.approx(math.sqrt(variance), abs=1e-6), name
    ordered = sorted(pairs)
    assert (found.min, found.max) == pytest.approx((ordered[0][0], ordered[-1][0]), abs=1e-6), name
    for percentile, value in found.percentiles:
        place = percentile / 100 * (total - min(1.0, total))
        expected = _mean_height(ordered, place, place + min(1.0, total))
        assert value == pytest.approx(expected, abs=1e-6), (name, percentile)


def _assert_latencies(found: Latencies, requests: list[_Request]) -> None:
    values = [_values(request) for request in requests if request.status == Status.OK]
    for one in fields(Latencies):
        if one.name.startswith("server_"):
            continue
        pairs = [pair for mine in values for pair in mine.get(one.name, ())]
        _assert_sums_up(getattr(found, one.name), pairs, one.name)


@pytest.mark.parametrize("seed", range(60))
def test_all_figures_equal_the_definitions(seed: int) -> None:
    run = _random_run(seed)
    requests = _read(run)
    warmup_s = random.Random(seed).choice([0.0, 0.2])
    metrics = measure(run, MeasureOptions(warmup_s=warmup_s, slo=_SLO, percentiles=_PERCENTILES))
    _assert_latencies(metrics.whole.latencies, requests)
    judged = [request for request in requests if request.status != Status.CANCELLED]
    assert metrics.whole.goodput.offered == len(judged)
    assert metrics.whole.goodput.good == sum(map(_is_good, judged))

    span = metrics.steady.span
    last_due = max(request.due for request in requests)
    in_window = [request for request in requests if warmup_s * 1e3 <= request.due <= last_due]
    answered = [r for r in in_window if r.status == Status.OK and r.times and r.times[-1] <= last_due]
    assert span.steady == (last_due > warmup_s * 1e3 and len(answered) >= max(1, 0.1 * len(in_window)))
    if not span.steady:
        assert metrics.steady is metrics.whole
        return
    assert (span.start_s, span.end_s) == (warmup_s, pytest.approx(last_due / 1e3))
    _assert_latencies(metrics.steady.latencies, in_window)
    inside = [request for request in in_window if request.status != Status.CANCELLED]
    assert (metrics.steady.goodput.offered, metrics.steady.goodput.good) == (len(inside), sum(map(_is_good, inside)))
    length_s = last_due / 1e3 - warmup_s
    tokens = sum(
        k for r in requests for at, k in zip(r.times, r.tokens, strict=True) if warmup_s * 1e3 <= at <= last_due
    )
    assert metrics.steady.throughput.output_tokens_per_s * length_s == pytest.approx(tokens)
    done = sum(r.status == Status.OK and bool(r.times) and warmup_s * 1e3 <= r.times[-1] <= last_due for r in requests)
    assert metrics.steady.throughput.requests_per_s * length_s == pytest.approx(done)
    good = sum(_is_good(r) and warmup_s * 1e3 <= r.times[-1] <= last_due for r in requests)
    assert metrics.steady.goodput.requests_per_s * length_s == pytest.approx(good)
    under_way = sum(_overlap(r.sent, r.ended, warmup_s * 1e3, last_due) for r in requests) / (length_s * 1e3)
    assert metrics.steady.throughput.mean_in_flight == pytest.approx(under_way, abs=1e-6)
    waiting = sum(
        _overlap(r.due, r.due if r.status == Status.DROPPED else r.sent, warmup_s * 1e3, last_due) for r in requests
    ) / (length_s * 1e3)
    assert metrics.steady.throughput.mean_waiting == pytest.approx(waiting, abs=1e-6)


def _overlap(start: float, end: float, low: float, high: float) -> float:
    if math.isnan(start):
        return 0.0
    return max(0.0, min(high, math.inf if math.isnan(end) else end) - max(low, start))


def test_one_token_has_no_time_per_token_and_two_have_one() -> None:
    run = run_of([Answered(0.0, ((0.1, 1),)), Answered(0.5, ((0.6, 1), (0.8, 1))), Answered(1.0, ((1.2, 2),))])
    latencies = measure(run).whole.latencies
    assert (latencies.ttft.n, latencies.tpot.n, latencies.itl.n, latencies.max_stall.n) == (3, 1, 1, 1)
    assert latencies.tpot.min == latencies.tpot.max == pytest.approx(200.0)  # two tokens of one message have no time
    assert latencies.normalized.mean == pytest.approx((100 + 150 + 100) / 3)


def test_a_gap_counts_once_for_each_token_that_ends_it() -> None:
    latencies = measure(run_of([Answered(0.0, ((0.1, 1), (0.14, 4), (0.15, 1)))])).whole.latencies
    assert latencies.chunk_gap.n == 2
    assert latencies.chunk_gap.mean == pytest.approx(25.0)
    assert latencies.itl.n == 5
    assert latencies.itl.mean == pytest.approx(10.0)
    assert latencies.itl.std == pytest.approx(0.0, abs=1e-6)


def test_the_servers_count_wins() -> None:
    """Over messages that hold several tokens each, and over a gateway that cuts tokens into several messages."""
    undercounted = Answered(0.0, ((0.1, 1), (0.14, 1), (0.18, 1)), server_output_tokens=12)
    latencies = measure(run_of([undercounted])).whole.latencies
    assert latencies.tpot.mean == pytest.approx(80 / 11)
    assert latencies.itl.n == 8
    assert latencies.itl.mean == pytest.approx(10.0)
    overcounted = Answered(0.0, tuple((0.1 + 0.02 * index, 1) for index in range(9)), server_output_tokens=3)
    metrics = measure(run_of([overcounted]))
    assert metrics.whole.latencies.tpot.mean == pytest.approx(80.0)
    assert metrics.whole.latencies.itl.mean == pytest.approx(60.0)
    assert metrics.whole.throughput.output_tokens_per_s == pytest.approx(3 / 0.26)
    assert metrics.tokens.achieved_output == 3
    unstated = Answered(0.0, ((0.1, 1), (0.14, 1), (0.18, 1)), server_output_tokens=0)
    assert measure(run_of([unstated])).whole.latencies.tpot.mean == pytest.approx(40.0)


def test_latency_counts_from_the_schedule_and_service_from_the_send() -> None:
    late = measure(run_of([Answered(1.0, ((3.5, 1), (4.0, 1)), sent_s=3.0)])).whole.latencies
    assert (late.ttft.p50, late.service_ttft.p50) == pytest.approx((2500.0, 500.0))
    assert (late.e2e.p50, late.service_e2e.p50) == pytest.approx((3000.0, 1000.0))
    assert late.client_wait.p50 == pytest.approx(2000.0)


def test_the_parts_of_ttft_add_up_to_it() -> None:
    told = Answered(1.0, ((2.0, 1), (2.5, 1)), sent_s=1.25, queued_us=100_000, prefill_us=450_000)
    untold = Answered(1.5, ((1.75, 1),))
    latencies = measure(run_of([told])).whole.latencies
    assert latencies.elsewhere.mean == pytest.approx(1000 - 250 - 100 - 450)
    parts = (latencies.client_wait, latencies.server_queued, latencies.server_prefill, latencies.elsewhere)
    assert sum(part.mean for part in parts) == pytest.approx(latencies.ttft.mean)
    assert measure(run_of([told, untold])).whole.latencies.elsewhere.n == 1
    assert measure(run_of([untold])).whole.latencies.elsewhere.n == 0


@pytest.mark.parametrize("status", [Status.ERROR, Status.TIMEOUT, Status.DROPPED, Status.UNSENT, Status.IN_FLIGHT])
def test_what_was_not_answered_counts_against_attainment(status: Status) -> None:
    run = synthetic_run(100, outcomes={status: 25})
    part = measure(run, MeasureOptions(slo={"ttft": 1e9})).whole
    assert part.goodput.attainment == 0.75
    assert part.goodput.kept == {"ttft": 0.75}
    assert part.latencies.ttft.n == 75


def test_what_we_cancelled_is_not_judged() -> None:
    goodput = measure(synthetic_run(100, outcomes={Status.CANCELLED: 25})).whole.goodput
    assert (goodput.offered, goodput.good) == (75, 75)


def test_good_requests_per_second_never_exceed_those_answered() -> None:
    """Due in the window of 4 s are five requests, all good; only the first three of them end in it."""
    run = run_of([Answered(float(due), ((due + 1.5, 1),)) for due in range(5)])
    part = measure(run, MeasureOptions(slo={"ttft": 2000.0})).steady
    assert (part.goodput.good, part.goodput.offered) == (5, 5)
    assert part.goodput.requests_per_s == part.throughput.requests_per_s == 3 / 4


def test_what_ctrl_c_cut_off_is_judged_only_where_it_had_broken_a_limit() -> None:
    """Stopped at 10 s, limits 3 s to the first token and 6 s to the last."""
    waited = {
        1.0: (Status.IN_FLIGHT, ((2.0, 1), (9.0, 1))),  # first token in time, 9 s and no end: bad
        2.0: (Status.IN_FLIGHT, ()),  # 8 s without a first token: bad
        5.0: (Status.IN_FLIGHT, ((9.0, 1),)),  # 4 s to its first token: bad
        5.5: (Status.IN_FLIGHT, ((6.0, 1),)),
        6.0: (Status.UNSENT, ()),  # due, held back for 4 s: bad
        8.0: (Status.UNSENT, ()),
        60.0: (Status.UNSENT, ()),
    }
    played = [Answered(0.0, ((1.0, 1),)), Answered(0.5, status=Status.ERROR, ended_s=0.6)]
    played += [Answered(due_s, chunks, status=status) for due_s, (status, chunks) in waited.items()]
    options = MeasureOptions(slo={"ttft": 3000.0, "e2el": 6000.0})
    stopped = measure(run_of(played, interrupted=True, ended_s=10.0), options).whole.goodput
    assert (stopped.good, stopped.offered) == (1, 1 + 1 + 4)
    assert measure(run_of(played, ended_s=10.0), options).whole.goodput.offered == len(played)


def test_of_a_closed_loop_that_was_stopped_only_turns_that_came_are_judged() -> None:
    run = run_of(
        [Answered(0.0, ((1.0, 1),)), Answered(0.0, status=Status.UNSENT)],
        interrupted=True,
        ended_s=90.0,
        settings={"closed_loop": True},
    )
    never = np.array([run.requests["scheduled_ns"][0], ABSENT])
    goodput = measure(with_requests(run, scheduled_ns=never), MeasureOptions(slo={"ttft": 3000.0})).whole.goodput
    assert (goodput.good, goodput.offered) == (1, 1)


def test_tokens_after_the_window_are_not_its_throughput() -> None:
    run = run_of(
        [Answered(0.0, ((0.5, 10), (1.5, 10))), Answered(1.0, ((1.5, 10), (9.0, 100))), Answered(2.0, ((2.5, 10),))]
    )
    metrics = measure(run)
    assert metrics.steady.span == (0.0, 2.0, True)
    assert metrics.steady.throughput.output_tokens_per_s == pytest.approx(15.0)
    assert metrics.whole.throughput.output_tokens_per_s == pytest.approx(140 / 9)
    assert metrics.steady.latencies.ttft.n == 3


def test_the_busiest_second_may_begin_at_any_time_and_is_not_below_the_mean() -> None:
    run = run_of([Answered(0.0, ((0.2, 1), (0.9, 30), (1.3, 20), (1.8, 7), (1.95, 5))), Answered(1.9, ((1.9, 1),))])
    throughput = measure(run).steady.throughput
    assert throughput.output_tokens_per_s == pytest.approx(59 / 1.9)
    assert throughput.peak_output_tokens_per_s == 57  # from 0.9 to 1.8 s; the second that began at 0 has 31
    assert math.isnan(measure(run, MeasureOptions(warmup_s=1.0)).steady.throughput.peak_output_tokens_per_s)


def test_no_request_at_all() -> None:
    metrics = measure(run_of([]))
    assert metrics.whole.counts.offered == 0
    assert math.isnan(metrics.whole.throughput.output_tokens_per_s)
    assert math.isnan(metrics.whole.goodput.attainment)
    assert metrics.planned is None


def test_interactivity_is_what_one_reader_sees() -> None:
    run = run_of([Answered(0.0, ((0.1, 1), (0.15, 1)))])
    assert measure(run).whole.interactivity == pytest.approx(20.0)
    assert math.isnan(measure(run_of([Answered(0.0, ((0.1, 1),))])).whole.interactivity)


def test_options_survive_json_and_refuse_what_means_nothing() -> None:
    options = MeasureOptions(warmup_s=2.0, slo={"ttft": 5.0}, percentiles=(50.0, 99.9))
    assert MeasureOptions.from_json(options.as_json()) == options
    assert MeasureOptions.from_json({}) == MeasureOptions()
    with pytest.raises(OptionError, match=r"--warmup -1"):
        MeasureOptions(warmup_s=-1.0)
    with pytest.raises(OptionError, match=r"--goodput latency: is not one of ttft, tpot, itl, e2el"):
        MeasureOptions(slo={"latency": 1.0})
    with pytest.raises(OptionError, match=r"--goodput ttft:0: must be above 0"):
        MeasureOptions(slo={"ttft": 0.0})
    with pytest.raises(OptionError, match=r"--metric-percentiles 100"):
        MeasureOptions(percentiles=(100.0,))


def test_mean_of_the_reference_is_the_mean() -> None:
    """The reference itself, on a case a person can add up."""
    run = run_of([Answered(0.0, ((0.1, 1), (0.2, 1))), Answered(0.1, ((0.4, 1),))])
    pairs = [pair for request in _read(run) for pair in _values(request)["ttft"]]
    assert statistics.fmean(value for value, _ in pairs) == pytest.approx(200.0)
