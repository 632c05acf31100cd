"""Who goes on after a loss, in which order, and who is to blame for it."""

import asyncio
from itertools import pairwise

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.errors import EngineFault, EngineUnavailable, ServerDraining
from frontend.routing.failover import FailoverQueue
from frontend.routing.pending import PendingRequest
from frontend.routing.quarantine import CLEARED_TOKENS
from frontend.routing.supervision import EngineEnd

GONE = EngineUnavailable("gone")


class Owner:
    """A session that does nothing."""

    def grant(self, handle, num_tokens):
        pass

    def cancel(self, handle, reason):
        pass


class Place:
    """Engines that take everything, or nothing."""

    def __init__(self):
        self.there = True
        self.taken = []

    def __call__(self, pending):
        if self.there:
            self.taken.append(pending)
        return self.there

    def take(self):
        taken, self.taken = self.taken, []
        return taken


@pytest.fixture
def place():
    return Place()


def ignore(num_waiting):
    """What the failover tells of those that wait."""


@pytest.fixture
async def failover(place):
    failover = FailoverQueue(place, timeout_s=30.0, max_moves=3, note_waiting=ignore)
    yield failover
    failover.stop(ServerDraining("over"))


def requests(number):
    submission = pb.Submission(stops=pb.TokenStops(max_tokens=1000))
    return [PendingRequest(submission, None, window=1000, now_s=0.0) for _ in range(number)]


def generate(pending, num_tokens=CLEARED_TOKENS):
    pending.stream.push(pending.stream.num_tokens, [1] * num_tokens, None)


async def test_oldest_go_first_whatever_order_they_are_lost_in(failover, place):
    place.there = False
    some = requests(5)
    failover.lost([some[3], some[1]], GONE)
    failover.lost([some[4], some[0], some[2]], GONE)
    place.there = True
    failover.retry()
    assert place.take() == some
    assert failover.num_waiting == 0


async def test_first_loss_makes_nobody_suspect(failover, place):
    some = requests(5)
    failover.lost(some, GONE)
    assert place.take() == some


async def test_suspects_wait_for_their_turn_and_are_cleared_by_tokens(failover, place):
    some = requests(4)
    for _ in range(2):
        place.take()
        failover.lost(some, GONE)
    assert place.take() == some[:1]
    generate(some[0], CLEARED_TOKENS - 1)
    failover.retry()
    assert place.take() == []
    generate(some[0], 1)
    failover.retry()
    assert place.take() == some[1:3]  # one is through: two at once
    some[1].stream.fail(GONE)  # or ended in any other way
    failover.retry()
    assert place.take() == some[3:]


async def test_who_waits_for_its_turn_does_not_run_out_of_time_to_find_an_engine(place):
    failover = FailoverQueue(place, timeout_s=0.05, max_moves=3, note_waiting=ignore)
    first, second = requests(2)
    for _ in range(2):
        failover.lost([first, second], GONE)
    place.take()
    await asyncio.sleep(0.15)  # the timeout, three times
    assert not second.stream.closed
    generate(first)
    async with asyncio.timeout(5):
        while not place.taken:
            await asyncio.sleep(0.001)  # for the failover's timer
    assert place.take() == [second]
    failover.stop(ServerDraining("over"))


async def test_many_that_are_refused_at_once_are_tried_again_together(failover, place):
    """Not every one of them each time that one comes back: with 1000 that would be a million."""
    some = requests(1000)
    failover.lost(some, GONE)
    place.take()
    for pending in some:
        failover.returned(pending, GONE, was_taken=False, try_at_once=True)
    assert place.take() == []
    async with asyncio.timeout(5):
        while failover.num_waiting:
            await asyncio.sleep(0)
    assert place.take() == some


async def test_who_is_refused_everywhere_is_tried_ever_less_often(failover, place, monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr("frontend.routing.failover.time.monotonic", lambda: now_s)
    (pending,) = requests(1)
    failover.lost([pending], GONE)
    tries_s = []
    while now_s < 1020.0:
        if place.take():
            tries_s.append(now_s)
            failover.returned(pending, GONE, was_taken=False, try_at_once=False)
        now_s += 0.01
        failover.retry()
    gaps_s = [later - earlier for earlier, later in pairwise(tries_s)]
    assert 0.1 <= gaps_s[0] <= 0.26
    assert all(0.95 <= gap_s <= 2.02 for gap_s in gaps_s[4:])
    assert len(tries_s) < 30


async def test_loss_under_a_trial_counts_for_the_one_on_trial_alone(failover, place):
    suspect, *others = requests(4)
    for _ in range(2):
        failover.lost([suspect], GONE)
    for _ in range(2):
        for pending in others:
            generate(pending)
        failover.lost([suspect, *others], GONE)
    assert [pending.num_losses for pending in others] == [0, 0, 0]
    assert isinstance(suspect.stream._failure, EngineFault)
    assert not any(pending.stream.closed for pending in others)


async def test_new_request_beside_the_one_on_trial_may_be_the_cause_as_well(failover, place):
    """The innocent suspect must not fail for what a new one does, nor the new one stay unknown."""
    suspect, new = requests(2)
    for _ in range(2):
        failover.lost([suspect], GONE)
    for _ in range(2):
        failover.lost([suspect, new], GONE)
    assert (suspect.num_losses, new.num_losses) == (4, 2)
    assert not suspect.stream.closed
    place.take()
    generate(suspect)
    failover.retry()
    assert place.take() == [new]


async def test_loss_after_a_trial_that_was_passed_counts_for_all(failover, place):
    suspect, *others = requests(3)
    for _ in range(2):
        failover.lost([suspect], GONE)
    generate(suspect)
    failover.lost([suspect, *others], GONE)
    assert [pending.num_losses for pending in (suspect, *others)] == [1, 1, 1]


async def test_suspect_that_finds_no_engine_does_not_keep_the_others_from_going(failover, place):
    some = requests(2)
    for _ in range(2):
        failover.lost(some, GONE)
    place.take()
    place.there = False
    failover.lost(some[:1], GONE)  # it was on trial
    place.there = True
    failover.retry()
    assert place.take() == some[:1]
    some[0].stream.fail(GONE)
    failover.retry()
    assert place.take() == some[1:]


async def test_suspect_that_goes_alone_is_not_overtaken_for_ever(failover, place):
    passed, there, alone, late = requests(4)
    for _ in range(2):
        failover.lost([passed, there], GONE)
    generate(passed)
    failover.retry()  # two may be on trial now, and one is
    alone.goes_alone = True
    for pending in (alone, late):
        for _ in range(2):
            failover.lost([pending], GONE)
    place.take()
    failover.retry()
    assert place.take() == []
    generate(there)
    failover.retry()
    assert place.take() == [alone]
    generate(alone)
    failover.retry()
    assert place.take() == [late]


async def test_engine_that_has_taken_it_ends_what_was_noted_of_refusals(failover, place):
    (pending,) = requests(1)
    failover.lost([pending], GONE)
    pending.refused_by.add("another engine")
    failover.returned(pending, GONE, was_taken=False, try_at_once=False)
    assert pending.num_pauses == 1
    pending.stream.bind(1, Owner())
    failover.lost([pending], GONE)
    assert (pending.num_pauses, pending.refused_by) == (0, set())


async def test_suspect_that_waits_for_its_reader_does_not_keep_the_others_from_going(failover, place):
    """Nobody computes anything for it: until its reader comes it can neither pass its trial nor fail."""
    submission = pb.Submission(stops=pb.TokenStops(max_tokens=1000))
    suspect = PendingRequest(submission, None, window=4, now_s=0.0)
    (other,) = requests(1)
    for _ in range(2):
        failover.lost([suspect, other], GONE)
    assert place.take()[-1] is suspect
    suspect.stream.bind(1, Owner())
    generate(suspect, 4)
    failover.retry()
    assert place.take() == [other]
    failover.lost([suspect], GONE)
    assert suspect.num_losses == 2  # nothing of it was in a step


async def test_stopped_mover_fails_what_waits_and_what_comes(place):
    told = []
    failover = FailoverQueue(place, timeout_s=30.0, max_moves=3, note_waiting=told.append)
    place.there = False
    first, second, third = requests(3)
    failover.lost([first], GONE)
    assert told[-1] == 1
    failover.stop(ServerDraining("over"))
    assert told[-1] == 0
    failover.lost([second], GONE)
    assert all(isinstance(pending.stream._failure, ServerDraining) for pending in (first, second))
    with pytest.raises(ServerDraining):
        failover.submit(third, GONE)


class Supervisor:
    """Says when a restart was or is to be expected, and why engines have ended."""

    def __init__(self):
        self.until_s = 0.0
        self.end = EngineEnd.KILLED

    def restart_until_s(self):
        return self.until_s

    def end_of(self, instance_id):
        return self.end


@pytest.fixture
def clock(monkeypatch):
    """The failover's clock; it stands until it is set."""
    times = [1000.0]
    monkeypatch.setattr("frontend.routing.failover.time.monotonic", lambda: times[0])
    return times


@pytest.fixture
async def supervised(place, clock):
    supervisor = Supervisor()
    failover = FailoverQueue(place, timeout_s=30.0, max_moves=3, note_waiting=ignore, supervision=supervisor)
    yield failover, supervisor
    failover.stop(ServerDraining("over"))


async def test_the_timeout_does_not_run_while_a_restart_is_to_be_expected(supervised, place, clock):
    failover, supervisor = supervised
    place.there = False
    supervisor.until_s = 1600.0
    (pending,) = requests(1)
    failover.lost([pending], GONE)
    for now_s in range(1000, 1200):
        clock[0] = now_s
        failover.retry()
        assert not pending.stream.closed
    supervisor.until_s = 1195.5  # and now it is not any more: the timeout begins there
    clock[0] = 1225.4
    failover.retry()
    assert not pending.stream.closed
    clock[0] = 1225.6
    failover.retry()
    assert pending.stream._failure is GONE


async def test_a_start_that_never_succeeds_holds_requests_no_longer_than_its_bound_and_the_timeout(
    supervised, place, clock
):
    failover, supervisor = supervised
    place.there = False
    supervisor.until_s = 1600.0
    (pending,) = requests(1)
    failover.lost([pending], GONE)
    while not pending.stream.closed:
        clock[0] += 1.0
        failover.retry()
    assert 1630.0 <= clock[0] <= 1631.0


async def test_without_a_failover_timeout_nobody_waits_for_a_restart(place, clock):
    supervisor = Supervisor()
    supervisor.until_s = 1600.0
    failover = FailoverQueue(place, timeout_s=0.0, max_moves=3, note_waiting=ignore, supervision=supervisor)
    place.there = False
    (pending,) = requests(1)
    failover.lost([pending], GONE)
    assert pending.stream._failure is GONE


async def test_twenty_kills_in_a_row_make_nobody_suspect(supervised, place):
    failover, _ = supervised
    some = requests(5)
    for _ in range(20):
        failover.lost(some, GONE)
        assert place.take() == some, "all of them go on at once"
    assert not any(pending.num_losses for pending in some)


async def test_what_is_killed_again_and_again_is_suspected_in_the_end(supervised, place):
    """A watcher of memory in user space kills as an operator does."""
    failover, _ = supervised
    (pending,) = requests(1)
    num_kills = 0
    while not pending.stream.closed:
        num_kills += 1
        failover.lost([pending], GONE)
    assert isinstance(pending.stream._failure, EngineFault)
    assert 32 < num_kills < 40


async def test_blame_waits_until_it_is_known_why_the_engine_has_ended(supervised, place, clock):
    failover, supervisor = supervised
    poison, other = requests(2)
    supervisor.end = EngineEnd.FAILED
    for _ in range(3):
        failover.lost([poison], GONE)
        place.take()
    place.there = False
    supervisor.end = None
    failover.lost([poison], GONE)
    assert not poison.stream.closed
    supervisor.end = EngineEnd.KILLED  # it was not the request this time
    place.there = True
    failover.retry()
    assert place.take() == [poison]
    supervisor.end = None
    place.there = False
    failover.lost([poison], GONE)
    supervisor.end = EngineEnd.FAILED
    failover.retry()
    assert isinstance(poison.stream._failure, EngineFault)
    assert failover.num_waiting == 0
    failover.lost([other], GONE)
    assert not other.stream.closed
