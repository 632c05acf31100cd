"""Simulates engines that die because of a poison request or are killed, with one token per request in each round."""

import random

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.end_reason import EndReason
from frontend.errors import EngineFault, EngineUnavailable, ServerDraining
from frontend.routing.failover import FailoverQueue
from frontend.routing.pending import PendingRequest
from frontend.routing.quarantine import CLEARED_TOKENS, Quarantine
from frontend.routing.stream import RequestEnd
from frontend.routing.supervision import EngineEnd

GONE = EngineUnavailable("gone")
NUM_TOKENS = 40


class Unsupervised:
    """Behaves as without a supervisor: any loss may be caused by a request."""

    def restart_until_s(self):
        return 0.0

    def end_of(self, instance_id):
        return EngineEnd.FAILED


class Cluster:
    """Engines that are restarted at once, and get requests in turn."""

    def __init__(self, num_engines, num_requests, poison=()):
        self.queue = FailoverQueue(
            self.place, timeout_s=1000.0, max_moves=3, on_waiting=lambda _: None, supervision=Unsupervised()
        )
        self.engines = [[] for _ in range(num_engines)]
        submission = pb.Submission(stops=pb.TokenStops(max_tokens=NUM_TOKENS))
        self.requests = [PendingRequest(submission, None, window=1000, now_s=0.0) for _ in range(num_requests)]
        self.poison = {self.requests[index] for index in poison}
        self.num_deaths = self.num_rounds = self.turn = 0
        for request in self.requests:
            self.place(request)

    def place(self, request):
        self.turn += 1
        self.engines[self.turn % len(self.engines)].append(request)
        return True

    def kill(self, index):
        lost, self.engines[index] = self.engines[index], []
        if lost:
            self.queue.add_lost("engine", lost, GONE)

    def round(self):
        """A step of every engine."""
        self.num_rounds += 1
        for index, engine in enumerate(self.engines):
            if self.poison & set(engine):
                self.num_deaths += 1
                self.kill(index)
                continue
            for request in list(engine):
                stream = request.stream
                stream.push(stream.num_tokens, [1], None)
                if stream.num_tokens == NUM_TOKENS:
                    stream.finish(RequestEnd(EndReason.MAX_TOKENS, 0, 0, 0, NUM_TOKENS))
                    engine.remove(request)
        self.queue.retry()

    def run(self):
        while not all(request.stream.closed for request in self.requests):
            self.round()
            assert self.num_rounds < 5000, "a request starves"
        self.queue.stop(ServerDraining("over"))

    def failed(self):
        return {index for index, one in enumerate(self.requests) if isinstance(one.stream._failure, EngineFault)}


def test_one_suspect_at_a_time_is_on_trial_at_first():
    quarantine = Quarantine(max_losses=3)
    first, second = Cluster(1, 2).requests
    for _ in range(2):
        quarantine.lost([first, second])
    assert quarantine.has_capacity
    assert quarantine.admit(first)
    assert not quarantine.has_capacity
    assert not quarantine.admit(second)


def test_progress_clears_losses_kills_and_isolation():
    quarantine = Quarantine(max_losses=3)
    requests = first, *others = Cluster(1, 3).requests
    are_admitted = []
    for _ in range(2):
        for _ in range(32):
            quarantine.excuse(quarantine.lost(requests))
        assert [quarantine.num_losses(request) for request in requests] == [0, 0, 0]
        for _ in range(2):
            quarantine.lost(requests)
        quarantine.admit(first)
        first.stream.push(first.stream.num_tokens, [1] * CLEARED_TOKENS, None)
        are_admitted.append([quarantine.admit(request) for request in others])
        quarantine.lost(others)  # while both are on trial: they are isolated
        for request in others:
            request.stream.push(request.stream.num_tokens, [1] * CLEARED_TOKENS, None)
    assert are_admitted == [[True, True]] * 2


def test_loss_with_a_suspect_on_trial_counts_for_it_and_for_new_requests():
    quarantine = Quarantine(max_losses=3)
    requests = quarantined, old, _ = Cluster(1, 3).requests
    for request in (quarantined, old):
        request.stream.push(0, [1] * CLEARED_TOKENS, None)
    for _ in range(2):
        quarantine.lost([quarantined])
    quarantine.admit(quarantined)
    quarantine.lost(requests)
    assert [quarantine.num_losses(request) for request in requests] == [3, 0, 1]


@pytest.mark.parametrize(
    ("on_trial", "lost", "is_admitted"),
    [([1], [1], False), ([], [3], False), ([1], [3], True)],
    ids=["a request on trial is lost", "nothing is on trial", "the trial goes on elsewhere"],
)
def test_loss_narrows_trials_to_one_suspect_unless_it_concerns_none(on_trial, lost, is_admitted):
    quarantine = Quarantine(max_losses=3)
    requests = first, second, third, _ = Cluster(1, 4).requests
    for _ in range(2):
        quarantine.lost([first, second, third])
    quarantine.admit(first)
    first.stream.push(0, [1] * CLEARED_TOKENS, None)  # two may be on trial now
    for index in on_trial:
        quarantine.admit(requests[index])
    quarantine.lost([requests[index] for index in lost])
    quarantine.admit(second)
    assert quarantine.admit(third) == is_admitted


async def test_many_innocent_suspects_are_cleared_quickly():
    cluster = Cluster(2, 500)
    cluster.kill(0)
    cluster.kill(1)
    cluster.kill(0)
    cluster.run()
    assert cluster.failed() == set()
    # Undisturbed: NUM_TOKENS. One at a time they would take 500 * CLEARED_TOKENS.
    assert cluster.num_rounds <= NUM_TOKENS + 12 * CLEARED_TOKENS


@pytest.mark.parametrize("seed", range(40))
async def test_poison_fails_alone_after_a_limited_number_of_engines(seed):
    rng = random.Random(seed)
    num_requests = rng.choice([1, 2, 10, 200])
    poison = {rng.randrange(num_requests)}
    cluster = Cluster(rng.randrange(1, 4), num_requests, poison)
    cluster.run()
    assert cluster.failed() == poison
    assert cluster.num_deaths <= 6


@pytest.mark.parametrize("seed", range(20))
async def test_two_poison_requests_and_external_kills_fail_no_innocent_request(seed):
    """Kills come far enough apart for innocent requests to get further, as those of a rolling restart do."""
    rng = random.Random(seed)
    num_requests = rng.choice([5, 50])
    poison = set(rng.sample(range(num_requests), 2))
    cluster = Cluster(rng.randrange(1, 4), num_requests, poison)
    for number in range(300):
        cluster.round()
        if number % 100 == 99:
            cluster.kill(rng.randrange(len(cluster.engines)))
    cluster.run()
    assert cluster.failed() == poison
    assert cluster.num_deaths <= 12
