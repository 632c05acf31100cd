"""The harness has to be worth its time: each of these defects, put into the core, must be found by it within a few
worlds.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from chairlift.service.end_reason import EndReason
from engine.core import scheduler as scheduler_module
from engine.core.batch import BatchBuilder
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.outputs import ModelRunnerOutput, RequestOutput, SchedulerOutput
from engine.core.request import BlockId, Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.errors import IntegrityError
from tests.support.engine.fake_model import OracleViolation

NUM_WORLDS = 80
OPERATIONS_PER_WORLD = 250

Mutate = Callable[[pytest.MonkeyPatch], None]


def free_before_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A freed block can be reused while a step in flight still writes it."""
    free = BlockPool.free

    def mutant(self: BlockPool, block_ids: Sequence[BlockId]) -> None:
        begun, self._last_begun_step = self._last_begun_step, self._last_ended_step
        free(self, block_ids)
        self._last_begun_step = begun

    monkeypatch.setattr(BlockPool, "free", mutant)


def hit_leaves_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deferred block that a prefix hits is released all the same."""

    def mutant(self: BlockPool, block_id: BlockId) -> None:
        if self._ref_counts[block_id] == 0 and not self._fences[block_id]:
            del self._cached[block_id]
        self._ref_counts[block_id] += 1

    monkeypatch.setattr(BlockPool, "acquire", mutant)


def hit_without_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing an owned block adds no owner."""
    acquire = BlockPool.acquire

    def mutant(self: BlockPool, block_id: BlockId) -> None:
        if self._ref_counts[block_id] == 0:
            acquire(self, block_id)

    monkeypatch.setattr(BlockPool, "acquire", mutant)


def double_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block of a table is given back twice."""
    free = BlockPool.free
    monkeypatch.setattr(BlockPool, "free", lambda self, block_ids: free(self, [*block_ids, *block_ids[:1]]))


def hash_survives_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reused block can still be found by what it held before."""

    def mutant(self: BlockPool, block_id: BlockId) -> None:
        self._hashes[block_id] = None

    monkeypatch.setattr(BlockPool, "_forget_hash", mutant)


def hash_without_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants share prefixes."""
    block_hash = KVCacheManager._block_hash

    def mutant(self: KVCacheManager, request: Request, index: int, hashes: Sequence[bytes]) -> bytes:
        return block_hash(self, replace_salt(request), index, hashes)

    def replace_salt(request: Request) -> Request:
        twin = Request(request.request_id, request.prompt_ids, request.params, request.arrival_s)
        twin.output_ids = request.output_ids
        return twin

    monkeypatch.setattr(KVCacheManager, "_block_hash", mutant)


def hash_not_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is known by its own tokens alone, wherever it stands."""
    block_hash = KVCacheManager._block_hash

    def mutant(self: KVCacheManager, request: Request, index: int, hashes: Sequence[bytes]) -> bytes:
        return block_hash(self, request, index, [b""] * index)

    monkeypatch.setattr(KVCacheManager, "_block_hash", mutant)


def hit_on_partial_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block counts as equal when all but its last token is."""
    token_ids = Request.token_ids

    def mutant(self: Request, start: int, stop: int) -> list[int]:
        return token_ids(self, start, max(start + 1, stop - 1))

    monkeypatch.setattr(Request, "token_ids", mutant)


def hit_of_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix hit may leave nothing to compute."""
    get_computed_blocks = KVCacheManager.get_computed_blocks

    def mutant(self: KVCacheManager, request: Request) -> list[BlockId]:
        request.output_ids.append(1)
        try:
            return get_computed_blocks(self, request)
        finally:
            request.output_ids.pop()

    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", mutant)


def short_block_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by one: the block of the last token is forgotten when it would be the block's first."""
    monkeypatch.setattr(
        KVCacheManager, "num_blocks_for", lambda self, num_tokens: max(1, -(-(num_tokens - 1) // self.block_size))
    )


def publish_before_landing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks can be found as soon as a plan will fill them."""
    schedule = Scheduler.schedule

    def mutant(self: Scheduler, now_s: float) -> SchedulerOutput:
        plan = schedule(self, now_s)
        for request in self._running.values():
            self._cache.publish(request, min(request.num_tokens, request.num_computed_tokens))
        return plan

    monkeypatch.setattr(Scheduler, "schedule", mutant)


def publish_of_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failed row has written can be found."""
    update = Scheduler.update

    def mutant(self: Scheduler, plan: SchedulerOutput, result: ModelRunnerOutput, now_s: float) -> list[RequestOutput]:
        for index in result.failures:
            request = self._requests.get(plan.rows[index].request_id)
            if request is not None and request.request_id in self._running:
                self._cache.publish(request, min(request.num_tokens, request.num_computed_tokens))
        return update(self, plan, result, now_s)

    monkeypatch.setattr(Scheduler, "update", mutant)


def forgotten_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed request goes on where it was, without the KV it has lost."""
    start = Scheduler._start

    def mutant(self: Scheduler, request: Request, num_hit_tokens: int) -> None:
        if request.status is RequestStatus.PREEMPTED:
            num_hit_tokens = max(num_hit_tokens, min(request.num_discarded_tokens, request.num_tokens - 1))
        start(self, request, num_hit_tokens)

    monkeypatch.setattr(Scheduler, "_start", mutant)


def preempted_row_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan keeps the row of a request that was preempted while the plan was made."""
    monkeypatch.setattr(BatchBuilder, "remove_row", lambda self, request: None)


def budget_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may have one token more than its budget."""
    init = BatchBuilder.__init__
    monkeypatch.setattr(BatchBuilder, "__init__", lambda self, budget, logits: init(self, budget + 1, logits))


def logits_budget_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may want one row of logits more than there is memory for."""
    init = BatchBuilder.__init__
    monkeypatch.setattr(BatchBuilder, "__init__", lambda self, budget, logits: init(self, budget, logits + 1))


def hit_in_an_owed_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix is taken from the cache although logits of it are wanted."""
    get_computed_blocks = KVCacheManager.get_computed_blocks

    def mutant(self: KVCacheManager, request: Request) -> list[BlockId]:
        num_prompt_logits, request.num_prompt_logits = request.num_prompt_logits, request.num_prompt_tokens - 1
        try:
            return get_computed_blocks(self, request)
        finally:
            request.num_prompt_logits = num_prompt_logits

    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", mutant)


def prompt_reported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted request begins its prompt's log-probabilities anew."""
    preempt = Scheduler._preempt

    def mutant(self: Scheduler, request: Request, batch: BatchBuilder) -> None:
        preempt(self, request, batch)
        request.num_prompt_logits = 0

    monkeypatch.setattr(Scheduler, "_preempt", mutant)


def prompt_position_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last positions of a chunk are left out, and count as reported."""
    add_row = BatchBuilder.add_row

    def mutant(self: BatchBuilder, request: Request, num_tokens: int, *args: Any) -> None:
        add_row(self, request, num_tokens, *args)
        if num_tokens > 2 and request.num_owed_logits > 0:
            request.num_prompt_logits += 1

    monkeypatch.setattr(BatchBuilder, "add_row", mutant)


def credit_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go on when their credit is used up."""
    accept_token = Scheduler._accept_token

    def mutant(self: Scheduler, request: Request, *args: Any) -> RequestOutput:
        if request.token_credit is not None and request.status is not RequestStatus.PREEMPTED:
            request.token_credit += 1
        return accept_token(self, request, *args)

    monkeypatch.setattr(Scheduler, "_accept_token", mutant)


def deadline_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at the clock."""
    monkeypatch.setattr("engine.core.deadlines.Deadlines.pop_due", lambda self, now_s: [])


def completion_lost_on_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled request vanishes without a word."""
    monkeypatch.setattr(Scheduler, "_finish_now", lambda self, request, reason: self._finish(request, reason) and None)


def completion_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled request ends twice."""
    finish_now = Scheduler._finish_now

    def mutant(self: Scheduler, request: Request, reason: EndReason) -> None:
        finish_now(self, request, reason)
        self._outputs.append(self._outputs[-1])

    monkeypatch.setattr(Scheduler, "_finish_now", mutant)


def late_token_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that lands after its request has ended is delivered."""
    update = Scheduler.update

    def mutant(self: Scheduler, plan: SchedulerOutput, result: ModelRunnerOutput, now_s: float) -> list[RequestOutput]:
        ended = [request.is_finished for request in self._in_flight[0][1]]
        outputs = update(self, plan, result, now_s)
        for row, token_id, is_late in zip(plan.rows, result.token_ids, ended, strict=True):
            if is_late and token_id >= 0:
                outputs.append(RequestOutput(row.request_id, 0, (token_id,)))
        return outputs

    monkeypatch.setattr(Scheduler, "update", mutant)


def stop_one_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """End and stop tokens are noticed one token late."""
    finish_reason = scheduler_module.finish_reason

    def mutant(request: Request, end_token_ids: frozenset[int]) -> EndReason | None:
        reason = finish_reason(request, end_token_ids)
        return None if reason is EndReason.END_TOKEN and request.num_tokens < request.max_num_tokens else reason

    monkeypatch.setattr(scheduler_module, "finish_reason", mutant)


def head_never_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liveness: a request at its preemption bound is admitted only into a pool with a block to spare, which may not
    exist.
    """
    allocate_slots = KVCacheManager.allocate_slots

    def mutant(self: KVCacheManager, request: Request, num_tokens: int, computed_blocks: Sequence[BlockId] = ()) -> Any:
        if request.num_computed_tokens == 0 and num_tokens + self.block_size > self.pool.num_blocks * self.block_size:
            return None
        return allocate_slots(self, request, num_tokens, computed_blocks)

    monkeypatch.setattr(KVCacheManager, "allocate_slots", mutant)


def parked_hold_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liveness: parked requests keep their blocks whoever waits."""
    monkeypatch.setattr(Scheduler, "_only_parked_run", lambda self: False)


MUTANTS: list[tuple[Mutate, type[Exception] | tuple[type[Exception], ...], str | None]] = [
    (free_before_fence, OracleViolation, "attends to position"),
    (hit_leaves_fence, IntegrityError, "deferred"),
    (hit_without_reference, IntegrityError, "reference count"),
    (double_free, IntegrityError, "!= |reference count"),
    (hash_survives_reuse, IntegrityError, "hash"),
    (hash_without_salt, OracleViolation, "attends to position"),
    (hash_not_chained, OracleViolation, "attends to position"),
    (hit_on_partial_block, OracleViolation, "attends to position"),
    (hit_of_every_token, AssertionError, "nothing to compute"),
    (short_block_table, IntegrityError, "slots"),
    (publish_before_landing, OracleViolation, "attends to position"),
    (publish_of_failed_row, OracleViolation, "attends to position"),
    (forgotten_recompute, OracleViolation, "attends to position"),
    (preempted_row_stays, OracleViolation, "not known"),
    (budget_ignored, AssertionError, "budget exceeded"),
    (logits_budget_ignored, AssertionError, "rows of logits"),
    (hit_in_an_owed_prompt, IntegrityError, "prompt logits"),
    (prompt_reported_again, OracleViolation, "prompt tokens from"),
    (prompt_position_left_out, (OracleViolation, IntegrityError), "prompt tokens from|prompt logits"),
    (credit_ignored, AssertionError, "granted"),
    (deadline_ignored, AssertionError, "alive after its deadline"),
    (completion_lost_on_cancel, AssertionError, "never ended"),
    (completion_twice, OracleViolation, "after its completion"),
    (late_token_delivered, OracleViolation, "after its completion"),
    (stop_one_late, AssertionError, None),
    (head_never_fits, AssertionError, "work is left"),
    (parked_hold_the_pool, AssertionError, "never ended|work is left"),
]


@pytest.mark.parametrize(("mutate", "error", "message"), MUTANTS, ids=[mutate.__name__ for mutate, _, _ in MUTANTS])
def test_mutant_is_found(
    monkeypatch: pytest.MonkeyPatch,
    simulate: Callable[..., Any],
    mutate: Mutate,
    error: type[Exception] | tuple[type[Exception], ...],
    message: str | None,
) -> None:
    mutate(monkeypatch)
    with pytest.raises(error, match=message):
        run_all_worlds(simulate)


def test_core_passes_the_worlds_that_find_mutants(simulate: Callable[..., Any]) -> None:
    run_all_worlds(simulate)


def run_all_worlds(simulate: Callable[..., Any]) -> None:
    for seed in range(NUM_WORLDS):
        simulate(seed, OPERATIONS_PER_WORLD)
