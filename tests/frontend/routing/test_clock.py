"""Time accounting over several engines: each second counts once, under the right name."""

from frontend.routing.clock import RequestClock
from frontend.types import EngineAccount, EngineTime


def test_account_of_a_single_engine_is_unchanged():
    clock = RequestClock()
    clock.submit(10.0)
    assert clock.engine_time(11.0) is None
    account = EngineAccount(queued_s=1.0, prefill_s=2.0, parked_s=3.0, num_output_tokens=4)
    clock.report(account)
    assert clock.account(account) is account
    assert clock.engine_time(20.0).queued_s == 1.0


def test_time_from_the_loss_to_the_first_step_of_the_next_engine_is_moved():
    clock = RequestClock()
    clock.submit(10.0)
    clock.report(EngineTime(queued_s=1.0, prefill_s=2.0, preempted_s=0.5, num_preemptions=1))
    clock.reader_left(19.0)
    clock.pause(19.75)
    clock.lose(20.0)
    assert clock.engine_time(22.0) == EngineTime(
        queued_s=1.0, prefill_s=2.0, preempted_s=0.5, num_preemptions=1, parked_s=0.25, moved_s=2.0
    )
    clock.submit(23.0)
    last = EngineAccount(queued_s=4.0, prefill_s=8.0, parked_s=16.0, num_output_tokens=9)
    clock.report(last)
    assert clock.account(last) == EngineAccount(
        queued_s=1.0,
        prefill_s=10.0,
        preempted_s=0.5,
        num_preemptions=1,
        parked_s=16.25,
        moved_s=3.0 + 4.0,
        num_output_tokens=9,
    )


def test_time_at_an_engine_that_reported_nothing_is_queued():
    clock = RequestClock()
    clock.submit(10.0)
    clock.lose(13.0)  # the first engine: in its queue, as far as is known
    clock.submit(14.0)
    clock.lose(19.0)  # the second engine
    clock.submit(20.0)
    assert clock.engine_time(21.0) == EngineTime(queued_s=3.0, prefill_s=0.0, moved_s=1.0 + 5.0 + 1.0)


def test_wait_for_the_first_engine_is_queued():
    clock = RequestClock()
    clock.reject(10.0)  # there was no engine
    clock.submit(12.0)
    clock.reject(13.0)  # and this one was full
    clock.submit(14.0)
    last = EngineAccount(queued_s=0.5, prefill_s=1.0, num_output_tokens=3)
    clock.report(last)
    assert clock.engine_time(20.0) == EngineTime(queued_s=4.5, prefill_s=1.0)
    assert clock.account(last) == EngineAccount(queued_s=4.5, prefill_s=1.0, num_output_tokens=3)


def test_rejection_after_a_loss_adds_to_the_move():
    clock = RequestClock()
    clock.submit(10.0)
    clock.report(EngineTime(queued_s=1.0, prefill_s=2.0))
    clock.lose(14.0)
    clock.submit(15.0)
    clock.reject(16.0)
    assert clock.engine_time(17.0) == EngineTime(queued_s=1.0, prefill_s=2.0, moved_s=3.0)
    clock.submit(18.0)
    clock.report(EngineTime(queued_s=0.5, prefill_s=1.0))
    assert clock.engine_time(20.0) == EngineTime(queued_s=1.0, prefill_s=3.0, moved_s=4.5)


def test_time_since_the_last_step_of_a_hanging_engine_is_moved_and_not_decoding():
    clock = RequestClock()
    clock.submit(10.0)
    clock.report(EngineTime(queued_s=1.0, prefill_s=2.0))
    clock.lose(20.0, heard_at_s=15.0)
    clock.submit(20.5)
    clock.report(EngineTime(queued_s=0.25, prefill_s=1.0))
    assert clock.engine_time(30.0) == EngineTime(queued_s=1.0, prefill_s=3.0, moved_s=5.0 + 0.5 + 0.25)


def test_request_that_a_hanging_engine_never_ran_is_queued_until_its_last_message():
    clock = RequestClock()
    clock.submit(10.0)
    clock.lose(20.0, heard_at_s=16.0)
    assert clock.engine_time(21.0) == EngineTime(queued_s=6.0, prefill_s=0.0, moved_s=5.0)
    clock.submit(21.0)
    clock.lose(30.0, heard_at_s=25.0)
    assert clock.engine_time(30.0) == EngineTime(queued_s=6.0, prefill_s=0.0, moved_s=5.0 + 9.0)


def test_engine_silent_since_before_the_request_adds_no_queue_time():
    clock = RequestClock()
    clock.submit(10.0)
    clock.lose(14.0, heard_at_s=3.0)
    assert clock.engine_time(14.0) == EngineTime(queued_s=0.0, prefill_s=0.0, moved_s=4.0)


def test_a_request_that_got_credit_is_paused_no_more():
    """It may be in the step that crashes an engine: only one without credit is above suspicion."""
    clock = RequestClock()
    clock.submit(0.0)
    clock.pause(1.0)
    assert clock.is_paused
    clock.resume(2.0)
    assert not clock.is_paused


def test_only_the_time_in_which_the_reader_was_busy_counts_as_its_wait():
    clock = RequestClock()
    clock.submit(0.0)
    clock.pause(1.0)
    clock.reader_left(2.0)
    clock.reader_came(5.0)
    assert clock.client_wait_s(9.0) == 3.0
