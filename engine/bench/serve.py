"""An engine in this process, without threads or sockets, and what became of the requests it was given."""

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.run import Run, Step
from chairlift.service.sampling_fields import Biases
from engine.config import EngineConfig
from engine.core.request import Adapter, Request, RequestId, SamplingParams
from engine.core.scheduler import Scheduler
from engine.interfaces import ModelRunner, execute
from engine.serving.parts import EngineParts

if TYPE_CHECKING:
    from engine.startup.gpu import Gpu

_request_ids = itertools.count(1)  # a scheduler never sees one twice, however often it serves


class Steppable(Protocol):
    """What is served with: `EngineParts`, or a scheduler with a runner that has no model."""

    @property
    def scheduler(self) -> Scheduler:
        """Plans the steps."""
        ...

    @property
    def runner(self) -> ModelRunner:
        """Runs them."""
        ...


def engine(config: EngineConfig, gpu: "Gpu | None" = None) -> EngineParts:
    """Builds an engine, warmed up; `gpu` as in `build_engine`."""
    from engine.startup.build import build_engine
    from engine.startup.progress import StartupProgress

    return build_engine(config, StartupProgress(), gpu=gpu)


def serve(
    parts: Steppable,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    *,
    arrivals_s: Sequence[float] | None = None,
    after_steps: Sequence[int] | None = None,
    adapters: Sequence[Adapter | None] | None = None,
    temperature: float = 0.0,
    logit_bias: Biases = (),
) -> Run:
    """Answers of exactly these lengths, greedy unless there is a temperature; end tokens are ignored.

    Args:
        parts: the engine; nothing else uses it meanwhile.
        prompts: token ids.
        max_tokens: length of each answer.
        arrivals_s: when each request arrives, in seconds since the start, ascending; None is at once.
        after_steps: instead of a time, how many steps have ended when each request arrives, ascending: the same
            batches whatever the speed. When nothing is left to do, the next request comes at once.
        adapters: of each request; None: without.
        temperature, logit_bias: of all requests; the seed of each is its index.
    Raises: BenchmarkError: a request did not get its tokens.
    """
    scheduler, runner = parts.scheduler, parts.runner
    requests = [
        Request(
            RequestId(next(_request_ids)),
            tuple(prompt),
            SamplingParams(
                seed=index,
                max_tokens=num_tokens,
                temperature=temperature,
                logit_bias=logit_bias,
                ignore_end_token=True,
            ),
            arrival_s=0.0,
        )
        for index, (prompt, num_tokens) in enumerate(zip(prompts, max_tokens, strict=True))
    ]
    for request, adapter in zip(requests, adapters or (), strict=bool(adapters)):
        request.adapter = adapter
    index_of = {request.request_id: index for index, request in enumerate(requests)}
    output_ids: list[list[int]] = [[] for _ in requests]
    token_times_s: list[list[float]] = [[] for _ in requests]
    arrived_s: list[float] = []
    steps: list[Step] = []
    start_s = time.perf_counter()
    while len(arrived_s) < len(requests) or scheduler.has_work():
        now_s = time.perf_counter() - start_s
        while len(arrived_s) < len(requests):
            next_index = len(arrived_s)
            due_s = arrivals_s[next_index] if arrivals_s is not None else now_s
            is_due = due_s <= now_s
            if after_steps is not None:
                is_due = len(steps) >= after_steps[next_index] or not scheduler.has_work()
            if not is_due:
                break
            requests[next_index].arrival_s = start_s + due_s
            scheduler.add_request(requests[next_index])
            arrived_s.append(due_s)
        if not scheduler.has_work():
            time.sleep(due_s - now_s)
            continue
        step_s = time.perf_counter()
        plan = scheduler.schedule(step_s)
        execute_s = time.perf_counter()
        result = execute(runner, plan)
        executed_s = time.perf_counter()
        outputs = scheduler.update(plan, result, executed_s)
        ended_s = time.perf_counter()
        num_outputs = 0
        for output in outputs:
            index = index_of[output.request_id]
            output_ids[index] += output.token_ids
            token_times_s[index] += [ended_s - start_s] * len(output.token_ids)
            num_outputs += len(output.token_ids)
        if plan.rows:
            steps.append(
                Step(
                    ended_s=ended_s - start_s,
                    seconds=ended_s - step_s,
                    execute_s=executed_s - execute_s,
                    num_rows=len(plan.rows),
                    num_tokens=plan.num_tokens,
                    num_outputs=num_outputs,
                )
            )
    wall_s = time.perf_counter() - start_s
    for index, (ids, num_tokens) in enumerate(zip(output_ids, max_tokens, strict=True)):
        if len(ids) != num_tokens:
            raise BenchmarkError(f"request {index} got {len(ids)} tokens of {num_tokens}")
    return Run(
        output_ids=tuple(map(tuple, output_ids)),
        token_times_s=tuple(map(tuple, token_times_s)),
        arrivals_s=tuple(arrived_s),
        steps=tuple(steps),
        wall_s=wall_s,
    )
