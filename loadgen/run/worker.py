"""A client process: makes its requests, waits for the common start, sends them, and reports the outcome.

It talks with the controller over one pipe: `Opened` and `Prepare` once, `Ready`, `Start`, then errors as they first
occur, `Done` at the end. Times go into shared memory, so that no message delays a request. The process ends at the
controller's order, or when the controller is gone.
"""

import asyncio
import contextlib
import gc
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import LoadgenError
from loadgen.prompts.text import TextMeasure, TextPromptMaker, measure_text
from loadgen.prompts.token_ids import PromptMaker, Vocabulary
from loadgen.run.loop_watch import LoopWatch
from loadgen.run.pacing import Pacer
from loadgen.run.preparer import Preparer
from loadgen.run.recorder import Recorder
from loadgen.run.sender import Sender, Shard
from loadgen.run.shared_arrays import SharedArray
from loadgen.service_mix import ServiceMix
from loadgen.target.base import PlannedRequest, RequestTargets, Target, TargetFacts, TargetSpec
from loadgen.target.open import open_target
from loadgen.trace.schema import Trace

READY_TOKENS = 32 << 20
"""Prompt tokens that lie ready at a time, of all workers: about 200 MB as they are sent."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a worker is started with.

    Attributes:
        worker: its number.
        num_workers: of the run.
        workload: all of it.
        spec: the server.
        shard: what of it this worker runs.
        salt: of the prompts.
        vocab_size, vocabulary: see RunOptions.
        probe_timeout_s: see open_target.
        targets: of the requests, which say in `requests` which class is theirs.
        requests, chunks, progress: shared: REQUEST of all, CHUNK and PROGRESS of this worker.
    """

    worker: int
    num_workers: int
    workload: Trace
    spec: TargetSpec
    shard: Shard
    salt: str
    vocab_size: int | None
    vocabulary: Vocabulary | None
    probe_timeout_s: float
    targets: ServiceMix | None
    requests: SharedArray
    chunks: SharedArray
    progress: SharedArray


@dataclass(frozen=True, slots=True)
class Opened:
    """To the controller: the server answers. `measure` where prompts are text, and of worker 0 only."""

    facts: TargetFacts
    measure: TextMeasure | None


@dataclass(frozen=True, slots=True)
class Failed:
    """To the controller: the worker cannot run, for a reason that the user can fix."""

    error: LoadgenError


@dataclass(frozen=True, slots=True)
class Prepare:
    """To a worker: prepare the requests."""

    measure: TextMeasure | None


@dataclass(frozen=True, slots=True)
class Ready:
    """To the controller: the first requests are prepared."""


@dataclass(frozen=True, slots=True)
class Start:
    """To a worker: start at `start_ns` of CLOCK_MONOTONIC."""

    start_ns: int


@dataclass(frozen=True, slots=True)
class NewError:
    """To the controller: the next error text of this worker; requests have its index."""

    text: str


@dataclass(frozen=True, slots=True)
class Stop:
    """To a worker: cancel all requests and end."""


@dataclass(frozen=True, slots=True)
class Done:
    """To the controller: the worker has ended. For the arrays see WorkerHealth."""

    loop_lag_ms: NDArray[np.float64]
    cpu_share: NDArray[np.float64]


def work(plan: WorkerPlan, connection: Connection) -> None:
    """The process's main function."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller handles Ctrl-C and sends Stop
    with contextlib.suppress(OSError, ValueError):  # a stream over HTTP is a file, and the usual limit is 1,024
        _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the controller is gone
        try:
            asyncio.run(_work(plan, connection))
        except LoadgenError as error:
            connection.send(Failed(error))


async def _work(plan: WorkerPlan, connection: Connection) -> None:
    target = open_target(plan.spec, probe_timeout_s=plan.probe_timeout_s)
    try:
        facts = await target.probe()
        measure = None
        if plan.spec.prompt_mode == "text" and plan.worker == 0:
            measure = await measure_text(target.count_tokens, facts.max_model_len)
        connection.send(Opened(facts, measure))
        prepare = connection.recv()
        if isinstance(prepare, Stop):
            return
        preparer = Preparer(
            plan.shard.order,
            _request_maker(plan, facts, prepare.measure, target),
            plan.workload.input_tokens[np.asarray(plan.shard.order, dtype=np.int64)].tolist(),
            READY_TOKENS // plan.num_workers,
        )
        preparer.fill()
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection would hold up every request in flight
        connection.send(Ready())
        start = connection.recv()
        if isinstance(start, Start):
            await _run(plan, target, preparer, start.start_ns, connection)
    finally:
        await target.close()


async def _run(plan: WorkerPlan, target: Target, preparer: Preparer, start_ns: int, connection: Connection) -> None:
    recorder = Recorder(
        plan.requests.rows(),
        plan.chunks.rows(),
        plan.progress.rows()[plan.worker : plan.worker + 1],
        lambda text: connection.send(NewError(text)),
    )
    pacer = Pacer()
    sender = Sender(target, preparer, recorder, plan.shard, pacer)
    watch = LoopWatch(lambda: pacer.idle_ns)
    loop = asyncio.get_running_loop()
    loop.add_reader(connection.fileno(), sender.stop)  # Stop, or the end of the controller: nothing else comes
    watch.start(start_ns)
    await sender.run(start_ns)
    watch.stop()
    loop.remove_reader(connection.fileno())
    connection.send(Done(watch.lag_ms(), watch.cpu_shares()))


def _request_maker(
    plan: WorkerPlan, facts: TargetFacts, measure: TextMeasure | None, target: Target
) -> Callable[[int], Any]:
    """From an index to the request in the form that is sent."""
    num_output_tokens = plan.workload.output_tokens
    targets = _targets_of_requests(plan)
    if measure is not None:
        texts = TextPromptMaker(plan.salt, plan.workload, measure)
        return lambda index: target.prepare(
            PlannedRequest(index, None, texts.text(index), int(num_output_tokens[index]), targets(index))
        )
    vocabulary = plan.vocabulary or Vocabulary.of(plan.vocab_size or facts.vocab_size, facts.special_ids)
    ids = PromptMaker(plan.salt, plan.workload, vocabulary)
    return lambda index: target.prepare(
        PlannedRequest(index, ids.token_ids(index), None, int(num_output_tokens[index]), targets(index))
    )


def _targets_of_requests(plan: WorkerPlan) -> Callable[[int], RequestTargets | None]:
    """From an index to the targets of the request."""
    if plan.targets is None:
        return lambda index: None  # noqa: ARG005
    by_class = [
        RequestTargets(service_class=one.name)
        if plan.targets.sends_names
        else RequestTargets(ttft_s=one.ttft_s, inter_token_s=one.inter_token_s)
        for one in plan.targets.classes.values()
    ]
    chosen = plan.requests.rows()["service_class"].tolist()
    return lambda index: by_class[chosen[index]]
