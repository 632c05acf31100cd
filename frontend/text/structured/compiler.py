"""Compiles output constraints to grammars in a few worker processes, with a cache.

Equal constraints requested at the same time are compiled once. Compilation is not started if all its requests have
ended; one that has begun is finished, within its limits, and cached.
"""

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass, field

from chairlift.service.structured.output_constraint import OutputConstraint
from frontend.errors import InvalidRequest, QueueFull, ServerDraining
from frontend.text.isolated.pool import PoolStopped, ProcessPool
from frontend.text.isolated.process import JobLimits, LimitExceeded, StartRefused, first_frame
from frontend.text.isolated.worker import encode
from frontend.text.served_model import ServedModel
from frontend.text.structured.cache import Outcome, OutcomeCache

logger = logging.getLogger(__name__)

MAX_WAITING = 64
_NUM_WORKERS = 2  # one may be busy for the whole time limit
_CACHE_BYTES = 16 << 20
_LIMIT_HOLDS_S = 60.0  # a busy machine may succeed later


@dataclass(eq=False, slots=True)
class _Job:
    """A constraint that is being compiled or queued."""

    constraint: OutputConstraint
    model: ServedModel
    num_waiting: int = 0
    has_begun: bool = False
    task: asyncio.Task[Outcome] | None = field(default=None, repr=False)


class GrammarCompiler:
    """Compiles constraints. The first one starts the processes.

    Args:
        limits: time and memory limits of one compilation.
    """

    def __init__(self, limits: JobLimits) -> None:
        self._limits = limits
        self._cache = OutcomeCache(_CACHE_BYTES)
        self._jobs: dict[bytes, _Job] = {}
        self._pool = ProcessPool("frontend.text.structured.worker", limits, _NUM_WORKERS)

    async def compile(self, constraint: OutputConstraint, model: ServedModel) -> str:
        """Returns the grammar for the engine.

        Raises:
            InvalidRequest: the constraint cannot be served; names its field.
            QueueFull: too many are queued.
            WorkerUnavailable: no worker can be started now.
            ServerDraining: this frontend has stopped.
        """
        key = _key(constraint, model)
        outcome = self._cache.get(key, time.monotonic())
        if outcome is None:
            outcome = await self._wait(key, constraint, model)
        if outcome.error:
            name = constraint.field.rpartition(".")[2]
            raise InvalidRequest(f"{name} cannot be served: {outcome.error}", field=constraint.field)
        return outcome.grammar

    async def stop(self) -> None:
        """Stops all workers; waiting requests fail."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.stop()

    async def _wait(self, key: bytes, constraint: OutputConstraint, model: ServedModel) -> Outcome:
        job = self._jobs.get(key)
        if job is None:
            if len(self._jobs) >= MAX_WAITING + _NUM_WORKERS:
                raise QueueFull(
                    f"{len(self._jobs)} structured outputs are being compiled, which is the maximum",
                    retry_after_s=self._limits.timeout_s,
                )
            job = self._jobs[key] = _Job(constraint, model)
            job.task = asyncio.create_task(self._run(key, job), name="compile-grammar")
        assert job.task is not None
        job.num_waiting += 1
        try:
            return await asyncio.shield(job.task)
        except PoolStopped:
            raise ServerDraining("this server has stopped", retry_after_s=1.0) from None
        except asyncio.CancelledError:
            if job.task.cancelled():  # by `stop`, not because this request was cancelled
                raise ServerDraining("this server has stopped", retry_after_s=1.0) from None
            raise
        finally:
            job.num_waiting -= 1
            if not job.num_waiting and not job.has_begun:
                job.task.cancel()
                self._forget(key, job)

    def _forget(self, key: bytes, job: _Job) -> None:
        if self._jobs.get(key) is job:
            del self._jobs[key]

    async def _run(self, key: bytes, job: _Job) -> Outcome:
        try:
            return await self._outcome(key, job)
        finally:
            self._forget(key, job)

    async def _outcome(self, key: bytes, job: _Job) -> Outcome:
        until_s = float("inf")
        try:
            outcome = await self._compiled(job)
        except StartRefused as error:
            outcome = Outcome(error=f"this model's tokenizer cannot be used: {str(error)[:500]}")
        except LimitExceeded as error:
            logger.warning("dropped a %s: compiling it %s", job.constraint.kind, error)
            outcome, until_s = Outcome(error=f"compiling it {error}"), time.monotonic() + _LIMIT_HOLDS_S
        self._cache.put(key, outcome, until_s=until_s)
        return outcome

    async def _compiled(self, job: _Job) -> Outcome:
        def begin() -> None:
            job.has_begun = True

        async def hello() -> bytes:
            return await asyncio.to_thread(self._first_frame, job.model)

        constraint = job.constraint
        frame = encode({"kind": constraint.kind, "text": constraint.text, "before": constraint.before})
        return Outcome(**await self._pool.run(_model_key(job.model), hello, frame, on_begin=begin))

    def _first_frame(self, model: ServedModel) -> bytes:
        values = {
            "tokenizer": model.tokenizer.to_json(),
            "vocab_size": model.vocab_size,
            "end_token_ids": model.end_token_ids,
        }
        return first_frame(self._limits, values)


def _model_key(model: ServedModel) -> bytes:
    """Returns the part of a model that its grammars depend on."""
    ids = ",".join(map(str, (model.vocab_size, *model.end_token_ids)))
    return model.tokenizer.sha256 + ids.encode()


def _key(constraint: OutputConstraint, model: ServedModel) -> bytes:
    digest = hashlib.sha256()
    for part in (constraint.kind.encode(), constraint.before.encode(), constraint.text.encode(), _model_key(model)):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
