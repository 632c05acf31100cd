"""No bin is too thin, and nothing is counted twice."""

import random

import numpy as np
import pytest

from loadgen.report.plot_timeline import full_bins


def test_thin_neighbours_are_laid_together() -> None:
    found = full_bins(np.array([0.5, 1.5, 2.5, 2.6, 2.7, 3.5, 5.5]), [0, 1, 2, 3, 4, 5, 6], 2)
    assert [(low, high, members.tolist()) for low, high, members in found] == [
        (0.0, 2.0, [0, 1]),
        (2.0, 3.0, [2, 3, 4]),
        (3.0, 6.0, [5, 6]),
    ]


def test_what_is_left_at_the_end_joins_the_last_bin() -> None:
    found = full_bins(np.array([0.5, 0.6, 3.5]), [0, 1, 2, 3, 4], 2)
    assert [(low, high, members.tolist()) for low, high, members in found] == [(0.0, 4.0, [0, 1, 2])]


def test_too_few_samples_make_no_bin() -> None:
    assert full_bins(np.array([0.5, 0.6]), [0.0, 1.0], 3) == []
    assert full_bins(np.array([]), [0.0, 1.0], 1) == []


def test_the_upper_edge_is_in_and_what_is_outside_is_out() -> None:
    (only,) = full_bins(np.array([-0.1, 0.0, 1.0, 1.1]), [0.0, 1.0], 1)
    assert only.members.tolist() == [1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_is_in_exactly_one_bin_with_enough_others(seed: int) -> None:
    draw = random.Random(seed)
    places = [draw.expovariate(0.2) for _ in range(draw.randint(0, 200))]
    edges, least = [float(edge) for edge in range(0, 40, draw.randint(1, 5))], draw.randint(1, 40)
    inside = [index for index, place in enumerate(places) if edges[0] <= place <= edges[-1]]
    found = full_bins(np.array(places), edges, least)
    if len(inside) < least:
        assert found == []
        return
    assert sorted(index for one in found for index in one.members.tolist()) == inside
    assert all(len(one.members) >= least for one in found)
    assert [found[0].low, *(one.high for one in found)] == [*(one.low for one in found), edges[-1]]
    for one in found[:-1]:
        assert all(one.low <= places[index] < one.high for index in one.members.tolist())
