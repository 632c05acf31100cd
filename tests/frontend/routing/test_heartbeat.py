"""When a step loop counts as hung."""

from frontend.routing.heartbeat import Heartbeat

BEAT_S = 0.25


def stops_after_s(heartbeat, *, num_turns, until_s=1000.0):
    """Seconds of heartbeats that all say the same until it has stopped; None: it has not."""
    now_s = 0.0
    while now_s < until_s:
        now_s += BEAT_S
        heartbeat.note(num_turns(now_s), now_s)
        if heartbeat.has_stopped(now_s):
            return now_s
    return None


def test_loop_that_stands_still_has_stopped_after_the_timeout():
    heartbeat = Heartbeat(timeout_s=60.0, num_turns=7, now_s=0.0)
    assert stops_after_s(heartbeat, num_turns=lambda now_s: 7) == 60.0


def test_long_steps_are_no_hang():
    heartbeat = Heartbeat(timeout_s=60.0, num_turns=0, now_s=0.0)
    assert stops_after_s(heartbeat, num_turns=lambda now_s: now_s // 59) is None


def test_without_a_timeout_nothing_is_a_hang():
    heartbeat = Heartbeat(timeout_s=0.0, num_turns=0, now_s=0.0)
    assert stops_after_s(heartbeat, num_turns=lambda now_s: 0) is None


def test_engine_that_does_not_tell_its_turns_is_not_thought_to_hang():
    assert stops_after_s(Heartbeat(timeout_s=60.0, num_turns=0, now_s=0.0), num_turns=lambda now_s: 0) is None


def test_frontend_that_was_held_up_itself_does_not_blame_the_engine():
    """What it finds first, when it comes back, are heartbeats from before."""
    heartbeat = Heartbeat(timeout_s=60.0, num_turns=0, now_s=0.0)
    for _ in range(3):
        heartbeat.note(5, 500.0)
        assert not heartbeat.has_stopped(500.0)
    heartbeat.note(900, 500.1)
    assert not heartbeat.has_stopped(500.1)
