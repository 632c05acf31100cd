"""Predictions of first tokens."""

import pytest

from frontend.routing.forecast import EngineForecast, FleetForecast

FAST = EngineForecast(1000.0, 300, 0.02, 0.005)
SLOW = EngineForecast(100.0, 0, 0.1, 0.01)


def test_a_first_token_waits_for_the_tokens_ahead_and_one_and_a_half_steps():
    assert FAST.first_token_s(100) == pytest.approx(0.43)
    assert FAST.first_token_s(100, computed_share=0.5) == pytest.approx(0.23)


def test_a_request_goes_where_its_first_token_comes_first():
    fleet = FleetForecast((FAST, SLOW))
    assert fleet.first_token_s(1) == pytest.approx(0.16)
    assert fleet.first_token_s(100) == pytest.approx(0.43)
    assert fleet.alone_s(100) == pytest.approx(0.13)
    assert fleet.tokens_per_second == 1100
    assert fleet.min_step_s == 0.005


def test_nothing_is_predicted_while_an_engine_is_not_measured():
    assert FleetForecast((FAST, SLOW._replace(tokens_per_second=0.0))).tokens_per_second == 0
    assert FleetForecast(()).tokens_per_second == 0
    assert FleetForecast(()).min_step_s == 0
