"""Failover queue: which request is tried next after a loss, when, and which one is suspected."""

import asyncio
from itertools import pairwise, zip_longest
from types import SimpleNamespace

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.errors import EngineFault, EngineUnavailable, ServerDraining
from frontend.routing.failover import FailoverQueue
from frontend.routing.pending import PendingRequest
from frontend.routing.quarantine import CLEARED_TOKENS
from frontend.routing.supervision import EngineEnd
from tests.hang import HANG_S

GONE = EngineUnavailable("gone")


class Engines:
    """Engines that take everything, or nothing."""

    def __init__(self):
        self.are_there = True
        self.taken = []

    def place(self, request):
        if self.are_there:
            self.taken.append(request)
        return self.are_there

    def take(self):
        taken, self.taken = self.taken, []
        return taken


class Supervisor:
    """Says until when a restart is expected, and why engines have ended."""

    def __init__(self, end):
        self.until_s = 0.0
        self.end = end
        self.num_questions = 0

    def restart_until_s(self):
        return self.until_s

    def end_of(self, instance_id):
        self.num_questions += 1
        return self.end


@pytest.fixture
def engines():
    return Engines()


@pytest.fixture
def supervisor():
    return Supervisor(EngineEnd.FAILED)


@pytest.fixture
def clock(monkeypatch):
    """The queue's clock; it stands still until the test sets it."""
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr("frontend.routing.failover.time.monotonic", lambda: clock.now_s)
    return clock


@pytest.fixture
async def make_queue(engines, supervisor):
    queues = []

    def make(*, timeout_s=30.0, on_waiting=lambda _: None):
        queue = FailoverQueue(
            engines.place, timeout_s=timeout_s, max_moves=3, on_waiting=on_waiting, supervision=supervisor
        )
        queues.append(queue)
        return queue

    yield make
    for queue in queues:
        queue.stop(ServerDraining("over"))


@pytest.fixture
def queue(make_queue):
    return make_queue()


def make_requests(number, *, window=1000):
    submission = pb.Submission(stops=pb.TokenStops(max_tokens=1000))
    return [PendingRequest(submission, None, window=window, now_s=0.0) for _ in range(number)]


def lose(queue, requests):
    queue.add_lost("engine", requests, GONE)


def generate(request, num_tokens=CLEARED_TOKENS):
    request.stream.push(request.stream.num_tokens, [1] * num_tokens, None)


async def test_oldest_requests_are_placed_first(queue, engines):
    engines.are_there = False
    requests = make_requests(5)
    lose(queue, [requests[3], requests[1]])
    lose(queue, [requests[4], requests[0], requests[2]])
    engines.are_there = True
    queue.retry()
    assert engines.take() == requests
    assert queue.num_waiting == 0


async def test_suspects_wait_for_their_trial_and_are_cleared_by_tokens(queue, engines):
    requests = make_requests(4)
    lose(queue, requests)
    assert engines.take() == requests  # the first loss quarantines no request
    lose(queue, requests)
    assert engines.take() == requests[:1]
    generate(requests[0], CLEARED_TOKENS - 1)
    queue.retry()
    assert engines.take() == []
    generate(requests[0], 1)
    queue.retry()
    assert engines.take() == requests[1:3]  # one is cleared: two at once
    requests[1].stream.fail(GONE)  # or ended in any other way
    queue.retry()
    assert engines.take() == requests[3:]


async def test_timeout_does_not_run_while_a_suspect_waits_for_its_trial(make_queue, engines, clock):
    queue = make_queue(timeout_s=1.0)
    first, second = make_requests(2)
    for _ in range(2):
        lose(queue, [first, second])
    engines.take()
    for _ in range(30):
        clock.now_s += 0.1
        queue.retry()
    assert not second.stream.closed
    generate(first)
    async with asyncio.timeout(HANG_S):
        while not engines.taken:  # by the queue's own timer
            clock.now_s += 0.01
            await asyncio.sleep(0)
    assert engines.take() == [second]


async def test_requests_rejected_at_once_are_retried_together(queue, engines):
    """Retrying all of them at each rejection would be a million attempts."""
    requests = make_requests(1000)
    lose(queue, requests)
    engines.take()
    for request in requests:
        queue.add_rejected(request, GONE, was_taken=False, try_at_once=True)
    assert engines.take() == []
    async with asyncio.timeout(HANG_S):
        while queue.num_waiting:
            await asyncio.sleep(0)
    assert engines.take() == requests


async def test_request_that_all_engines_reject_is_retried_with_growing_pauses(queue, engines, clock):
    (request,) = make_requests(1)
    lose(queue, [request])
    tries_s = []
    while clock.now_s < 1020.0:
        if engines.take():
            tries_s.append(clock.now_s)
            queue.add_rejected(request, GONE, was_taken=False, try_at_once=False)
        clock.now_s += 0.01
        queue.retry()
    pauses_s = [later - earlier for earlier, later in pairwise(tries_s)]
    for pause_s, longest_s in zip_longest(pauses_s, (0.25, 0.5, 1.0), fillvalue=2.0):
        assert longest_s / 2 - 0.03 <= pause_s <= longest_s + 0.03  # tried every 20 ms, on a clock that ticks 10 ms
    assert len(tries_s) < 30
    engines.take()
    lose(queue, [request])  # an engine had taken it: the backoff begins anew
    assert engines.take() == [request]
    queue.add_rejected(request, GONE, was_taken=False, try_at_once=False)
    clock.now_s += 0.26
    queue.retry()
    assert engines.take() == [request]


async def test_request_waits_behind_full_engines_for_as_long_as_it_may(make_queue, engines, clock):
    queue = make_queue(timeout_s=86400.0)
    (request,) = make_requests(1)
    lose(queue, [request])
    num_tries = 0
    while clock.now_s < 1000.0 + 3600:
        if engines.take():
            num_tries += 1
            queue.add_rejected(request, GONE, was_taken=False, try_at_once=False)
        clock.now_s += 0.5
        queue.retry()
    assert num_tries > 1500
    assert not request.stream.closed


async def test_rejected_request_is_retried_after_its_pause_even_if_an_engine_was_attached_before(queue, engines, clock):
    (request,) = make_requests(1)
    lose(queue, [request])
    engines.take()
    queue.add_rejected(request, GONE, was_taken=False, try_at_once=False)
    queue.retry()
    assert engines.take() == []
    async with asyncio.timeout(HANG_S):
        while not engines.taken:  # by the queue's own timer
            clock.now_s += 0.01
            await asyncio.sleep(0)


async def test_new_request_beside_the_suspect_on_trial_may_be_the_cause_as_well(queue, engines):
    """A harmless quarantined request must not fail because of a new one, which must be quarantined itself."""
    quarantined, new = make_requests(2)
    for _ in range(2):
        lose(queue, [quarantined])
    for _ in range(2):
        lose(queue, [quarantined, new])
    assert not quarantined.stream.closed
    engines.take()
    generate(quarantined)
    queue.retry()
    assert engines.take() == [new]


async def test_suspect_without_an_engine_does_not_block_the_others(queue, engines):
    requests = make_requests(2)
    for _ in range(2):
        lose(queue, requests)
    engines.take()
    engines.are_there = False
    lose(queue, requests[:1])  # it was on trial
    engines.are_there = True
    queue.retry()
    assert engines.take() == requests[:1]
    requests[0].stream.fail(GONE)
    queue.retry()
    assert engines.take() == requests[1:]


async def test_isolated_suspect_does_not_starve(queue, engines):
    cleared, *on_trial, late = make_requests(4)
    for _ in range(2):
        lose(queue, [cleared, *on_trial])
    generate(cleared)
    queue.retry()  # two may be on trial now
    lose(queue, on_trial)  # together, so each of them is tried alone
    engines.take()
    first, second = on_trial
    for _ in range(2):
        lose(queue, [late])
    assert engines.take() == [late]  # its first loss
    queue.retry()
    assert engines.take() == []
    generate(first)
    queue.retry()
    assert engines.take() == [second]
    generate(second)
    queue.retry()
    assert engines.take() == [late]


async def test_suspect_paused_by_backpressure_does_not_block_the_others(queue, engines):
    """No engine computes it: until its client reads, it can neither pass its trial nor fail."""
    (quarantined,), (other,) = make_requests(1, window=4), make_requests(1)
    for _ in range(2):
        lose(queue, [quarantined, other])
    assert engines.take()[-1] is quarantined
    quarantined.attach(1, lambda _: None, lambda _: None)
    generate(quarantined, 4)
    queue.retry()
    assert engines.take() == [other]
    num_losses = queue._quarantine.num_losses(quarantined)
    lose(queue, [quarantined])
    assert queue._quarantine.num_losses(quarantined) == num_losses


async def test_stopped_queue_fails_waiting_and_later_requests(make_queue, engines):
    lengths = []
    queue = make_queue(on_waiting=lengths.append)
    engines.are_there = False
    first, second = make_requests(2)
    lose(queue, [first])
    assert lengths[-1] == 1
    queue.stop(ServerDraining("over"))
    assert lengths[-1] == 0
    lose(queue, [second])
    assert all(isinstance(request.stream._failure, ServerDraining) for request in (first, second))


async def test_timeout_does_not_run_while_a_restart_is_expected(queue, supervisor, engines, clock):
    engines.are_there = False
    supervisor.until_s = 1600.0
    (request,) = make_requests(1)
    lose(queue, [request])
    for now_s in range(1000, 1200):
        clock.now_s = now_s
        queue.retry()
        assert not request.stream.closed
    supervisor.until_s = 1195.5  # no longer expected: the timeout begins there
    clock.now_s = 1225.4
    queue.retry()
    assert not request.stream.closed
    clock.now_s = 1225.6
    queue.retry()
    assert request.stream._failure is GONE


async def test_start_that_never_succeeds_delays_the_timeout_up_to_a_limit(queue, supervisor, engines, clock):
    engines.are_there = False
    supervisor.until_s = 1600.0
    (request,) = make_requests(1)
    lose(queue, [request])
    while not request.stream.closed:
        clock.now_s += 1.0
        queue.retry()
    assert 1630.0 <= clock.now_s <= 1631.0


async def test_without_a_failover_timeout_no_request_waits_for_a_restart(make_queue, supervisor, engines, clock):
    supervisor.until_s = 1600.0
    engines.are_there = False
    (request,) = make_requests(1)
    lose(make_queue(timeout_s=0.0), [request])
    assert request.stream._failure is GONE


async def test_without_a_failover_timeout_another_engine_takes_it(make_queue, engines):
    (request,) = make_requests(1)
    lose(make_queue(timeout_s=0.0), [request])
    assert engines.take() == [request]
    assert not request.stream.closed


async def test_kills_from_outside_make_suspects_only_after_many(queue, supervisor, engines):
    """A memory watcher in user space may kill engines because of a request."""
    supervisor.end = EngineEnd.KILLED
    requests = make_requests(5)
    for _ in range(20):
        lose(queue, requests)
        assert engines.take() == requests, "all of them go on at once"
    num_kills = 20
    while not requests[0].stream.closed:
        num_kills += 1
        lose(queue, requests[:1])
    assert isinstance(requests[0].stream._failure, EngineFault)
    assert num_kills == 32 + 4  # 32 are excused; then one more than max_moves


async def test_request_is_judged_when_the_cause_of_the_engines_end_is_known(queue, supervisor, engines, clock):
    poison, other = make_requests(2)
    for _ in range(3):
        lose(queue, [poison])
        engines.take()
    engines.are_there = False
    supervisor.end = None
    lose(queue, [poison])
    assert not poison.stream.closed
    supervisor.end = EngineEnd.KILLED  # it was not the request this time
    engines.are_there = True
    queue.retry()
    assert engines.take() == [poison]
    supervisor.end = None
    engines.are_there = False
    lose(queue, [poison])
    num_questions = supervisor.num_questions
    for _ in range(4):
        clock.now_s += 0.01
        await asyncio.sleep(0)
    assert supervisor.num_questions == num_questions, "every 50 ms is enough"
    supervisor.end = EngineEnd.FAILED
    async with asyncio.timeout(HANG_S):
        while not poison.stream.closed:  # by the queue's own timer
            clock.now_s += 0.01
            await asyncio.sleep(0)
    assert isinstance(poison.stream._failure, EngineFault)
    assert queue.num_waiting == 0
    lose(queue, [other])
    assert not other.stream.closed
