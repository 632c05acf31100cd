import numpy as np
import pytest

from loadgen.trace.stats import arrival_statistics, length_statistics


def test_schedule_against_a_count_by_hand():
    arrivals = arrival_statistics(np.array([5.0, 5.0, 5.5, 7.0, 10.5]))
    assert arrivals.count == 5
    assert arrivals.span_s == 5.5
    assert arrivals.mean_rate_rps == pytest.approx(5 / 5.5)
    assert arrivals.gap_cv == pytest.approx(np.std([0, 0.5, 1.5, 3.5]) / (5.5 / 4))
    assert arrivals.distinct_times == 4
    assert arrivals.zero_gap_share == 0.25
    counts = np.array([3, 0, 1, 0, 0])  # whole seconds from the first arrival: the last half second is none
    assert arrivals.bursts[1].idc == pytest.approx(counts.var() / counts.mean())
    assert arrivals.bursts[1].peak_to_mean == pytest.approx(3 / counts.mean())


@pytest.mark.parametrize(
    ("span_s", "widths"), [(4.9, []), (5.0, [1]), (49.0, [1]), (50.0, [1, 10]), (300, [1, 10, 60])]
)
def test_bins_that_a_schedule_is_too_short_for_have_no_figure(span_s, widths):
    assert list(arrival_statistics(np.linspace(0.0, span_s, 100)).bursts) == widths


def test_dispersion_equals_that_of_all_whole_bins_on_random_schedules():
    random = np.random.default_rng(0)
    for _ in range(20):
        times = np.cumsum(random.gamma(0.2, random.uniform(0.1, 20), 300)) + random.uniform(0, 1e6)
        for bin_s, burst in arrival_statistics(times).bursts.items():
            counts = np.zeros(int((times[-1] - times[0]) // bin_s) + 1)
            for time in times:
                counts[int((time - times[0]) // bin_s)] += 1
            counts = counts[:-1]
            assert burst.idc == pytest.approx(counts.var() / counts.mean())
            assert burst.peak_to_mean == pytest.approx(counts.max() / counts.mean())


def test_dispersion_of_a_metronome_is_0_and_that_of_a_poisson_process_1_wherever_they_end():
    assert arrival_statistics(np.arange(1050) / 100).bursts[1].idc == pytest.approx(0.0, abs=1e-9)
    random = np.random.default_rng(0)
    schedules = [np.cumsum(random.exponential(0.01, 1050)) for _ in range(200)]  # 10 and a half seconds each
    mean = np.mean([arrival_statistics(times).bursts[1].idc for times in schedules])
    assert mean == pytest.approx(0.9, abs=0.1)  # 1 - 1 / bins: the deviation is that of the population


def test_a_silence_of_thirty_years_takes_no_memory():
    assert arrival_statistics(np.array([0.0, 1e9])).bursts[1].idc == pytest.approx(1.0)


def test_what_is_undefined_is_none():
    for times in (np.zeros(1), np.zeros(7)):
        arrivals = arrival_statistics(times)
        assert arrivals.mean_rate_rps is None
        assert arrivals.gap_cv is None
        assert arrivals.bursts == {}
    assert arrival_statistics(np.zeros(1)).zero_gap_share is None


def test_lengths_against_sorted_values():
    lengths = length_statistics(np.array([4, 1, 3, 2, 100]))
    assert (lengths.sum, lengths.mean, lengths.min, lengths.max) == (110, 22.0, 1, 100)
    assert lengths.percentiles[50] == 3.0
    assert lengths.percentiles[90] == pytest.approx(4 + 0.6 * 96)
