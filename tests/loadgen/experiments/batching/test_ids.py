"""The check of token ids, against a server that answers from the prompt, or wrongly, or not at all."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server
from loadgen.errors import ResultError, TargetError
from loadgen.experiments.batching.cases import QUICK, synthetic_cases
from loadgen.experiments.batching.ids import greedy_answers, require_equal_answers
from tests.support.loadgen.runs import workload_of


class Server(GenerationServiceServicer):
    """Answers with the last prompt token, counted up; keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[pb.GenerationSpec] = []
        self.fails = False
        self._lock = threading.Lock()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        with self._lock:
            self.asked.append(request.spec)
        if self.fails:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
        last = request.spec.token_ids.ids[-1]
        return pb.GenerateResponse(token_ids=range(last, last + request.spec.stop.max_tokens))


@pytest.fixture
def served() -> Iterator[tuple[Server, str]]:
    service = Server()
    server = grpc.server(ThreadPoolExecutor(4))
    add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_every_request_is_asked_for_greedily_and_to_its_full_length(served: tuple[Server, str]) -> None:
    service, address = served
    trace = synthetic_cases(QUICK)[2].trace
    answers = greedy_answers(address, trace, 1000)
    assert [len(answer) for answer in answers] == trace.output_tokens.tolist()
    assert len(service.asked) == len(trace)
    for spec in service.asked:
        assert (spec.sampling.temperature, spec.stop.ignore_end_token, spec.output.token_ids) == (0.0, True, True)
        assert len(spec.token_ids.ids) == 32
        assert 0 < min(spec.token_ids.ids) <= max(spec.token_ids.ids) < 1000
    assert len({tuple(spec.token_ids.ids[:16]) for spec in service.asked}) == 1
    assert len({tuple(spec.token_ids.ids[16:]) for spec in service.asked}) == len(trace)
    assert greedy_answers(address, trace, 1000) == answers


def test_prompts_of_a_trace_without_blocks_share_nothing(served: tuple[Server, str]) -> None:
    service, address = served
    greedy_answers(address, workload_of(np.zeros(3), np.array([5, 6, 7]), np.array([1, 1, 1])), 1000)
    assert sorted(len(spec.token_ids.ids) for spec in service.asked) == [5, 6, 7]
    assert len({tuple(spec.token_ids.ids[:5]) for spec in service.asked}) == 3


def test_a_refused_call_is_named(served: tuple[Server, str]) -> None:
    service, address = served
    service.fails = True
    with pytest.raises(TargetError, match="RESOURCE_EXHAUSTED: queue is full"):
        greedy_answers(address, synthetic_cases(QUICK)[0].trace, 1000)


def test_answers_that_differ_are_named_with_the_token() -> None:
    require_equal_answers("a", ((1, 2), (3,)), "b", ((1, 2), (3,)))
    with pytest.raises(ResultError, match="a and b give different answers to request 1: from token 2 on"):
        require_equal_answers("a", ((1, 2), (3, 4, 5)), "b", ((1, 2), (3, 4, 6)))
    with pytest.raises(ResultError, match="request 0: in length, 2 against 1"):
        require_equal_answers("a", ((1, 2),), "b", ((1,),))
