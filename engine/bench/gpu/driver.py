"""The engine's step loop, driven in this process without threads and sockets, with as many steps in flight as in the
engine.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.workload import Workload
from chairlift.service.end_reason import EndReason
from engine.bench.floor import Length
from engine.bench.fresh_scheduler import Scheduled, forget_requests, schedule_anew
from engine.core.outputs import RequestOutput
from engine.core.request import Request, RequestId, SamplingParams
from engine.interfaces import AdmissionReport, Cancel, Inbox, Report, StepReport, Submit
from engine.serving.parts import EngineParts
from engine.step_loop import StepLoop

_request_ids = itertools.count(1 << 32)  # unique for the runner over all schedulers
GREEDY = SamplingParams(seed=0, max_tokens=1, temperature=0.0, ignore_end_token=True)


class Delivery(NamedTuple):
    """Results of one step.

    Attributes:
        ended_s: `time.perf_counter` at its outputs.
        outputs: outputs of requests.
        num_tokens: tokens of the step.
        num_running: running requests.
    """

    ended_s: float
    outputs: tuple[RequestOutput, ...]
    num_tokens: int
    num_running: int


class EngineDriver:
    """Submits requests and yields deliveries, one iteration of the loop at a time.

    Attributes:
        num_open: submitted requests that are not completed.
    """

    def __init__(self, scheduled: Scheduled) -> None:
        """Takes a scheduler for exclusive use, with the engine's runner."""
        self._scheduled = scheduled
        self._inbox = Inbox()
        self._loop = StepLoop(scheduled.scheduler, scheduled.runner, self._inbox, self._take)
        self._open: set[RequestId] = set()
        self._deliveries: list[Delivery] = []

    @property
    def num_open(self) -> int:
        """See the class."""
        return len(self._open)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests for the next iteration."""
        self._open.update(request.request_id for request in requests)
        self._inbox.put(Submit(tuple(requests)))

    def turn(self) -> list[Delivery]:
        """Runs one iteration and returns its deliveries: none while the first steps are in flight.

        Raises: BenchmarkError: a request was rejected or failed.
        """
        self._deliveries = []
        self._loop.turn()
        return self._deliveries

    def finish(self) -> None:
        """Cancels open requests, collects the steps in flight, and makes the runner forget all requests."""
        if self._open:
            self._inbox.put(Cancel(tuple(self._open), EndReason.CANCELLED))
        while self._open or self._scheduled.scheduler.has_work():
            self._loop.turn()
        self._inbox.wake()
        self._loop.turn()  # with nothing to launch it collects the steps in flight
        forget_requests(self._scheduled)

    def _take(self, report: Report) -> None:
        if isinstance(report, AdmissionReport) and report.rejected:
            raise BenchmarkError(f"the engine rejected a request: {report.rejected[0][1]}")
        if not isinstance(report, StepReport):
            return
        snapshot = report.snapshot
        for output in report.outputs:
            if output.completion is None:
                continue
            self._open.discard(output.request_id)
            if output.completion.reason not in (EndReason.MAX_TOKENS, EndReason.CANCELLED):
                raise BenchmarkError(
                    f"a request ended with {output.completion.reason.name}: {output.completion.detail}"
                )
        num_left = sum(output.completion is not None for output in report.outputs)
        num_running = snapshot.stats.num_running + num_left
        self._deliveries.append(Delivery(time.perf_counter(), report.outputs, snapshot.num_batched_tokens, num_running))


def new_request(prompt_ids: tuple[int, ...], max_tokens: int, params: SamplingParams = GREEDY) -> Request:
    """Makes a request with a unique id, which is also its seed, and an answer of exactly this length."""
    request_id = RequestId(next(_request_ids))
    own = replace(params, seed=int(request_id), max_tokens=max_tokens, ignore_end_token=True)
    return Request(request_id, prompt_ids, own, arrival_s=time.monotonic())


class RequestMaker:
    """Makes requests with random prompts.

    Args:
        vocab_size: ids are drawn from 1 to below it: 0 may be an end token.
        seed: random seed of the ids.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def make(self, length: Length, params: SamplingParams = GREEDY) -> Request:
        """Makes a request of these lengths."""
        prompt = self._random.integers(1, self._vocab_size, length.prompt)
        return new_request(tuple(prompt.tolist()), length.output, params)


def outputs_of(driver: EngineDriver, workload: Workload, params: SamplingParams = GREEDY) -> list[list[RequestOutput]]:
    """Answers all requests at once, with as many steps in flight as the engine has; returns the outputs of each."""
    requests = [new_request(prompt, n, params) for prompt, n in zip(workload.prompts, workload.max_tokens, strict=True)]
    outputs: dict[RequestId, list[RequestOutput]] = {request.request_id: [] for request in requests}
    driver.submit(requests)
    while driver.num_open:
        for delivery in driver.turn():
            for output in delivery.outputs:
                outputs[output.request_id].append(output)
    driver.finish()
    return list(outputs.values())


def greedy_answers(parts: EngineParts, workload: Workload) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of greedy answers to all requests at once."""
    answers = outputs_of(EngineDriver(schedule_anew(parts)), workload)
    return tuple(tuple(token_id for output in answer for token_id in output.token_ids) for answer in answers)
