from collections.abc import Callable

from engine.core.request import Request
from engine.core.waiting_queue import WaitingQueue

MakeRequest = Callable[..., Request]


def fill(queue: WaitingQueue, *requests: Request) -> None:
    for index, request in enumerate(requests):
        request.arrival_index = index
        queue.push(request)


def test_lowest_key_is_the_head_and_ties_go_by_arrival(make_request: MakeRequest) -> None:
    queue = WaitingQueue(lambda request: request.priority)
    fill(queue, *(make_request(i, 1, priority=priority) for i, priority in enumerate((2, 1, 1, 3))))
    order = []
    while (head := queue.head) is not None:
        order.append(head.request_id)
        queue.remove(head)
    assert order == [1, 2, 0, 3]


def test_requests_without_credit_do_not_block_others(make_request: MakeRequest) -> None:
    queue = WaitingQueue(lambda request: request.arrival_index)
    stalled, ready = make_request(1, 1, token_credit=0), make_request(2, 1, token_credit=1)
    fill(queue, stalled, ready)
    assert queue.head is ready
    assert len(queue) == 2
    queue.remove(stalled)
    stalled.token_credit = 5
    queue.push(stalled)
    assert queue.head is stalled


def test_num_tokens_follows_every_change(make_request: MakeRequest) -> None:
    queue = WaitingQueue(lambda request: request.arrival_index)
    first, second = make_request(1, 5), make_request(2, 7, token_credit=0)
    fill(queue, first, second)
    assert queue.num_tokens == 12
    queue.remove(first)
    queue.remove(second)
    assert (queue.num_tokens, len(queue), list(queue)) == (0, 0, [])
