from dataclasses import replace

import numpy as np
import pytest

from loadgen.arrivals import gamma
from loadgen.errors import OptionError
from loadgen.trace.reader import read_trace
from loadgen.trace.schema import Accounting, Blocks, Trace
from loadgen.trace.stats import arrival_statistics
from loadgen.trace.window import at_rate, at_speed, cut, dequantize, fit, from_zero, limit, scale_lengths, tick_s


def trace_of(arrival_s, input_tokens=None, output_tokens=None, block_tokens=None):
    """A trace whose prompts are blocks 100 * row, 100 * row + 1, ..."""
    count = len(arrival_s)
    inputs = np.array([10 * (row + 1) for row in range(count)] if input_tokens is None else input_tokens)
    blocks = None
    if block_tokens:
        numbers = -(-inputs // block_tokens)
        ids = [100 * row + block for row in range(count) for block in range(numbers[row])]
        blocks = Blocks(np.array(ids), np.concatenate(([0], np.cumsum(numbers))), block_tokens)
    return Trace(
        name="made",
        format="jsonl",
        digest="d",
        arrival_s=np.array(arrival_s, dtype=np.float64),
        input_tokens=inputs,
        output_tokens=np.full(count, 5) if output_tokens is None else np.array(output_tokens),
        rows=np.arange(count),
        accounting=Accounting(count),
        blocks=blocks,
        sessions=np.arange(count) % 2,
    )


def assert_sound(trace):
    count = len(trace)
    assert trace.accounting.kept == count
    assert len(trace.input_tokens) == len(trace.output_tokens) == len(trace.rows) == len(trace.sessions) == count
    assert (np.diff(trace.arrival_s) >= 0).all()
    assert trace.input_tokens.min() >= 1
    assert trace.output_tokens.min() >= 1
    if trace.blocks is not None:
        assert np.array_equal(np.diff(trace.blocks.offsets), -(-trace.input_tokens // trace.blocks.block_tokens))
        assert trace.blocks.offsets[-1] == len(trace.blocks.ids)


def test_a_window_is_contiguous_and_half_open():
    part = cut(trace_of([0, 1, 1, 2, 3, 4], block_tokens=16), 1, 3)
    assert_sound(part)
    assert part.rows.tolist() == [1, 2, 3]
    assert part.arrival_s.tolist() == [1.0, 1.0, 2.0]
    assert part.sessions.tolist() == [1, 0, 1]
    assert [part.blocks.of(index)[0] for index in range(3)] == [100, 200, 300]
    assert part.accounting.dropped == {"outside the window 1:3 s": 3}
    assert part.digest == "d"


def test_a_window_without_requests_says_where_they_are():
    with pytest.raises(OptionError, match=r"--window 5:9 holds none of the requests; they arrive from 0 s to 4\.5 s"):
        cut(trace_of([0, 4.5]), 5, 9)
    with pytest.raises(OptionError, match="--window 9:5 ends before it begins"):
        cut(trace_of([0, 4.5]), 9, 5)


def test_limit_keeps_the_first():
    part = limit(trace_of([0, 1, 2, 3]), 3)
    assert_sound(part)
    assert part.rows.tolist() == [0, 1, 2]
    assert part.accounting.dropped == {"after the first 3": 1}
    assert limit(trace_of([0, 1]), 9).accounting.dropped == {}
    with pytest.raises(OptionError, match="--limit is 0"):
        limit(trace_of([0, 1]), 0)


def test_accounts_add_up_over_several_steps():
    trace = fit(limit(cut(trace_of(range(100)), 10, 90), 50), 500)
    assert_sound(trace)
    assert trace.accounting.read == 100
    assert trace.accounting.dropped == {
        "outside the window 10:90 s": 20,
        "after the first 50": 30,
        "longer than 500 tokens": 11,
    }


def test_speed_divides_time():
    fast = at_speed(trace_of([0, 1, 4]), 4)
    assert fast.arrival_s.tolist() == [0.0, 0.25, 1.0]
    assert at_speed(fast, 0.5).speed == 2.0
    for speed in (0, -1, float("inf"), float("nan")):
        with pytest.raises(OptionError, match="--speed is"):
            at_speed(fast, speed)
    with pytest.raises(OptionError, match=r"--speed 1e-300 makes 1 s last more than 1e\+09 s"):
        at_speed(fast, 1e-300)


def test_rate_is_met_and_the_shape_stays():
    trace = replace(trace_of(range(500)), arrival_s=gamma(3.0, 500, burstiness=0.2, seed=1))
    before = arrival_statistics(trace.arrival_s)
    after = arrival_statistics(at_rate(trace, 17.0).arrival_s)
    assert after.mean_rate_rps == pytest.approx(17.0)
    assert after.gap_cv == pytest.approx(before.gap_cv)
    assert at_rate(trace, 17.0).speed == pytest.approx(17.0 / before.mean_rate_rps)
    with pytest.raises(OptionError, match="all 2 requests arrive at once"):
        at_rate(trace_of([2, 2]), 1)
    with pytest.raises(OptionError, match=r"a rate of 1 requests/s cannot .* there is only one request"):
        at_rate(trace_of([2]), 1)
    with pytest.raises(OptionError, match=r"a rate of 1e-300 requests/s makes 2 requests last more than 1e\+09 s"):
        at_rate(trace_of([2, 3]), 1e-300)
    with pytest.raises(OptionError, match="rate is 0"):
        at_rate(trace, 0)


def test_scaled_prompts_keep_their_blocks():
    trace = trace_of(
        range(6), input_tokens=[1, 511, 512, 513, 1024, 5000], output_tokens=[1, 3, 4, 12, 80, 1000], block_tokens=512
    )
    small = scale_lengths(trace, 0.125)
    assert_sound(small)
    assert small.blocks.block_tokens == 64
    assert np.array_equal(small.blocks.ids, trace.blocks.ids)
    assert small.input_tokens.tolist() == [1, 64, 64, 65, 128, 625]
    assert small.output_tokens.tolist() == [1, 1, 1, 2, 10, 125]
    assert_sound(scale_lengths(trace, 3))


def test_scaled_lengths_without_blocks_are_rounded_and_never_empty():
    small = scale_lengths(trace_of(range(3), input_tokens=[1, 16, 100], output_tokens=[2, 20, 7]), 0.1)
    assert small.input_tokens.tolist() == [1, 2, 10]
    assert small.output_tokens.tolist() == [1, 2, 1]


def test_a_scale_that_makes_no_whole_blocks_names_those_that_do():
    trace = trace_of([0], input_tokens=[32], block_tokens=16)
    with pytest.raises(OptionError) as refusal:
        scale_lengths(trace, 0.1)
    assert "0.0625 (1-token blocks) or 0.125 (2-token blocks)" in str(refusal.value)
    with pytest.raises(OptionError, match="--length-scale is -1"):
        scale_lengths(trace, -1)
    with pytest.raises(OptionError, match=r"--length-scale 1e\+30 makes 32 tokens more than 2147483647"):
        scale_lengths(trace, 1e30)


def test_fit_drops_clips_or_fails():
    trace = trace_of(range(4), input_tokens=[90, 96, 300, 5], output_tokens=[5, 5, 50, 400], block_tokens=16)
    dropped = fit(trace, 100)
    assert_sound(dropped)
    assert dropped.rows.tolist() == [0]
    assert dropped.accounting.dropped == {"longer than 100 tokens": 3}

    clipped = fit(trace, 100, "clip")
    assert_sound(clipped)
    assert clipped.input_tokens.tolist() == [90, 95, 50, 1]
    assert clipped.output_tokens.tolist() == [5, 5, 50, 99]
    assert clipped.blocks.of(2).tolist() == [200, 201, 202, 203]
    assert clipped.accounting.altered == {"clipped to 100 tokens": 3}
    assert clipped.accounting.dropped == {}

    with pytest.raises(OptionError, match=r"3 of 4 requests need more than --max-model-len 100, up to 405 \(row 3\)"):
        fit(trace, 100, "fail")
    with pytest.raises(
        OptionError, match="none of the 4 requests fits --max-model-len 20; the shortest needs 95 tokens"
    ):
        fit(trace, 20)
    with pytest.raises(OptionError, match="--max-model-len is 1"):
        fit(trace, 1)


@pytest.mark.parametrize("overlong", ["drop", "clip", "fail"])
def test_what_fits_exactly_stays_as_it_is(overlong):
    trace = trace_of([0, 1], input_tokens=[95, 60], output_tokens=[5, 40])
    assert fit(trace, 100, overlong) is trace


def test_from_zero():
    assert from_zero(trace_of([7, 7.5, 9])).arrival_s.tolist() == [0.0, 0.5, 2.0]


def quantised(seed, tick=3.0):
    """Poisson arrivals as a clock that ticks, with a millisecond of jitter, shows them; with empty ticks."""
    random = np.random.default_rng(seed)
    true = np.cumsum(random.exponential(0.3, 2000))
    true = true[(true < 200) | (true > 230)]
    numbers = np.floor(true / tick)
    jitter = random.integers(-1, 2, int(numbers[-1]) + 1) / 1e3
    return np.maximum(numbers * tick + jitter[numbers.astype(int)], 0)


@pytest.mark.parametrize("seed", range(5))
def test_dequantising_keeps_order_and_counts(seed):
    trace = trace_of(quantised(seed))
    assert tick_s(trace) == pytest.approx(3.0, abs=0.0011)
    spread = dequantize(trace, seed)
    assert_sound(spread)
    assert np.array_equal(spread.rows, trace.rows)
    assert np.array_equal(spread.input_tokens, trace.input_tokens)
    ticks = np.unique(trace.arrival_s)
    assert np.array_equal(
        np.searchsorted(ticks, spread.arrival_s, side="right"), np.searchsorted(ticks, trace.arrival_s, side="right")
    )
    assert (spread.arrival_s >= trace.arrival_s).all()
    assert (spread.arrival_s - trace.arrival_s).max() < 3.003
    statistics = arrival_statistics(spread.arrival_s)
    assert arrival_statistics(trace.arrival_s).bursts[1].idc > 5
    assert statistics.bursts[1].idc < 1.3
    assert tick_s(spread) is None
    (change,) = spread.accounting.altered
    assert change == f"spread over clock ticks of {tick_s(trace):g} s"


def test_spreading_is_uniform_over_the_tick():
    trace = trace_of(np.repeat(np.arange(1000) * 3.0, 10))
    offsets = dequantize(trace, 0).arrival_s - trace.arrival_s
    assert np.allclose(np.percentile(offsets, [10, 50, 90]), [0.3, 1.5, 2.7], atol=0.05)


def test_the_seed_decides_how_it_is_spread():
    trace = trace_of(quantised(0))
    assert np.array_equal(dequantize(trace, 3).arrival_s, dequantize(trace, 3).arrival_s)
    assert not np.array_equal(dequantize(trace, 3).arrival_s, dequantize(trace, 4).arrival_s)


@pytest.mark.parametrize(
    "arrival_s",
    [
        gamma(10, 1000, seed=1),
        np.round(gamma(10, 1000, seed=1), 3),  # milliseconds are no coarse clock
        np.repeat(gamma(1, 100, seed=1), 5),  # batches at moments of their own
        np.arange(50.0),  # a metronome
        np.zeros(50),
        np.zeros(1),
    ],
)
def test_a_fine_clock_is_left_alone(arrival_s):
    trace = trace_of(arrival_s)
    assert tick_s(trace) is None
    with pytest.raises(OptionError, match="the clock of made is not quantised"):
        dequantize(trace, 0)


def test_a_clock_of_whole_seconds_ticks():
    assert tick_s(trace_of(np.floor(gamma(2, 1000, seed=0)))) == 1.0


def test_a_trace_read_from_a_file_goes_through_every_step(write_rows):
    rows = [
        {"arrival_s": 3 * (i // 4), "input_tokens": 8 * (i % 5 + 1), "output_tokens": i % 7 + 1, "session": i % 3,
         "block_tokens": 8, "blocks": list(range(i % 5 + 1))}
        for i in range(80)
    ]  # fmt: skip
    trace = read_trace(write_rows(*rows))
    played = from_zero(at_rate(limit(fit(scale_lengths(cut(dequantize(trace, 1), 9, 45), 0.5), 20), 30), 5.0))
    assert_sound(played)
    assert arrival_statistics(played.arrival_s).mean_rate_rps == pytest.approx(5.0)
    assert played.digest == trace.digest
    for index, row in enumerate(played.rows):
        assert played.sessions[index] == rows[row]["session"]
        assert played.blocks.of(index).tolist() == rows[row]["blocks"]
        assert played.input_tokens[index] == rows[row]["input_tokens"] // 2
