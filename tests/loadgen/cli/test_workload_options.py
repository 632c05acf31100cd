import json

import numpy as np
import pytest

from chairlift.service.flags import FlagParser
from loadgen.cli.synthetic_options import SYNTHETIC_FLAGS, asked_rate
from loadgen.cli.trace_options import TRACE_FLAGS
from loadgen.cli.workload_options import add_synthetic_arguments, add_trace_arguments, workload
from loadgen.cli.workload_text import describe
from loadgen.errors import OptionError, TraceError
from loadgen.trace.oracle import ideal_reuse
from loadgen.trace.stats import arrival_statistics


class ComplaintError(Exception):
    """What argparse would print before it exits."""


class Parser(FlagParser):
    def error(self, message):
        raise ComplaintError(message)


def replay(*arguments):
    parser = Parser("program")
    add_trace_arguments(parser)
    return workload(parser.parse_args([str(argument) for argument in arguments]))


def run(*arguments):
    parser = Parser("program")
    add_synthetic_arguments(parser)
    return workload(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def trace(tmp_path):
    """A request every second from 100 s on, in growing prompts of 8-token blocks."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {
            "arrival_s": 100 + index,
            "input_tokens": 8 * (index % 10 + 1),
            "output_tokens": 4,
            "block_tokens": 8,
            "blocks": list(range(index % 10 + 1)),
            "session": index % 3,
        }
        for index in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_as_it_is_starts_at_zero(trace):
    played = replay("--trace", trace)
    assert len(played) == 60
    assert played.arrival_s[[0, 1, -1]].tolist() == [0.0, 1.0, 59.0]
    assert played.speed == 1.0


def test_window_limit_and_speed(trace):
    played = replay("--trace", trace, "--window", "110:2m", "--limit", 4, "--speed", 2)
    assert played.rows.tolist() == [10, 11, 12, 13]
    assert played.arrival_s.tolist() == [0.0, 0.5, 1.0, 1.5]
    assert played.accounting.kept == 4
    assert replay("--trace", trace, "--window", "2m:").rows.tolist() == list(range(20, 60))
    assert replay("--trace", trace, "--window", ":110").rows.tolist() == list(range(10))


def test_rate_is_that_of_what_is_run(trace):
    played = replay("--trace", trace, "--max-model-len", 50, "--limit", 12, "--rate", 7.5)
    assert len(played) == 12
    assert arrival_statistics(played.arrival_s).mean_rate_rps == pytest.approx(7.5)


def test_lengths_are_scaled_before_they_are_fitted(trace):
    played = replay("--trace", trace, "--length-scale", 0.5, "--max-model-len", 30)
    assert played.input_tokens.max() == 28
    assert played.output_tokens.max() == 2
    assert played.accounting.dropped == {"longer than 30 tokens": 18}
    clipped = replay("--trace", trace, "--max-model-len", 30, "--overlong", "clip")
    assert len(clipped) == 60
    assert clipped.input_tokens.max() == 26
    with pytest.raises(OptionError, match="42 of 60 requests need more than --max-model-len 30"):
        replay("--trace", trace, "--max-model-len", 30, "--overlong", "fail")


def test_a_coarse_clock_is_spread_unless_told_not_to(tmp_path):
    path = tmp_path / "coarse.jsonl"
    rows = [{"arrival_s": 3 * (index // 10), "input_tokens": 1, "output_tokens": 1} for index in range(200)]
    path.write_text("\n".join(map(json.dumps, rows)))
    spread = replay("--trace", path)
    assert len(np.unique(spread.arrival_s)) == 200
    assert "warning" not in describe(spread)
    assert "200 spread over clock ticks of 3 s" in describe(spread)
    assert not np.array_equal(spread.arrival_s, replay("--trace", path, "--seed", 1).arrival_s)
    as_it_is = replay("--trace", path, "--dequantize", "off")
    assert len(np.unique(as_it_is.arrival_s)) == 20
    assert "warning: the clock ticks every 3 s, 20 times for 200 requests" in describe(as_it_is)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speed", 2, "--rate", 3], "--speed and --rate both set the clock"),
        (["--overlong", "clip"], "--overlong clip needs --max-model-len"),
        (["--window", "9:10"], "--window 9:10 holds none of the requests; they arrive from 100 s to 159 s"),
        (["--trace-model", "GPT-4"], "--trace-model GPT-4: .* which names no models"),
        (["--length-scale", 0.3], r"--length-scale 0\.3 makes 8-token blocks 2\.4 tokens long"),
    ],
)
def test_contradictions_of_a_replay_are_named(trace, arguments, message):
    with pytest.raises(OptionError, match=message):
        replay("--trace", trace, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", "10"], "--window is 10, it must be a window such as"),
        (["--window", "5x:9"], "--window is 5x:9, it must be a window such as"),
        (["--limit", "0"], "--limit is 0, it must be a whole number, at least 1"),
        (["--speed", "-1"], "--speed is -1, it must be a number above 0"),
        (["--rate", "inf"], "--rate is inf, it must be a number above 0"),
        (["--seed", "-1"], "--seed is -1, it must be a whole number, at least 0"),
        (["--trace-format", "parquet"], "--trace-format is parquet, it must be one of auto, azure, "),
    ],
)
def test_values_that_cannot_be_are_named_with_their_flag(trace, arguments, message):
    with pytest.raises(ComplaintError, match=message):
        replay("--trace", trace, *arguments)


def test_a_replay_without_a_trace_is_refused():
    with pytest.raises(OptionError, match="--trace FILE is missing"):
        replay()


def test_malformed_rows_and_backward_clocks_are_refused_unless_allowed(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [
        {"arrival_s": at, "input_tokens": tokens, "output_tokens": 1} for at, tokens in ((0, 1), (5, 0), (4, 1), (3, 1))
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(TraceError, match="line 2: input_tokens is 0"):
        replay("--trace", path)
    with pytest.raises(TraceError, match="line 4: arrives at 3 s, before"):
        replay("--trace", path, "--skip-malformed")
    played = replay("--trace", path, "--skip-malformed", "--sort")
    assert played.arrival_s.tolist() == [0.0, 3.0, 4.0]
    text = describe(played)
    assert "4 read = 3 kept + 1 left out" in text
    assert "1 left out: malformed: input_tokens" in text
    assert "1 sorted: arrived before the row above" in text


def test_what_is_run_is_described(trace):
    played = replay("--trace", trace, "--window", "110:150", "--speed", 4)
    text = describe(played)
    statistics = arrival_statistics(played.arrival_s)
    assert "39 s of trace in 9.75 s (4x as fast as recorded)" in text
    assert f"{statistics.mean_rate_rps:.4g} requests/s over 9.75 s, CV of gaps 0.00" in text
    assert "prompts 1,760 tokens, 181 tokens/s: mean 44.0" in text
    assert "answers 160 tokens" in text
    assert f"holds {ideal_reuse(played).token_reuse:.2%} of the prompt tokens" in text
    assert "8-token blocks" in text
    assert "60 read = 40 kept + 20 left out" in text
    assert "20 left out: outside the window 110:150 s" in text
    assert "fit: 100.0% in 1,024" in text
    assert "(as recorded)" in describe(replay("--trace", trace))


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        (["--request-rate", "8"], 8.0),
        (["--request-rate", "8", "--on-off", "1s:2s"], 8.0),
        (["--request-rate", "8", "--burstiness", "inf"], None),  # nothing is drawn
        (["--request-rate", "inf"], None),
        (["--rate-steps", "2:1s,4:1s"], None),
        ([], None),
    ],
)
def test_a_rate_that_is_drawn_for_is_named_beside_the_draw(flags, asked):
    parser = Parser("program")
    add_synthetic_arguments(parser)
    options = parser.parse_args(["--num-prompts", "40", *flags])
    assert asked_rate(options) == asked
    requests = workload(options)
    drawn = arrival_statistics(requests.arrival_s).mean_rate_rps
    text = describe(requests, asked_rate(options))
    assert (f"{drawn or 0:.4g} requests/s (8 requested; this is the random draw)" in text) == (asked is not None)
    assert ("requested" in text) == (asked is not None)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (4, "index of dispersion — (too short for bins of 1, 10, 60 s)"),
        (59, "index of dispersion 0.00 in 1 s, 0.00 in 10 s; peak over mean 1.00, 1.00 (too short for bins of 60 s)"),
        (599, "index of dispersion 0.00 in 1 s, 0.00 in 10 s, 0.00 in 60 s; peak over mean 1.00, 1.00, 1.00\n"),
    ],
)
def test_a_short_schedule_shows_no_dispersion_it_cannot_know(seconds, said):
    requests = run("--request-rate", "1", "--burstiness", "inf", "--num-prompts", seconds + 1)
    assert said in describe(requests)


def test_a_random_data_set_all_at_once_is_the_default():
    requests = run()
    assert len(requests) == 1000
    assert set(requests.input_tokens) == {1024}
    assert set(requests.output_tokens) == {128}
    assert requests.arrival_s.tolist() == [0.0] * 1000
    assert "all at once" in describe(requests)


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("50", 50, 50), ("10-20", 10, 20), ("3,5", 3, 5), ("lognormal:40:0.5", 5, 400), ("exponential:9", 1, 200)],
)
def test_lengths_may_be_drawn_in_many_ways(text, low, high):
    lengths = run("--num-prompts", 500, "--random-input-len", text).input_tokens
    assert low <= lengths.min() <= lengths.max() <= high
    assert (low == high) == (len(set(lengths)) == 1)


def test_range_ratio_is_around_the_length():
    requests = run("--random-input-len", 100, "--random-output-len", 10, "--random-range-ratio", 0.2)
    assert (requests.input_tokens.min(), requests.input_tokens.max()) == (80, 120)
    assert (requests.output_tokens.min(), requests.output_tokens.max()) == (8, 12)


def test_a_shared_prefix_is_seen_by_the_oracle():
    lengths = {"num-prefixes": 4, "prefix-len": 30, "suffix-len": 10, "output-len": 5}
    flags = [part for name, value in lengths.items() for part in (f"--prefix-repetition-{name}", value)]
    requests = run("--dataset", "shared-prefix", "--num-prompts", 100, *flags)
    assert set(requests.input_tokens) == {40}
    assert ideal_reuse(requests).token_reuse == pytest.approx(96 * 30 / 4000)
    assert "holds 72.00% of the prompt tokens" in describe(requests)


def test_a_jsonl_data_set_gets_a_new_schedule(trace):
    requests = run("--dataset", "jsonl", "--dataset-path", trace, "--request-rate", 5, "--burstiness", "inf")
    assert len(requests) == 60
    assert requests.arrival_s == pytest.approx(np.arange(60) / 5)
    assert requests.blocks is not None
    assert run("--dataset", "jsonl", "--dataset-path", trace, "--num-prompts", 7).rows.tolist() == list(range(7))
    with pytest.raises(OptionError, match=r"--num-prompts 61: .* has 60 requests"):
        run("--dataset", "jsonl", "--dataset-path", trace, "--num-prompts", 61)


@pytest.mark.parametrize(
    ("arguments", "cv"),
    [
        (["--request-rate", 20], 1.0),
        (["--request-rate", 20, "--burstiness", 0.25], 2.0),
        (["--request-rate", 20, "--burstiness", "inf"], 0.0),
        (["--request-rate", 20, "--on-off", "5s:20s"], None),
    ],
)
def test_schedules_have_their_rate_and_variation(arguments, cv):
    requests = run("--num-prompts", 20_000, *arguments)
    statistics = arrival_statistics(requests.arrival_s)
    assert statistics.mean_rate_rps == pytest.approx(20, rel=0.2 if cv is None else 0.05)
    if cv is None:
        assert statistics.gap_cv > 3
    else:
        assert statistics.gap_cv == pytest.approx(cv, rel=0.05, abs=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on-off", "5s:20s"], "--on-off needs --request-rate"),
        (["--on-off", "5s:20s", "--request-rate", "inf"], "--on-off needs --request-rate"),
        (["--burstiness", 2], "--burstiness needs --request-rate"),
        (["--burstiness", 2, "--request-rate", "inf"], "--burstiness needs --request-rate"),
        (["--burstiness", 2, "--request-rate", 3, "--on-off", "1:1"], "--burstiness and --on-off"),
        (["--rate-steps", "1:1", "--request-rate", 3], "--rate-steps and --request-rate"),
        (["--rate-steps", "1:1", "--on-off", "1:1"], "--rate-steps and --on-off"),
        (["--ramp-up-strategy", "linear", "--rate-steps", "1:1"], "--rate-steps and --ramp-up-strategy"),
        (["--ramp-up-strategy", "linear", "--request-rate", 3], "--ramp-up-strategy and --request-rate"),
        (
            ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", 3],
            "--ramp-up-strategy linear needs --ramp-up-end-rps",
        ),
        (["--ramp-up-end-rps", 3], "--ramp-up-end-rps needs --ramp-up-strategy"),
        (["--rate-steps", "1:1", "--burstiness", "inf"], "--burstiness inf and --rate-steps"),
        (
            ["--dataset", "shared-prefix", "--random-input-len", 5],
            "--random-input-len is for --dataset random, this is",
        ),
        (["--dataset-path", "x"], "--dataset-path is for --dataset jsonl, this is --dataset random"),
        (["--dataset", "jsonl"], "--dataset jsonl needs --dataset-path"),
        (["--random-input-len", "3-5", "--random-range-ratio", 0.1], "--random-range-ratio and --random-input-len"),
        (["--overlong", "drop"], "--overlong drop needs --max-model-len"),
        (["--request-rate", "1e-9"], "the schedule lasts .* s, more than 1e\\+09 s"),
    ],
)
def test_contradictions_of_a_run_are_named(arguments, message):
    with pytest.raises(OptionError, match=message):
        run(*arguments)


def test_a_closed_loop_has_no_schedule():
    parser = Parser("program")
    add_synthetic_arguments(parser)
    parser.add_argument("--concurrency", type=int)
    assert workload(parser.parse_args(["--concurrency", "4"])).arrival_s.max() == 0
    for flag, value in (("--request-rate", "3"), ("--on-off", "1:1"), ("--rate-steps", "1:1")):
        with pytest.raises(OptionError, match=f"--concurrency 4 is a closed loop, {flag} makes an open one"):
            workload(parser.parse_args(["--concurrency", "4", flag, value]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--random-input-len", "0"], "--random-input-len is 0, it must be N, LOW-HIGH"),
        (["--random-input-len", "9" * 20], "--random-input-len is 9+, it must be .* 1 to 2147483647 tokens"),
        (["--random-input-len", "1-" + "9" * 20], "--random-input-len is 1-9+, it must be"),
        (["--random-output-len", "2147483648"], "--random-output-len is 2147483648, it must be"),
        (["--random-input-len", "9-5"], "--random-input-len is 9-5, it must be .* LOW not above HIGH"),
        (["--random-output-len", "normal:3"], "--random-output-len is normal:3, it must be N, LOW-HIGH"),
        (["--random-range-ratio", "1"], "--random-range-ratio is 1, it must be a number, at least 0 and below 1"),
        (["--request-rate", "0"], "--request-rate is 0, it must be a number above 0, or inf"),
        (["--on-off", "5s"], "--on-off is 5s, it must be two durations above 0, ON:OFF"),
        (["--on-off", "5s:0"], "--on-off is 5s:0, it must be two durations above 0"),
        (["--rate-steps", "5"], "--rate-steps is 5, it must be rates and durations above 0, RATE:TIME"),
    ],
)
def test_values_of_a_run_that_cannot_be_are_named_with_their_flag(arguments, message):
    with pytest.raises(ComplaintError, match=message):
        run(*arguments)


def test_the_tail_of_drawn_lengths_can_be_fitted():
    requests = run("--random-input-len", "lognormal:500:1", "--max-model-len", 1000, "--overlong", "clip")
    assert (requests.input_tokens + requests.output_tokens).max() == 1000
    assert len(requests) == 1000


def test_one_parser_takes_either_but_not_both(trace):
    parser = Parser("program")
    add_trace_arguments(parser)
    add_synthetic_arguments(parser)
    assert len(workload(parser.parse_args(["--trace", str(trace), "--max-model-len", "20"]))) == 12
    assert len(workload(parser.parse_args(["--dataset", "random", "--num-prompts", "5"]))) == 5
    with pytest.raises(OptionError, match=r"--trace .* and --dataset random both say what to run"):
        workload(parser.parse_args(["--trace", str(trace), "--dataset", "random"]))
    with pytest.raises(OptionError, match="give --trace or --dataset"):
        workload(parser.parse_args([]))
    with pytest.raises(OptionError, match="--rate does nothing with --dataset; leave it out"):
        workload(parser.parse_args(["--dataset", "random", "--rate", "4"]))
    for flag, value in (("--request-rate", "4"), ("--num-prompts", "5"), ("--ramp-up-end-rps", "5")):
        with pytest.raises(OptionError, match=f"{flag} does nothing with --trace; leave it out"):
            workload(parser.parse_args(["--trace", str(trace), flag, value]))


def test_flags_without_a_use_are_known():
    parser = Parser("program")
    add_trace_arguments(parser)
    add_synthetic_arguments(parser)
    known = {action.dest for action in parser._actions}
    both = {"help", "trace", "dataset", "seed", "max_model_len", "overlong", "trace_format", "dequantize"}
    assert known == {*TRACE_FLAGS, *SYNTHETIC_FLAGS, *both}
