"""Bookings are made within the horizon, below the capacity of a slot, and are forgotten when they are over."""

import random

import pytest

from frontend.generation.retry_calendar import RetryCalendar

RATE = 1000.0  # 200 tokens fit a slot of 0.25 s at 80 %


def book(calendar, booking, num_tokens, *, now_s=0.0, earliest_s=0.0, rate=RATE):
    return calendar.book(booking, num_tokens, earliest_s=earliest_s, now_s=now_s, tokens_per_second=rate)


def test_the_first_booking_gets_the_next_slot():
    assert book(RetryCalendar(), 1, 100) == 0.25


def test_a_booking_is_not_earlier_than_asked():
    assert book(RetryCalendar(), 1, 100, earliest_s=1.1) == 1.25


def test_slots_hold_80_percent_of_the_rate():
    calendar = RetryCalendar()
    assert [book(calendar, number, 100) for number in range(5)] == [0.25, 0.25, 0.5, 0.5, 0.75]


def test_a_long_prompt_takes_several_slots():
    calendar = RetryCalendar()
    assert book(calendar, 1, 500) == 0.25
    assert calendar.num_slots == 3
    assert book(calendar, 2, 200) == 1.0  # the third slot has room for 100 only
    assert book(calendar, 3, 100) == 0.75


def test_no_slot_is_booked_beyond_the_horizon():
    calendar = RetryCalendar(horizon_s=1.0)
    assert [book(calendar, number, 200) for number in range(5)] == [0.25, 0.5, 0.75, 1.0, None]
    assert calendar.num_bookings == 4


def test_a_prompt_that_fills_more_than_the_horizon_gets_no_slot():
    calendar = RetryCalendar(horizon_s=1.0)
    assert book(calendar, 1, 10**9) is None
    assert calendar.num_slots == 0


def test_a_booking_beyond_the_horizon_is_not_asked_for():
    assert book(RetryCalendar(), 1, 1, earliest_s=31.0) is None


def test_the_horizon_moves_with_time():
    calendar = RetryCalendar(horizon_s=0.5)
    assert [book(calendar, number, 200) for number in range(3)] == [0.25, 0.5, None]
    assert book(calendar, 3, 200, now_s=0.3) == 0.75


def test_released_tokens_can_be_booked_again():
    calendar = RetryCalendar()
    book(calendar, 1, 200)
    calendar.release(1)
    calendar.release(1)
    calendar.release(99)
    assert calendar.num_slots == 0
    assert book(calendar, 2, 200) == 0.25


def test_booked_tokens_are_those_that_come_before_a_time():
    calendar = RetryCalendar()
    for number in range(4):
        book(calendar, number, 200)
    assert calendar.booked_tokens(0.6, 0.0) == 400
    assert calendar.booked_tokens(100.0, 0.0) == 800


def test_the_previous_slot_still_counts_and_older_ones_are_forgotten():
    calendar = RetryCalendar()
    book(calendar, 1, 200)
    book(calendar, 2, 200)
    assert calendar.booked_tokens(10.0, 0.6) == 400
    assert calendar.booked_tokens(10.0, 0.8) == 200 * calendar.kept_share
    assert calendar.num_bookings == 1
    assert calendar.booked_tokens(10.0, 500.0) == 0
    assert calendar.num_bookings == 0


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_keep_the_books(seed):
    rng = random.Random(seed)
    calendar = RetryCalendar(horizon_s=rng.choice([1.0, 7.3, 30.0]), share=rng.choice([0.3, 0.8, 1.0]))
    now_s, booked = 0.0, []
    for number in range(2000):
        now_s += rng.choice([0.0, 0.01, 0.3, 5.0]) * rng.random()
        if rng.random() < 0.7:
            rate = rng.choice([50.0, 1000.0, 20_000.0])
            slot_s = book(
                calendar, number, rng.randint(1, 3000), now_s=now_s, earliest_s=now_s + rng.random() * 4, rate=rate
            )
            if slot_s is not None:
                assert slot_s > now_s
                booked.append(number)
        elif booked:
            calendar.release(booked.pop(rng.randrange(len(booked))))
        calendar.check_integrity()


def test_bookings_that_nobody_claims_stop_counting_as_load():
    calendar = RetryCalendar()
    for number in range(200):
        now_s = 0.25 * number
        assert book(calendar, number, 200, now_s=now_s) is not None
    assert calendar.kept_share < 0.001
    assert calendar.booked_tokens(1e9, now_s) < 1.0


def test_claimed_bookings_count_in_full():
    calendar = RetryCalendar()
    for number in range(200):
        now_s = 0.25 * number
        book(calendar, number, 200, now_s=now_s)
        calendar.release(number)
    assert calendar.kept_share == 1.0
    book(calendar, 1000, 200, now_s=now_s)
    assert calendar.booked_tokens(1e9, now_s) == 200


def test_the_share_of_claimed_bookings_is_learned():
    calendar = RetryCalendar()
    for number in range(800):
        now_s = 0.25 * number
        book(calendar, number, 100, now_s=now_s)
        if number % 4 == 0:
            calendar.release(number)
    assert calendar.kept_share == pytest.approx(0.25, abs=0.1)


def test_tickets_redeemed_at_another_process_balance_those_lost_to_it():
    here, there = RetryCalendar(), RetryCalendar()
    for number in range(400):
        now_s = 0.25 * number
        for calendar, other in ((here, there), (there, here)):
            book(calendar, number, 100, now_s=now_s)
            if number > 2:
                other.release(10**6 + number)
    assert 0.3 < here.kept_share < 0.7
