"""Fairness between sessions, compared with start-time fair queueing (SFQ) as defined in the literature."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.core.policy import EXPECTED_OUTPUT_TOKENS
from engine.core.request import Request
from engine.core.waiting_queue import WaitingQueue
from engine.errors import QueueFull

MakeRequest = Callable[..., Request]
MakeEngine = Callable[..., Any]


class Textbook:
    """Start-time fair queueing, computed from the whole history for every packet.

    The start tag of a packet is the maximum of the virtual time at its arrival and the finish tag of the previous
    packet of its flow. Its finish tag is its start tag plus its cost. Virtual time is the start tag of the last packet
    that entered service. The packet with the lowest start tag is next; ties go to the earlier arrival. Two extensions:
    if the actual cost differs, the flow's finish tag moves, but no packet overtakes an earlier one of its flow; and
    when no packet is left, the history starts anew.
    """

    def __init__(self) -> None:
        self.history: list[tuple[str, int, int, int]] = []  # of this busy period: event, flow, packet, cost
        self.starts: dict[int, int] = {}
        self.waiting: list[int] = []
        self.open: dict[int, int] = {}  # packet -> flow
        self.virtual_time = 0

    def arrive(self, packet: int, flow: int, cost: int) -> None:
        finish = None
        for what, whose, which, amount in self.history:
            if whose == flow:
                finish = self.starts[which] + amount if what == "arrive" else (finish or 0) + amount
        candidates = [self.virtual_time, *([finish] if finish is not None else [])]
        candidates += [self.starts[other] for other, owner in self.open.items() if owner == flow]
        self.starts[packet] = max(candidates)
        self.history.append(("arrive", flow, packet, cost))
        self.waiting.append(packet)
        self.open[packet] = flow

    def serve(self) -> int:
        packet = min(self.waiting, key=lambda name: (self.starts[name], name))
        self.waiting.remove(packet)
        self.virtual_time = max(self.virtual_time, self.starts[packet])
        return packet

    def end(self, packet: int, cost_error: int) -> None:
        flow = self.open.pop(packet)
        if packet in self.waiting:
            self.waiting.remove(packet)
        self.history.append(("end", flow, packet, cost_error))
        if not self.open:
            self.history.clear()


def guess(request: Request) -> int:
    return request.num_prompt_tokens + min(request.params.max_tokens, EXPECTED_OUTPUT_TOKENS)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(30))
def test_order_is_that_of_start_time_fair_queueing(
    make_engine: MakeEngine, make_request: MakeRequest, seed: int
) -> None:
    rng = random.Random(seed)
    engine = make_engine(num_blocks=4096, max_num_seqs=rng.choice((1, 2, 4)), max_num_batched_tokens=512)
    textbook = Textbook()
    requests: list[Request] = []
    for _ in range(300):
        match rng.choices(("add", "cancel", "step"), (5, 1, 4))[0]:
            case "add":
                session = rng.choice((0, 0, 0, 0, 1, 1, 2, 3))
                request = make_request(
                    len(requests), rng.randrange(1, 40), max_tokens=rng.randrange(1, 20), session=session
                )
                requests.append(request)
                engine.add(request)
                textbook.arrive(request.request_id, session, guess(request))
            case "cancel" if requests:
                request = rng.choice(requests)
                if not request.is_finished:
                    engine.scheduler.cancel(request.request_id, engine.now_s)
                    ran = request.request_id not in textbook.waiting
                    used = request.num_tokens if ran else 0
                    textbook.end(request.request_id, used - guess(request))
            case "step":
                plan = engine.launch()
                for admitted in plan.new_requests:
                    assert admitted.request_id == textbook.serve()
                for output in engine.land():
                    request = requests[output.request_id]
                    if output.completion is not None and request.request_id in textbook.open:
                        textbook.end(request.request_id, request.num_tokens - guess(request))
    assert len(requests) > 100


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(10))
def test_one_session_is_served_in_the_order_of_arrival(
    make_engine: MakeEngine, make_request: MakeRequest, seed: int
) -> None:
    rng = random.Random(seed)
    engine = make_engine(num_blocks=12, max_num_seqs=3, max_model_len=40, max_preemptions=2)  # preempts, too
    order: list[int] = []
    requests: list[Request] = []
    for _ in range(300):
        if rng.random() < 0.4:
            requests.append(
                make_request(len(requests), rng.randrange(1, 20), max_tokens=rng.randrange(1, 20), session=9)
            )
            engine.add(requests[-1])
        elif rng.random() < 0.1 and requests:
            engine.scheduler.cancel(rng.choice(requests).request_id, engine.now_s)
        else:
            order += [new.request_id for new in engine.launch().new_requests if new.request_id not in order]
            engine.land()
    assert order == sorted(order)
    assert len(order) > 30


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(30))
def test_a_new_session_waits_for_at_most_one_request_of_each_other_session(
    make_engine: MakeEngine, make_request: MakeRequest, seed: int
) -> None:
    rng = random.Random(seed)
    engine = make_engine(num_blocks=4096, max_num_seqs=1)
    num_floods = rng.randrange(1, 5)
    for number in range(40 * num_floods):
        session = number % num_floods
        engine.add(make_request(number, rng.randrange(1, 20), max_tokens=rng.randrange(1, 9), session=session))
    for _ in range(rng.randrange(60)):
        engine.step()
    engine.add(make_request(999, rng.randrange(1, 20), session=99))
    order: list[int] = []
    while 999 not in order:
        order += [new.request_id for new in engine.launch().new_requests]
        engine.land()
    assert len(order) - 1 <= num_floods


def test_requests_that_went_ahead_because_they_moved_put_no_other_session_back(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(max_num_seqs=1)
    flood = [make_request(number, 8, session=1) for number in range(20)]
    moved = [make_request(number, 8, session=1, has_moved=True) for number in range(20, 30)]
    engine.add(*flood, *moved)
    while engine.reason(moved[-1]) is None:
        engine.step()
    engine.add(make_request(99, 8, session=2))
    order: list[int] = []
    while 99 not in order:
        order += [new.request_id for new in engine.launch().new_requests]
        engine.land()
    assert order in ([99], [0, 99])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(10))
def test_two_sessions_with_a_backlog_get_the_same_number_of_tokens(
    make_engine: MakeEngine, make_request: MakeRequest, seed: int
) -> None:
    rng = random.Random(seed)
    engine = make_engine(num_blocks=4096, max_num_seqs=2)
    sizes = {0: (rng.randrange(1, 5), rng.randrange(1, 5)), 1: (rng.randrange(20, 60), rng.randrange(10, 50))}
    owners: list[int] = []
    for _ in range(300):  # session 1 has larger requests, and both send more than is served
        for session in (0, 0, 0, 0, 1):
            prompt, answer = sizes[session]
            engine.add(make_request(len(owners), prompt, max_tokens=answer, session=session))
            owners.append(session)
    admitted = {0: 0, 1: 0}
    most = sum(sum(size) for size in sizes.values())
    for _ in range(300):
        for new in engine.launch().new_requests:
            admitted[owners[new.request_id]] += sum(sizes[owners[new.request_id]])
        engine.land()
        assert abs(admitted[0] - admitted[1]) <= most


def test_cancelled_requests_do_not_count_against_their_session(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_blocks=4096, max_num_seqs=1)
    engine.add(make_request(0, 1, max_tokens=100, session=0))
    engine.step()
    for number in range(1, 21):  # a session changes its mind about all that it has sent
        engine.add(make_request(number, 50, session=1))
    for number in range(1, 21):
        engine.scheduler.cancel(number, engine.now_s)
    engine.add(make_request(21, 50, session=2), make_request(22, 50, session=2), make_request(23, 50, session=1))
    order: list[int] = []
    while len(order) < 3:
        order += [new.request_id for new in engine.launch().new_requests]
        engine.land()
    assert order == [21, 23, 22]


def test_requests_that_end_early_count_only_their_actual_tokens(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_blocks=4096, max_num_seqs=1)
    engine.add(make_request(0, 10, max_tokens=100, session=0), make_request(1, 10, max_tokens=3, session=1))
    engine.step()
    engine.scheduler.cancel(0, engine.now_s)  # after one token: 11 of the 110 it was thought to cost
    engine.step()
    engine.add(make_request(2, 10, max_tokens=3, session=1), make_request(3, 10, max_tokens=3, session=0))
    order: list[int] = []
    while len(order) < 2:
        order += [new.request_id for new in engine.launch().new_requests]
        engine.land()
    assert order == [3, 2]


def test_a_full_queue_accepts_the_share_of_each_session(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(max_waiting=7)
    numbers = iter(range(100))

    def add(session: int) -> bool:
        try:
            engine.add(make_request(next(numbers), 1, session=session))
        except QueueFull:
            return False
        return True

    assert [add(0) for _ in range(9)] == [True] * 7 + [False] * 2
    assert [add(1) for _ in range(6)] == [True] * 4 + [False] * 2  # a half, rounded up
    assert [add(2) for _ in range(4)] == [True] * 3 + [False]  # a third
    assert not add(0)
    engine.scheduler.check_integrity()


def test_a_queue_of_length_zero_has_no_shares(make_request: MakeRequest) -> None:
    queue = WaitingQueue(lambda request: request.start_tag)
    assert not queue.has_capacity(1, 0)
    queue.push(make_request(1, 1, session=1))
    assert not queue.has_capacity(2, 0)
    assert queue.has_capacity(2, 1)
    assert not queue.has_capacity(1, 1)
