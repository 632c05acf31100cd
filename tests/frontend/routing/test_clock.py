"""The account over several engines: each second once, under the name that fits."""

from frontend.routing.clock import EngineTimes
from frontend.types import EngineAccount, EngineTime


def test_one_engines_own_account_is_passed_on_as_it_is():
    times = EngineTimes()
    times.submit(10.0)
    assert times.so_far(11.0) is None
    account = EngineAccount(queued_s=1.0, prefill_s=2.0, parked_s=3.0, num_output_tokens=4)
    times.tell(account)
    assert times.account(account) is account
    assert times.so_far(20.0).queued_s == 1.0


def test_from_the_loss_to_the_first_step_of_the_next_engine_is_moved():
    times = EngineTimes()
    times.submit(10.0)
    times.tell(EngineTime(queued_s=1.0, prefill_s=2.0, preempted_s=0.5, num_preemptions=1))
    times.lose(20.0, silent_since_s=20.0, parked_s=0.25)
    assert times.so_far(22.0) == EngineTime(
        queued_s=1.0, prefill_s=2.0, preempted_s=0.5, num_preemptions=1, parked_s=0.25, moved_s=2.0
    )
    times.submit(23.0)
    last = EngineAccount(queued_s=4.0, prefill_s=8.0, parked_s=16.0, num_output_tokens=9)
    times.tell(last)
    assert times.account(last) == EngineAccount(
        queued_s=1.0,
        prefill_s=10.0,
        preempted_s=0.5,
        num_preemptions=1,
        parked_s=16.25,
        moved_s=3.0 + 4.0,
        num_output_tokens=9,
    )


def test_time_in_an_engine_that_said_nothing_was_spent_waiting():
    times = EngineTimes()
    times.submit(10.0)
    times.lose(13.0, silent_since_s=13.0, parked_s=0.0)  # the first one: in its queue, as far as anybody knows
    times.submit(14.0)
    times.lose(19.0, silent_since_s=19.0, parked_s=0.0)  # the second one
    times.submit(20.0)
    assert times.so_far(21.0) == EngineTime(queued_s=3.0, prefill_s=0.0, moved_s=1.0 + 5.0 + 1.0)


def test_request_that_no_engine_took_was_in_queues():
    times = EngineTimes()
    times.refuse(10.0)  # there was none
    times.submit(12.0)
    times.refuse(13.0)  # and this one was full
    times.submit(14.0)
    last = EngineAccount(queued_s=0.5, prefill_s=1.0, num_output_tokens=3)
    times.tell(last)
    assert times.so_far(20.0) == EngineTime(queued_s=4.5, prefill_s=1.0)
    assert times.account(last) == EngineAccount(queued_s=4.5, prefill_s=1.0, num_output_tokens=3)


def test_engine_that_refuses_after_a_loss_adds_to_the_move():
    times = EngineTimes()
    times.submit(10.0)
    times.tell(EngineTime(queued_s=1.0, prefill_s=2.0))
    times.lose(14.0, silent_since_s=14.0, parked_s=0.0)
    times.submit(15.0)
    times.refuse(16.0)
    assert times.so_far(17.0) == EngineTime(queued_s=1.0, prefill_s=2.0, moved_s=3.0)
    times.submit(18.0)
    times.tell(EngineTime(queued_s=0.5, prefill_s=1.0))
    assert times.so_far(20.0) == EngineTime(queued_s=1.0, prefill_s=3.0, moved_s=4.5)


def test_from_the_last_word_of_an_engine_that_hangs_is_moved_and_not_decoding():
    times = EngineTimes()
    times.submit(10.0)
    times.tell(EngineTime(queued_s=1.0, prefill_s=2.0))
    times.lose(20.0, silent_since_s=15.0, parked_s=0.25)
    times.submit(20.5)
    times.tell(EngineTime(queued_s=0.25, prefill_s=1.0))
    assert times.so_far(30.0) == EngineTime(queued_s=1.0, prefill_s=3.0, parked_s=0.25, moved_s=5.0 + 0.5 + 0.25)


def test_request_that_a_hanging_engine_never_ran_was_in_its_queue_until_that_fell_silent():
    times = EngineTimes()
    times.submit(10.0)
    times.lose(20.0, silent_since_s=16.0, parked_s=0.0)
    assert times.so_far(21.0) == EngineTime(queued_s=6.0, prefill_s=0.0, moved_s=5.0)
    times.submit(21.0)
    times.lose(30.0, silent_since_s=25.0, parked_s=0.0)
    assert times.so_far(30.0) == EngineTime(queued_s=6.0, prefill_s=0.0, moved_s=5.0 + 9.0)


def test_engine_that_was_silent_before_it_got_the_request_has_no_part_in_the_queue():
    times = EngineTimes()
    times.submit(10.0)
    times.lose(14.0, silent_since_s=3.0, parked_s=0.0)
    assert times.so_far(14.0) == EngineTime(queued_s=0.0, prefill_s=0.0, moved_s=4.0)
