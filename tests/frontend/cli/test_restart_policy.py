"""Tests of `RestartPolicy`: pauses between starts, and how long requests wait for a restart."""

import random
import signal

from frontend.cli.restart_policy import MAX_FAILED_STARTS, MAX_RESTART_S, RestartPolicy
from frontend.routing.supervision import EngineEnd

KILLED = -signal.SIGKILL


def end(policy, status, now_s, was_out_of_memory=False):
    return policy.ended(status, 1.0, now_s, was_out_of_memory=was_out_of_memory)


def test_engine_that_served_is_always_restarted_after_the_first_pause():
    policy = RestartPolicy(0.5)
    for number in range(20):
        policy.serves(f"engine-{number}", 10.0 * number)
        assert end(policy, KILLED, 10.0 * number + 1) == 0.5
        assert policy.note.restart_until_s == 10.0 * number + 1 + MAX_RESTART_S


def test_pauses_double_while_no_engine_serves():
    policy = RestartPolicy(0.5)
    assert [end(policy, 1, 0.0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_no_restart_is_expected_before_an_engine_has_served():
    policy = RestartPolicy(0.5)
    end(policy, 1, 5.0)
    assert policy.note.restart_until_s == 0.0


def test_failed_starts_end_the_expected_restart():
    policy = RestartPolicy(0.5)
    policy.serves("first", 0.0)
    end(policy, 1, 100.0)
    for number in range(MAX_FAILED_STARTS - 1):
        end(policy, 1, 101.0 + number)
    assert policy.note.restart_until_s == 100.0 + MAX_RESTART_S
    end(policy, 1, 110.0)
    assert policy.note.restart_until_s == 110.0
    end(policy, 1, 120.0)
    assert policy.note.restart_until_s == 110.0


def test_kills_during_a_start_do_not_count_as_failed_starts_up_to_the_limit():
    policy = RestartPolicy(0.5)
    policy.serves("first", 0.0)
    end(policy, KILLED, 100.0)
    for number in range(20):
        end(policy, KILLED, 200.0 + number)
    assert policy.note.restart_until_s == 100.0 + MAX_RESTART_S


def test_loads_that_run_out_of_memory_are_failed_starts():
    policy = RestartPolicy(0.5)
    policy.serves("first", 0.0)
    end(policy, KILLED, 100.0)
    for number in range(MAX_FAILED_STARTS):
        end(policy, KILLED, 101.0 + number, was_out_of_memory=True)
    assert policy.note.restart_until_s < 110.0


def test_engine_that_serves_ends_the_expected_restart_and_allows_the_next_one():
    policy = RestartPolicy(0.5)
    policy.serves("first", 0.0)
    end(policy, 1, 100.0)
    policy.serves("second", 107.0)
    assert policy.note.restart_until_s == 107.0
    end(policy, 1, 200.0)
    assert policy.note.restart_until_s == 200.0 + MAX_RESTART_S


def test_kill_counts_as_external_unless_memory_ran_out():
    policy = RestartPolicy(0.5)
    ends = [
        ("killed", KILLED, False, EngineEnd.KILLED),
        ("oom", KILLED, True, EngineEnd.FAILED),
        ("fault", -signal.SIGSEGV, False, EngineEnd.FAILED),
        ("status", 1, False, EngineEnd.FAILED),
    ]
    for instance_id, status, was_out_of_memory, _ in ends:
        policy.serves(instance_id, 1.0)
        end(policy, status, 2.0, was_out_of_memory=was_out_of_memory)
    assert policy.note.ends == {instance_id: expected for instance_id, _, _, expected in ends}


def test_note_is_bounded():
    policy = RestartPolicy(0.5)
    rng = random.Random(1)
    for number in range(1000):
        policy.serves(str(number), number)
        end(policy, rng.choice([1, KILLED]), number + 0.5)
    assert len(policy.note.ends) < 100
    assert "999" in policy.note.ends
