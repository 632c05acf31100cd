"""Tests of `Heartbeat`: when a step loop counts as hanging."""

from frontend.routing.heartbeat import Heartbeat

BEAT_S = 0.25


def stops_after_s(heartbeat, *, num_turns, until_s=1000.0):
    """Returns the seconds of heartbeats until the loop counts as hanging; None if it never does."""
    now_s = 0.0
    while now_s < until_s:
        now_s += BEAT_S
        heartbeat.note(num_turns(now_s), now_s)
        if heartbeat.has_stopped(now_s):
            return now_s
    return None


def test_hanging_loop_is_detected_after_the_timeout():
    heartbeat = Heartbeat(timeout_s=60.0, num_turns=7, now_s=0.0)
    assert stops_after_s(heartbeat, num_turns=lambda now_s: 7) == 60.0


def test_long_steps_are_not_a_hang():
    heartbeat = Heartbeat(timeout_s=60.0, num_turns=0, now_s=0.0)
    assert stops_after_s(heartbeat, num_turns=lambda now_s: now_s // 59) is None


def test_without_a_timeout_nothing_is_a_hang():
    heartbeat = Heartbeat(timeout_s=0.0, num_turns=0, now_s=0.0)
    assert stops_after_s(heartbeat, num_turns=lambda now_s: 0) is None


def test_engine_that_reports_no_turns_never_hangs():
    assert stops_after_s(Heartbeat(timeout_s=60.0, num_turns=0, now_s=0.0), num_turns=lambda now_s: 0) is None


def test_delay_of_the_frontend_is_not_a_hang_of_the_engine():
    """It first reads the heartbeats that arrived during the delay."""
    heartbeat = Heartbeat(timeout_s=60.0, num_turns=0, now_s=0.0)
    for _ in range(3):
        heartbeat.note(5, 500.0)
        assert not heartbeat.has_stopped(500.0)
    heartbeat.note(900, 500.1)
    assert not heartbeat.has_stopped(500.1)
