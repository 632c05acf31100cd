"""Each check turns from VALID to DEGRADED to INVALID at its limit, and says what to do."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loadgen.checks.finding import Finding
from loadgen.checks.limits import Limits
from loadgen.checks.selfcheck import judge
from loadgen.measure.metrics import MeasureOptions, measure
from loadgen.record import ABSENT, RunData, Status
from loadgen.trace.schema import Blocks
from tests.support.loadgen.runs import Answered, healthy, run_of, synthetic_run, with_requests


def _finding(run: RunData, check: str, limits: Limits | None = None, options: MeasureOptions | None = None) -> Finding:
    verdict = judge(run, measure(run, options), limits)
    (found,) = [finding for finding in verdict.findings if finding.check == check]
    return found


def _level(run: RunData, check: str) -> str:
    found = _finding(run, check)
    assert bool(found.text) == (found.level != "VALID")
    return found.level


def _steady(count: int = 100, **settings: Any) -> RunData:
    """Ten requests a second, each answered in 200 ms after 100 ms, whatever else happens."""
    played = [
        Answered(0.1 * i, tuple((0.1 * i + 0.1 + 0.01 * k, 1) for k in range(11)), server_input_tokens=16)
        for i in range(count)
    ]
    return run_of(played, settings=settings)


def _sent_late(run: RunData, late_ms: float) -> RunData:
    """Everything that happened to each request happens this much later."""
    late_ns = round(late_ms * 1e6)
    moved = {name: run.requests[name] + late_ns for name in ("sent_ns", "first_ns", "last_ns", "ended_ns")}
    return with_requests(run, **moved)


def test_a_clean_run_is_valid_and_every_check_is_listed() -> None:
    run = synthetic_run(400)
    verdict = judge(run, measure(run))
    assert verdict.level == "VALID"
    assert verdict.reasons == ()
    assert {finding.check for finding in verdict.findings} == {
        "complete", "dropped", "workers_alive", "dispatch_lag", "achieved_rate", "loop_lag", "worker_cpu",
        "chunk_times", "ceiling", "warnings", "answered", "errors", "in_flight", "input_tokens", "output_tokens",
        "streaming", "token_counts", "cache", "steady_state", "saturation", "tail",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("late_ms", "level"), [(4.9, "VALID"), (5.1, "DEGRADED"), (24.9, "DEGRADED"), (25.1, "INVALID")]
)
def test_dispatch_lag_against_ttft(late_ms: float, level: str) -> None:
    assert _level(_sent_late(_steady(), late_ms), "dispatch_lag") == level


@pytest.mark.parametrize(
    ("late_ms", "level"), [(9.9, "VALID"), (10.1, "DEGRADED"), (99.0, "DEGRADED"), (101.0, "INVALID")]
)
def test_dispatch_lag_of_a_slow_server_has_limits_in_ms(late_ms: float, level: str) -> None:
    run = _steady()
    slow = with_requests(run, **{name: run.requests[name] + 10**9 for name in ("first_ns", "last_ns", "ended_ns")})
    assert _level(_sent_late(slow, late_ms), "dispatch_lag") == level


@pytest.mark.parametrize(
    ("late_ms", "level"), [(0.9, "VALID"), (1.1, "DEGRADED"), (9.9, "DEGRADED"), (10.1, "INVALID")]
)
def test_dispatch_lag_of_a_fast_server_is_never_judged_finer_than_a_client_can_be(late_ms: float, level: str) -> None:
    run = _steady()
    fast = with_requests(run, first_ns=run.requests["sent_ns"] + 1000)
    assert _level(_sent_late(fast, late_ms), "dispatch_lag") == level


def test_three_late_in_a_hundred_are_enough_and_their_median_hides_nothing() -> None:
    run = _steady()
    late = run.requests["sent_ns"] + np.where(np.arange(100) % 33 == 1, 90_000_000, 0)
    assert _level(with_requests(run, sent_ns=late), "dispatch_lag") == "INVALID"


@pytest.mark.parametrize(("first_late_ms", "retry_late_ms"), [(300.0, 0.0), (0.0, 300.0)])
def test_each_call_of_a_refused_request_has_to_be_on_time(first_late_ms: float, retry_late_ms: float) -> None:
    run = _sent_late(_steady(), first_late_ms)
    resent = {"num_retries": 1, "resent_ns": run.requests["sent_ns"], "retry_due_ns": run.requests["sent_ns"]}
    retried = with_requests(run, **resent, retry_lag_ns=round(retry_late_ms * 1e6))
    assert _level(retried, "dispatch_lag") == "INVALID"


@pytest.mark.parametrize("settings", [{"closed_loop": True}, {"max_concurrency": 4}])
@pytest.mark.parametrize("check", ["dispatch_lag", "achieved_rate"])
def test_late_sending_is_not_judged_where_a_cap_holds_requests_back(settings: dict[str, Any], check: str) -> None:
    found = _finding(_sent_late(_steady(**settings), 500.0), check)
    assert found.level == "VALID"
    assert np.isnan(found.measured)
    assert found.text.startswith("not judged")


@pytest.mark.parametrize(
    ("slower", "level"), [(1.009, "VALID"), (1.012, "DEGRADED"), (1.05, "DEGRADED"), (1.06, "INVALID")]
)
def test_achieved_rate(slower: float, level: str) -> None:
    run = _steady()
    sent_ns = np.round(run.requests["scheduled_ns"] * slower).astype(np.int64)
    assert _level(with_requests(run, sent_ns=sent_ns), "achieved_rate") == level


def test_requests_that_were_due_and_never_sent_lower_the_achieved_rate() -> None:
    run = _steady()
    columns = {name: np.where(np.arange(100) % 10 == 5, ABSENT, run.requests[name]) for name in ("sent_ns", "ended_ns")}
    assert _level(with_requests(run, **columns), "achieved_rate") == "INVALID"


@pytest.mark.parametrize(
    ("lag_ms", "level"), [(4.9, "VALID"), (5.1, "DEGRADED"), (49.0, "DEGRADED"), (51.0, "INVALID")]
)
def test_loop_lag_of_the_worst_worker(lag_ms: float, level: str) -> None:
    run = replace(_steady(), workers=(healthy(0, 10), healthy(1, 10, lag_ms=lag_ms)))
    assert _level(run, "loop_lag") == level


def test_a_client_that_stood_still_once_is_a_note_on_what_lies_beyond_p99() -> None:
    """Half a second of 100: 0.5 % of the ticks, and of the requests and tokens, came late."""
    lag_ms = np.full(10_000, 0.3)
    for latest_ms, notes in ((40.0, []), (500.0, ["loop_lag"])):
        lag_ms[5000:5050] = np.linspace(latest_ms, 0.0, 50)
        run = replace(_steady(), workers=(replace(healthy(0, 100), loop_lag_ms=lag_ms),))
        verdict = judge(run, measure(run, MeasureOptions(percentiles=(99.0,))))
        assert verdict.level == "VALID"
        assert [note.check for note in verdict.notes] == notes
    assert (
        "was blocked for 500 ms: percentiles beyond p99 and the largest values may be its own" in verdict.notes[0].text
    )


@pytest.mark.parametrize(
    ("seconds", "level"),
    [
        ([0.2, 0.69, 0.2, 0.2, 0.2, 0.2], "VALID"),
        ([0.2, 0.71, 0.2, 0.2, 0.2, 0.2], "DEGRADED"),
        ([0.96, 0.96, 0.96, 0.96, 0.2, 0.96], "DEGRADED"),
        ([0.2, 0.96, 0.96, 0.96, 0.96, 0.96], "INVALID"),
        ([1.0], "DEGRADED"),
    ],
)
def test_worker_cpu_voids_a_run_only_when_it_lasts(seconds: list[float], level: str) -> None:
    busy = replace(healthy(1, 6), cpu_share=np.array(seconds))
    assert _level(replace(_steady(), workers=(healthy(0, 6), busy)), "worker_cpu") == level


@pytest.mark.parametrize(
    ("seconds", "use"), [([0.2, 0.99], "99% of a core in"), ([0.99, *[0.96] * 5], "96% of a core for 5 s on end in")]
)
def test_worker_cpu_names_what_was_too_much(seconds: list[float], use: str) -> None:
    busy = replace(healthy(0, 6), cpu_share=np.array(seconds))
    assert _finding(replace(_steady(), workers=(busy,)), "worker_cpu").text.startswith(f"{use} the busiest worker")


@pytest.mark.parametrize(
    ("outside_ms", "level"), [(9.0, "VALID"), (12.0, "DEGRADED"), (19.0, "DEGRADED"), (30.0, "INVALID")]
)
def test_in_flight_by_the_servers_account(outside_ms: float, level: str) -> None:
    """Answers take 200 ms: 12 ms outside the server are 6 %, 30 ms are 15 %."""
    run = _steady()
    found = _finding(
        with_requests(run, server_queued_us=40_000, server_prefill_us=round((60 - outside_ms) * 1e3)), "in_flight"
    )
    assert found.level == level
    if level == "INVALID":
        assert found.sentence.startswith(
            "client and server disagree on how many requests were in flight, by 15 % (limit 2 % / 10 %): requests spent"
        )


def test_a_server_that_stopped_once_is_not_taken_for_a_cap() -> None:
    run = _steady()
    stalled = np.where(np.arange(100) < 20, 2_000_000_000, 0)
    later = {name: run.requests[name] + stalled for name in ("first_ns", "last_ns", "ended_ns")}
    found = _finding(with_requests(run, server_queued_us=0, server_prefill_us=100_000, **later), "in_flight")
    assert found.level == "VALID"


def test_in_flight_is_not_judged_without_the_servers_account() -> None:
    assert "does not say" in _finding(_steady(), "in_flight").text


@pytest.mark.parametrize(("extra", "level"), [(0, "VALID"), (1, "DEGRADED"), (4, "DEGRADED"), (6, "INVALID")])
def test_prompt_tokens_off_the_plan(extra: int, level: str) -> None:
    """Prompts of 16 tokens; half get more, half fewer, so that the sum is as planned."""
    run = _steady()
    off = np.where(np.arange(100) < 10 * extra, np.where(np.arange(100) % 2, 2, -2), 0)
    assert _level(with_requests(run, server_input_tokens=16 + off), "input_tokens") == level


@pytest.mark.parametrize(
    ("missing", "level"), [(0.009, "VALID"), (0.011, "DEGRADED"), (0.049, "DEGRADED"), (0.051, "INVALID")]
)
def test_output_tokens_off_the_plan(missing: float, level: str) -> None:
    tokens = round(1000 * (1 - missing))
    run = run_of(
        [Answered(0.0, ((0.1, tokens),), output_tokens=1000), Answered(0.1, ((0.2, tokens),), output_tokens=1000)]
    )
    assert _level(run, "output_tokens") == level


def test_output_tokens_are_not_judged_when_answers_may_end_by_themselves() -> None:
    run = run_of([Answered(0.0, ((0.1, 5),), output_tokens=1000)], settings={"ignore_eos": False})
    assert _finding(run, "output_tokens").level == "VALID"


@pytest.mark.parametrize(
    ("cached", "level"), [(0, "VALID"), (510, "VALID"), (511, "DEGRADED"), (550, "DEGRADED"), (551, "INVALID")]
)
def test_cached_tokens_beyond_what_the_workload_shares(cached: int, level: str) -> None:
    """The second prompt is the first one: 500 of 1,000 tokens can come from a cache."""
    told = {"input_tokens": 500, "server_input_tokens": 500}
    run = run_of(
        [Answered(0.0, ((0.1, 5),), cached_tokens=0, **told), Answered(0.5, ((0.6, 5),), cached_tokens=cached, **told)],
        blocks=Blocks(np.array([1, 2, 1, 2]), np.array([0, 2, 4]), 250),
    )
    assert _level(run, "cache") == level


def test_prompt_lengths_of_a_silent_server_are_judged_by_the_probe() -> None:
    run = with_requests(_steady(text_prompts={"mismatch": 0.02}), server_input_tokens=ABSENT)
    assert _level(run, "input_tokens") == "DEGRADED"
    assert "not judged" in _finding(with_requests(_steady(), server_input_tokens=ABSENT), "input_tokens").text


def test_warnings_of_the_client_and_a_missing_steady_state_are_notes() -> None:
    run = run_of([Answered(0.0, ((0.1, 1),))], settings={"warnings": ["wants 3 workers, has 2 cores"]})
    notes = judge(run, measure(run)).notes
    assert [note.check for note in notes] == ["warnings", "steady_state", "tail"]


def test_any_hit_of_prompts_that_share_nothing_is_a_warm_cache() -> None:
    run = _steady()
    assert _level(with_requests(run, server_cached_tokens=1), "cache") == "INVALID"


@pytest.mark.parametrize(
    ("failed", "level"), [(0, "VALID"), (1, "VALID"), (2, "DEGRADED"), (50, "DEGRADED"), (51, "INVALID")]
)
@pytest.mark.parametrize("status", [Status.ERROR, Status.TIMEOUT, Status.IN_FLIGHT])
def test_errors_timeouts_and_unfinished(status: Status, failed: int, level: str) -> None:
    run = synthetic_run(1000, rate=200.0, output_tokens=(2, 3), outcomes={status: failed})
    assert _level(run, "errors") == level


def test_the_limit_of_errors_can_be_moved() -> None:
    run = synthetic_run(100, outcomes={Status.ERROR: 10})
    assert _finding(run, "errors").level == "INVALID"
    assert _finding(run, "errors", Limits(error_share=Limits().error_share._replace(invalid=0.2))).level == "DEGRADED"


def test_a_run_is_judged_by_the_error_rate_it_was_run_with() -> None:
    for rate, level in ((None, "INVALID"), (0.2, "DEGRADED"), (0.05, "INVALID")):
        run = synthetic_run(100, outcomes={Status.ERROR: 10})
        assert _level(replace(run, settings={**run.settings, "max_error_rate": rate}), "errors") == level


def test_dropped_and_cancelled_requests_are_no_errors() -> None:
    assert _level(synthetic_run(100, outcomes={Status.DROPPED: 30, Status.CANCELLED: 30}), "errors") == "VALID"


def test_errors_are_a_share_of_what_was_sent() -> None:
    """10 of 100 fail; 900 more were dropped, and might have."""
    run = synthetic_run(1000, rate=200.0, output_tokens=(2, 3), outcomes={Status.DROPPED: 900, Status.ERROR: 10})
    assert _finding(run, "errors").measured == pytest.approx(0.1)


@pytest.mark.parametrize(("dropped", "level"), [(0, "VALID"), (1, "DEGRADED"), (90, "DEGRADED")])
def test_dropped_requests_are_named(dropped: int, level: str) -> None:
    settings = {"max_concurrency": 4, "overflow": "drop"}
    run = synthetic_run(100, outcomes={Status.DROPPED: dropped}, settings=settings)
    assert _level(run, "dropped") == level


def test_a_server_that_answers_nothing_voids_the_run() -> None:
    assert _level(synthetic_run(5, outcomes={Status.ERROR: 5}), "answered") == "INVALID"
    assert _level(run_of([]), "answered") == "INVALID"


def test_an_interrupted_run_is_partial_and_its_rest_no_error() -> None:
    run = replace(synthetic_run(100, outcomes={Status.IN_FLIGHT: 5, Status.UNSENT: 20}), interrupted=True)
    verdict = judge(run, measure(run))
    assert verdict.level == "DEGRADED"
    assert verdict.partial
    assert [finding.check for finding in verdict.reasons] == ["complete"]
    assert not judge(synthetic_run(100), measure(synthetic_run(100))).partial


def test_requests_never_sent_void_a_run_that_was_not_stopped() -> None:
    unsent = {Status.UNSENT: 1}
    assert _level(synthetic_run(100, outcomes=unsent), "complete") == "INVALID"
    assert "look at the workers" in _finding(synthetic_run(100, outcomes=unsent), "complete").text
    closed = synthetic_run(100, outcomes=unsent, settings={"closed_loop": True})
    assert "no answer ended for as long as --drain-timeout" in _finding(closed, "complete").text
    capped = synthetic_run(100, outcomes=unsent, settings={"max_concurrency": 4})
    assert "--max-concurrency 4 held them back until --drain-timeout" in _finding(capped, "complete").text


def test_an_interrupted_closed_loop_says_how_many_requests_were_left() -> None:
    run = synthetic_run(100, outcomes={Status.UNSENT: 20}, settings={"closed_loop": True})
    run = replace(run, interrupted=True)
    assert "20 of 100 requests were not sent: the report is of a part" in _finding(run, "complete").text


def test_an_interrupted_run_is_not_blamed_for_what_was_due_after_the_stop() -> None:
    """Stopped at 5 s of 10 s, and over at 9 s: the requests due in between were never to be sent."""
    run = replace(_steady(), interrupted=True, ended_s=9.0)
    unsent = np.arange(100) >= 50
    columns = {
        name: np.where(unsent, ABSENT, run.requests[name]) for name in ("sent_ns", "first_ns", "last_ns", "ended_ns")
    }
    stopped = with_requests(run, status=np.where(unsent, Status.UNSENT, Status.OK), **columns)
    stopped = replace(stopped, chunks=stopped.chunks[stopped.chunks["request"] < 50])
    metrics = measure(stopped)
    assert [finding.check for finding in judge(stopped, metrics).reasons] == ["complete"]
    assert metrics.steady.span.end_s == pytest.approx(4.9)
    assert metrics.steady.goodput.attainment == 1.0
    assert (metrics.whole.goodput.attainment, metrics.whole.goodput.offered) == (1.0, 50)


def test_a_dead_worker_voids_the_run() -> None:
    found = _finding(replace(_steady(), workers=(healthy(0, 9), replace(healthy(1, 9), exit_code=-9))), "workers_alive")
    assert found.level == "INVALID"
    assert "worker 1 (exit code -9)" in found.text


@pytest.mark.parametrize(("lost", "level"), [(0, "VALID"), (1, "DEGRADED"), (57, "DEGRADED"), (58, "INVALID")])
def test_lost_chunk_times(lost: int, level: str) -> None:
    """1,100 messages were kept."""
    run = replace(_steady(), workers=(replace(healthy(0, 9), chunks_lost=lost),))
    assert _level(run, "chunk_times") == level


def test_a_run_near_the_ceiling_of_its_host_warns() -> None:
    """110 messages a second."""
    assert _level(_steady(ceiling_messages_per_s=110 / 0.59), "ceiling") == "VALID"
    assert _level(_steady(ceiling_messages_per_s=110 / 0.61), "ceiling") == "DEGRADED"
    assert "calibrate" in _finding(_steady(), "ceiling").text


def test_piling_up_is_named() -> None:
    """Latency grows as fast as requests come: every one waits for all before it."""
    played = [Answered(0.1 * i, ((0.1 * i + 0.1 + 0.05 * i, 1), (0.1 * i + 0.3 + 0.05 * i, 1))) for i in range(200)]
    found = _finding(run_of(played), "saturation")
    assert found.level == "DEGRADED"
    assert found.text.startswith("unstable: latency depends on duration")


def test_a_warm_up_longer_than_the_schedule_is_named() -> None:
    assert _finding(_steady(), "steady_state", options=MeasureOptions(warmup_s=60.0)).level == "DEGRADED"
    burst = run_of([Answered(0.0, ((0.1, 1),)), Answered(0.0, ((0.2, 1),))])
    found = _finding(burst, "steady_state")
    assert found.level == "VALID"
    assert "whole run" in found.text


def test_the_worst_finding_is_the_verdict_and_comes_first() -> None:
    run = replace(_steady(), interrupted=True, workers=(replace(healthy(0, 9, lag_ms=51.0), chunks_lost=1),))
    verdict = judge(run, measure(run))
    assert verdict.level == "INVALID"
    assert verdict.reasons[0].check == "loop_lag"
    assert [finding.level for finding in verdict.reasons] == ["INVALID", "DEGRADED", "DEGRADED"]


@pytest.mark.parametrize(
    ("count", "percentiles", "note"),
    [
        (100, (50.0, 99.0), ""),
        (
            99,
            (50.0, 99.0),
            "99 answered requests in the window are too few for p99: hardly more than the extreme value; 100 are",
        ),
        (1000, (99.9,), ""),
        (
            999,
            (99.9,),
            "999 answered requests in the window are too few for p99.9: hardly more than the extreme value; 1,000 are",
        ),
        (19, (5.0, 95.0), "19 answered requests in the window are too few for p5, p95, p99: hardly more"),
        (100, (1.0, 99.0), ""),
    ],
)
def test_percentiles_of_too_few_requests_have_a_note(count: int, percentiles: tuple[float, ...], note: str) -> None:
    found = _finding(_steady(count), "tail", options=MeasureOptions(percentiles=percentiles))
    assert found.level == "VALID"
    assert found.text.startswith(note)
    assert bool(found.text) == bool(note)


def _streamed(*messages: tuple[float, int], count: int = 50, stated: int = ABSENT, **settings: Any) -> RunData:
    """One request a second, each answered by these messages: seconds after it was due, and tokens."""
    played = [
        Answered(i, tuple((i + after_s, tokens) for after_s, tokens in messages), server_output_tokens=stated)
        for i in range(count)
    ]
    return run_of(played, settings=settings)


def test_answers_that_come_whole_have_a_note_and_no_time_per_token() -> None:
    run = _streamed((0.5, 64))
    found = _finding(run, "streaming")
    assert found.level == "VALID"
    assert found.text.startswith("50 of 50 answers of 16 tokens or more came at once: in one message they have no TPOT")
    assert measure(run).whole.latencies.tpot.n == 0
    assert not _finding(_streamed((0.5, 15)), "streaming").text
    buffered = _streamed(*((0.5 + 2e-5 * k, 1) for k in range(64)))
    assert _finding(buffered, "streaming").text == found.text


def test_several_tokens_in_first_messages_have_a_note() -> None:
    found = _finding(_streamed(*((0.1 * k, 8) for k in range(1, 9))), "streaming")
    assert found.text.startswith("first messages hold 8.0 tokens on average: TPOT counts all but one of them as later")
    assert "11% below the time per token" in found.text  # 700 ms over 63 tokens, of which 56 took it
    stated = _finding(_streamed(*((0.1 * k, 1) for k in range(1, 9)), stated=64), "streaming")
    assert stated.text == found.text
    assert not _finding(_streamed((0.1, 2), *((0.1 + 0.01 * k, 1) for k in range(1, 31))), "streaming").text


@pytest.mark.parametrize(
    ("ignore_eos", "stated", "has_note"), [(False, -1, True), (False, 2, False), (True, -1, False)]
)
def test_tokens_that_nobody_counted_have_a_note(ignore_eos: bool, stated: int, has_note: bool) -> None:
    run = _streamed((0.1, 1), (0.2, 1), stated=stated, ignore_eos=ignore_eos)
    found = _finding(run, "token_counts")
    assert found.level == "VALID"
    assert found.text.startswith("the server does not say how many tokens 50 answers have") == has_note
    assert bool(found.text) == has_note


def test_a_run_without_an_answer_has_no_note_on_its_percentiles() -> None:
    run = _steady(20)
    assert not _finding(with_requests(run, status=np.full(20, Status.ERROR)), "tail").text
