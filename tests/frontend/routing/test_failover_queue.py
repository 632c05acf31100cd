"""Who goes on after a loss, in which order, and who is to blame for it."""

import asyncio
from itertools import pairwise

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.errors import EngineFault, EngineUnavailable, ServerDraining
from frontend.routing.failover import Mover
from frontend.routing.pending import Ticket
from frontend.routing.quarantine import CLEARED_TOKENS
from frontend.supervision import EngineEnd

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

    def __call__(self, ticket):
        if self.there:
            self.taken.append(ticket)
        return self.there

    def take(self):
        taken, self.taken = self.taken, []
        return taken


@pytest.fixture
def place():
    return Place()


def ignore(num_waiting):
    """What the mover tells of those that wait."""


@pytest.fixture
async def mover(place):
    mover = Mover(place, timeout_s=30.0, max_moves=3, note_waiting=ignore)
    yield mover
    mover.stop(ServerDraining("over"))


def tickets(number):
    submission = pb.Submission(stops=pb.TokenStops(max_tokens=1000))
    return [Ticket(submission, None, window=1000, now_s=0.0) for _ in range(number)]


def generate(ticket, num_tokens=CLEARED_TOKENS):
    ticket.stream.push(ticket.stream.num_tokens, [1] * num_tokens, None)


async def test_oldest_go_first_whatever_order_they_are_lost_in(mover, place):
    place.there = False
    some = tickets(5)
    mover.lost([some[3], some[1]], GONE)
    mover.lost([some[4], some[0], some[2]], GONE)
    place.there = True
    mover.retry()
    assert place.take() == some
    assert mover.num_waiting == 0


async def test_first_loss_makes_nobody_suspect(mover, place):
    some = tickets(5)
    mover.lost(some, GONE)
    assert place.take() == some


async def test_suspects_wait_for_their_turn_and_are_cleared_by_tokens(mover, place):
    some = tickets(4)
    for _ in range(2):
        place.take()
        mover.lost(some, GONE)
    assert place.take() == some[:1]
    generate(some[0], CLEARED_TOKENS - 1)
    mover.retry()
    assert place.take() == []
    generate(some[0], 1)
    mover.retry()
    assert place.take() == some[1:3]  # one is through: two at once
    some[1].stream.fail(GONE)  # or ended in any other way
    mover.retry()
    assert place.take() == some[3:]


async def test_who_waits_for_its_turn_does_not_run_out_of_time_to_find_an_engine(place):
    mover = Mover(place, timeout_s=0.05, max_moves=3, note_waiting=ignore)
    first, second = tickets(2)
    for _ in range(2):
        mover.lost([first, second], GONE)
    place.take()
    await asyncio.sleep(0.15)  # the timeout, three times
    assert not second.stream.closed
    generate(first)
    async with asyncio.timeout(5):
        while not place.taken:
            await asyncio.sleep(0.001)  # for the mover's timer
    assert place.take() == [second]
    mover.stop(ServerDraining("over"))


async def test_many_that_are_refused_at_once_are_tried_again_together(mover, place):
    """Not every one of them each time that one comes back: with 1000 that would be a million."""
    some = tickets(1000)
    mover.lost(some, GONE)
    place.take()
    for ticket in some:
        mover.returned(ticket, GONE, was_taken=False, try_at_once=True)
    assert place.take() == []
    async with asyncio.timeout(5):
        while mover.num_waiting:
            await asyncio.sleep(0)
    assert place.take() == some


async def test_who_is_refused_everywhere_is_tried_ever_less_often(mover, place, monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr("frontend.routing.failover.time.monotonic", lambda: now_s)
    (ticket,) = tickets(1)
    mover.lost([ticket], GONE)
    tries_s = []
    while now_s < 1020.0:
        if place.take():
            tries_s.append(now_s)
            mover.returned(ticket, GONE, was_taken=False, try_at_once=False)
        now_s += 0.01
        mover.retry()
    gaps_s = [later - earlier for earlier, later in pairwise(tries_s)]
    assert 0.1 <= gaps_s[0] <= 0.26
    assert all(0.95 <= gap_s <= 2.02 for gap_s in gaps_s[4:])
    assert len(tries_s) < 30


async def test_loss_under_a_trial_counts_for_the_one_on_trial_alone(mover, place):
    suspect, *others = tickets(4)
    for _ in range(2):
        mover.lost([suspect], GONE)
    for _ in range(2):
        for ticket in others:
            generate(ticket)
        mover.lost([suspect, *others], GONE)
    assert [ticket.num_losses for ticket in others] == [0, 0, 0]
    assert isinstance(suspect.stream._failure, EngineFault)
    assert not any(ticket.stream.closed for ticket in others)


async def test_new_request_beside_the_one_on_trial_may_be_the_cause_as_well(mover, place):
    """The innocent suspect must not fail for what a new one does, nor the new one stay unknown."""
    suspect, new = tickets(2)
    for _ in range(2):
        mover.lost([suspect], GONE)
    for _ in range(2):
        mover.lost([suspect, new], GONE)
    assert (suspect.num_losses, new.num_losses) == (4, 2)
    assert not suspect.stream.closed
    place.take()
    generate(suspect)
    mover.retry()
    assert place.take() == [new]


async def test_loss_after_a_trial_that_was_passed_counts_for_all(mover, place):
    suspect, *others = tickets(3)
    for _ in range(2):
        mover.lost([suspect], GONE)
    generate(suspect)
    mover.lost([suspect, *others], GONE)
    assert [ticket.num_losses for ticket in (suspect, *others)] == [1, 1, 1]


async def test_suspect_that_finds_no_engine_does_not_keep_the_others_from_going(mover, place):
    some = tickets(2)
    for _ in range(2):
        mover.lost(some, GONE)
    place.take()
    place.there = False
    mover.lost(some[:1], GONE)  # it was on trial
    place.there = True
    mover.retry()
    assert place.take() == some[:1]
    some[0].stream.fail(GONE)
    mover.retry()
    assert place.take() == some[1:]


async def test_suspect_that_goes_alone_is_not_overtaken_for_ever(mover, place):
    passed, there, alone, late = tickets(4)
    for _ in range(2):
        mover.lost([passed, there], GONE)
    generate(passed)
    mover.retry()  # two may be on trial now, and one is
    alone.goes_alone = True
    for ticket in (alone, late):
        for _ in range(2):
            mover.lost([ticket], GONE)
    place.take()
    mover.retry()
    assert place.take() == []
    generate(there)
    mover.retry()
    assert place.take() == [alone]
    generate(alone)
    mover.retry()
    assert place.take() == [late]


async def test_engine_that_has_taken_it_ends_what_was_noted_of_refusals(mover, place):
    (ticket,) = tickets(1)
    mover.lost([ticket], GONE)
    ticket.refused_by.add("another engine")
    mover.returned(ticket, GONE, was_taken=False, try_at_once=False)
    assert ticket.num_pauses == 1
    ticket.stream.bind(1, Owner())
    mover.lost([ticket], GONE)
    assert (ticket.num_pauses, ticket.refused_by) == (0, set())


async def test_suspect_that_waits_for_its_reader_does_not_keep_the_others_from_going(mover, place):
    """Nobody computes anything for it: until its reader comes it can neither pass its trial nor fail."""
    submission = pb.Submission(stops=pb.TokenStops(max_tokens=1000))
    suspect = Ticket(submission, None, window=4, now_s=0.0)
    (other,) = tickets(1)
    for _ in range(2):
        mover.lost([suspect, other], GONE)
    assert place.take()[-1] is suspect
    suspect.stream.bind(1, Owner())
    generate(suspect, 4)
    mover.retry()
    assert place.take() == [other]
    mover.lost([suspect], GONE)
    assert suspect.num_losses == 2  # nothing of it was in a step


async def test_stopped_mover_fails_what_waits_and_what_comes(place):
    told = []
    mover = Mover(place, timeout_s=30.0, max_moves=3, note_waiting=told.append)
    place.there = False
    first, second, third = tickets(3)
    mover.lost([first], GONE)
    assert told[-1] == 1
    mover.stop(ServerDraining("over"))
    assert told[-1] == 0
    mover.lost([second], GONE)
    assert all(isinstance(ticket.stream._failure, ServerDraining) for ticket in (first, second))
    with pytest.raises(ServerDraining):
        mover.submit(third, GONE)


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
    """The mover's clock; it stands until it is set."""
    times = [1000.0]
    monkeypatch.setattr("frontend.routing.failover.time.monotonic", lambda: times[0])
    return times


@pytest.fixture
async def supervised(place, clock):
    supervisor = Supervisor()
    mover = Mover(place, timeout_s=30.0, max_moves=3, note_waiting=ignore, supervision=supervisor)
    yield mover, supervisor
    mover.stop(ServerDraining("over"))


async def test_the_timeout_does_not_run_while_a_restart_is_to_be_expected(supervised, place, clock):
    mover, supervisor = supervised
    place.there = False
    supervisor.until_s = 1600.0
    (ticket,) = tickets(1)
    mover.lost([ticket], GONE)
    for now_s in range(1000, 1200):
        clock[0] = now_s
        mover.retry()
        assert not ticket.stream.closed
    supervisor.until_s = 1195.5  # and now it is not any more: the timeout begins there
    clock[0] = 1225.4
    mover.retry()
    assert not ticket.stream.closed
    clock[0] = 1225.6
    mover.retry()
    assert ticket.stream._failure is GONE


async def test_a_start_that_never_succeeds_holds_requests_no_longer_than_its_bound_and_the_timeout(
    supervised, place, clock
):
    mover, supervisor = supervised
    place.there = False
    supervisor.until_s = 1600.0
    (ticket,) = tickets(1)
    mover.lost([ticket], GONE)
    while not ticket.stream.closed:
        clock[0] += 1.0
        mover.retry()
    assert 1630.0 <= clock[0] <= 1631.0


async def test_without_a_failover_timeout_nobody_waits_for_a_restart(place, clock):
    supervisor = Supervisor()
    supervisor.until_s = 1600.0
    mover = Mover(place, timeout_s=0.0, max_moves=3, note_waiting=ignore, supervision=supervisor)
    place.there = False
    (ticket,) = tickets(1)
    mover.lost([ticket], GONE)
    assert ticket.stream._failure is GONE


async def test_twenty_kills_in_a_row_make_nobody_suspect(supervised, place):
    mover, _ = supervised
    some = tickets(5)
    for _ in range(20):
        mover.lost(some, GONE)
        assert place.take() == some, "all of them go on at once"
    assert not any(ticket.num_losses for ticket in some)


async def test_what_is_killed_again_and_again_is_suspected_in_the_end(supervised, place):
    """A watcher of memory in user space kills as an operator does."""
    mover, _ = supervised
    (ticket,) = tickets(1)
    num_kills = 0
    while not ticket.stream.closed:
        num_kills += 1
        mover.lost([ticket], GONE)
    assert isinstance(ticket.stream._failure, EngineFault)
    assert 32 < num_kills < 40


async def test_blame_waits_until_it_is_known_why_the_engine_has_ended(supervised, place, clock):
    mover, supervisor = supervised
    poison, other = tickets(2)
    supervisor.end = EngineEnd.FAILED
    for _ in range(3):
        mover.lost([poison], GONE)
        place.take()
    place.there = False
    supervisor.end = None
    mover.lost([poison], GONE)
    assert not poison.stream.closed
    supervisor.end = EngineEnd.KILLED  # it was not the request this time
    place.there = True
    mover.retry()
    assert place.take() == [poison]
    supervisor.end = None
    place.there = False
    mover.lost([poison], GONE)
    supervisor.end = EngineEnd.FAILED
    mover.retry()
    assert isinstance(poison.stream._failure, EngineFault)
    assert mover.num_waiting == 0
    mover.lost([other], GONE)
    assert not other.stream.closed
