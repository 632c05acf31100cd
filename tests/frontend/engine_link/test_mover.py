"""Who goes on after a loss, in which order, and who is to blame for it."""

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.engine_link.mover import CLEARED_TOKENS, Mover
from frontend.engine_link.ticket import Ticket
from frontend.errors import EngineFault, EngineUnavailable, ServerDraining

GONE = EngineUnavailable("gone")


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


@pytest.fixture
async def mover(place):
    mover = Mover(place, timeout_s=30.0, max_moves=3)
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


async def test_suspects_go_on_one_at_a_time_and_are_cleared_by_tokens(mover, place):
    some = tickets(3)
    for _ in range(2):
        place.take()
        mover.lost(some, GONE)
    assert place.take() == some[:1]
    generate(some[0], CLEARED_TOKENS - 1)
    mover.retry()
    assert place.take() == []
    generate(some[0], 1)
    mover.retry()
    assert place.take() == some[1:2]
    some[1].stream.fail(GONE)  # or ended in any other way
    mover.retry()
    assert place.take() == some[2:]


async def test_loss_under_a_trial_counts_for_the_one_on_trial_alone(mover, place):
    suspect, *others = tickets(4)
    for _ in range(2):
        mover.lost([suspect], GONE)
    for _ in range(2):
        mover.lost([suspect, *others], GONE)
    assert [ticket.num_losses for ticket in others] == [0, 0, 0]
    assert isinstance(suspect.stream._failure, EngineFault)
    assert not any(ticket.stream.closed for ticket in others)


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


async def test_stopped_mover_fails_what_waits_and_what_comes(mover, place):
    place.there = False
    first, second, third = tickets(3)
    mover.lost([first], GONE)
    mover.stop(ServerDraining("over"))
    mover.lost([second], GONE)
    assert all(isinstance(ticket.stream._failure, ServerDraining) for ticket in (first, second))
    with pytest.raises(ServerDraining):
        mover.submit(third, GONE)
