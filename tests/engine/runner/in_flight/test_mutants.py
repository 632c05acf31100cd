"""The worlds have to be worth their time: each of these defects, put into the runner, must be found in one of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.core.block_pool import BlockPool
from engine.runner import batch as batch_module
from engine.runner.batch import BatchBuilder
from engine.runner.device_tokens import DeviceTokens
from engine.runner.model_runner import TorchModelRunner
from engine.runner.request_state import RequestState
from engine.runner.sampler import SampledBuffer
from engine.runner.sampling_state import SamplingState
from engine.runner.step_views import StepViews
from engine.runner.stream import InlineStream
from tests.support.engine.fake_model import OracleViolation
from tests.support.engine.stream import LateStream


def one_host_buffer_for_all_steps(monkeypatch):
    """The batch of the next step is written over one that the device has not copied yet."""
    init = BatchBuilder.__init__

    def mutant(self, **kwargs):
        init(self, **{**kwargs, "max_steps_in_flight": 1})

    monkeypatch.setattr(BatchBuilder, "__init__", mutant)


def one_result_buffer_for_all_steps(monkeypatch):
    """The samples of the next step arrive where those of this one have not been read yet."""
    init = TorchModelRunner.__init__

    def mutant(self, *args, **kwargs):
        init(self, *args, **kwargs)
        for index in range(len(self._results)):
            self._results[index] = self._results[0]

    monkeypatch.setattr(TorchModelRunner, "__init__", mutant)


def results_read_before_the_event(monkeypatch):
    """Nobody waits for the device."""
    monkeypatch.setattr(LateStream, "mark", lambda self: InlineStream().mark())


def newest_step_collected_first(monkeypatch):
    """The tokens of the step after are taken for those of this one."""
    collect = TorchModelRunner.collect

    def mutant(self):
        self._in_flight.reverse()
        try:
            return collect(self)
        finally:
            self._in_flight.reverse()

    monkeypatch.setattr(TorchModelRunner, "collect", mutant)


def ids_fed_to_the_next_row(monkeypatch):
    """The token of a row is remembered as another row's."""
    append = DeviceTokens.append

    def mutant(self, state_rows, num_tokens, token_ids, *, with_history):
        append(self, state_rows.roll(1), num_tokens, token_ids, with_history=with_history)

    monkeypatch.setattr(DeviceTokens, "append", mutant)


def ids_fed_by_row_of_the_batch(monkeypatch):
    """Rows of the batch are taken for rows of the state."""
    append = DeviceTokens.append

    def mutant(self, state_rows, num_tokens, token_ids, *, with_history):
        append(self, torch.arange(len(state_rows)), num_tokens, token_ids, with_history=with_history)

    monkeypatch.setattr(DeviceTokens, "append", mutant)


def ids_not_resolved(monkeypatch):
    """References to tokens go into the model."""
    monkeypatch.setattr(DeviceTokens, "resolve", lambda self, input_ids: None)


def ids_resolved_one_row_off(monkeypatch):
    """A reference is read as if rows counted from 1."""

    def mutant(self, input_ids):
        rows = torch.neg(input_ids).clamp(0, len(self.last_token_ids) - 1)
        input_ids.copy_(torch.where(input_ids < 0, self.last_token_ids[rows], input_ids))

    monkeypatch.setattr(DeviceTokens, "resolve", mutant)


def failed_row_feeds_minus_one(monkeypatch):
    """The token of a row that failed goes into the model."""

    def mutant(self, state_rows, num_tokens, token_ids, *, with_history):
        self.last_token_ids[state_rows] = token_ids
        if with_history:
            self.history[state_rows, num_tokens.long()] = token_ids.int()

    monkeypatch.setattr(DeviceTokens, "append", mutant)


def late_token_lands_in_a_row_with_a_new_owner(monkeypatch):
    """A token is written to its row whoever has it by then."""
    land_tokens = RequestState.land_tokens

    def mutant(self, landing, token_ids):
        land_tokens(self, landing._replace(plan_index=self._num_plans), token_ids)

    monkeypatch.setattr(RequestState, "land_tokens", mutant)


def late_tokens_never_land(monkeypatch):
    """The host goes on without the token: whatever is needed of it later is the device's newest instead."""
    monkeypatch.setattr(RequestState, "land_tokens", lambda self, landing, token_ids: None)


def tokens_in_flight_not_counted(monkeypatch):
    """A token counts from its landing on, so that the next step samples at the same position."""
    await_tokens, land_tokens = RequestState.await_tokens, RequestState.land_tokens

    def await_without(self, rows):
        landing = await_tokens(self, rows)
        self.num_tokens[rows] -= 1
        return landing

    def land_and_count(self, landing, token_ids):
        land_tokens(self, landing, token_ids)
        lands = self._vacated[landing.rows] <= landing.plan_index
        self.num_tokens[landing.rows[lands]] = landing.positions[lands] + 1

    monkeypatch.setattr(RequestState, "await_tokens", await_without)
    monkeypatch.setattr(RequestState, "land_tokens", land_and_count)


def freed_blocks_not_deferred(monkeypatch):
    """A freed block is given away while a step in flight still writes to it. As this stream keeps its order no token is
    wrong for it (the oracle executes rows in any order): the scheduler's integrity check notices.
    """
    free = BlockPool.free

    def mutant(self, block_ids):
        begun, self._last_begun_step = self._last_begun_step, self._last_ended_step
        free(self, block_ids)
        self._last_begun_step = begun

    monkeypatch.setattr(BlockPool, "free", mutant)


def padding_writes_to_slot_0(monkeypatch):
    """Padding has a slot."""
    pad = batch_module._pad

    def mutant(host, num_rows, size, num_samples):
        pad(host, num_rows, size, num_samples)
        host.slot_mapping[num_rows:size] = 0

    monkeypatch.setattr(batch_module, "_pad", mutant)


def padding_wants_logits_of_old_tokens(monkeypatch):
    """What an earlier step wanted logits of stays in the buffer."""
    pad = batch_module._pad

    def mutant(host, num_rows, size, num_samples):
        before = host.logits_indices[num_samples:size].copy()
        pad(host, num_rows, size, num_samples)
        host.logits_indices[num_samples:size] = before

    monkeypatch.setattr(batch_module, "_pad", mutant)


def bucket_too_small(monkeypatch):
    """A batch is cut to the size below."""

    def mutant(num_rows, ladder):
        return max((size for size in ladder if size <= num_rows), default=ladder[0])

    monkeypatch.setattr(batch_module, "bucket_of", mutant)


def history_not_uploaded_on_resumption(monkeypatch):
    """Whoever comes back is taken to be known still."""
    stage_histories = TorchModelRunner._stage_histories

    def mutant(self, plan):
        is_resumed = any(len(request.token_ids) > request.num_prompt_tokens for request in plan.new_requests)
        return [] if is_resumed else stage_histories(self, plan)

    monkeypatch.setattr(TorchModelRunner, "_stage_histories", mutant)


def samples_missing_in_history(monkeypatch):
    """Penalties see the prompt only."""
    append = DeviceTokens.append

    def mutant(self, state_rows, num_tokens, token_ids, *, with_history):
        append(self, state_rows, num_tokens, token_ids, with_history=False)

    monkeypatch.setattr(DeviceTokens, "append", mutant)


def host_history_shared_with_a_late_device(monkeypatch):
    """Penalties read the host's record, where tokens in flight are missing."""
    init = DeviceTokens.__init__

    def mutant(self, host_token_ids, stream, *, max_steps_in_flight):
        init(self, host_token_ids, stream, max_steps_in_flight=max_steps_in_flight)
        self.history = torch.from_numpy(host_token_ids)

    monkeypatch.setattr(DeviceTokens, "__init__", mutant)


def table_sent_one_block_short(monkeypatch):
    """The last block of the longest row stays on the host."""
    pack_table = BatchBuilder._pack_table

    def mutant(self, turn, block_table, rows, width):
        return pack_table(self, turn, block_table, rows, max(1, width - 1))

    monkeypatch.setattr(BatchBuilder, "_pack_table", mutant)


def biases_of_the_last_step_stay(monkeypatch):
    """Where nobody has biases, those of the step before are left in place."""
    advance = SamplingState.advance

    def mutant(self, columns, num_tokens, out):
        before = out.bias_start.copy()
        biases = advance(self, columns, num_tokens, out)
        if not len(biases.ids):
            out.bias_start[:] = before
        return biases

    monkeypatch.setattr(SamplingState, "advance", mutant)


def columns_of_the_last_step_stay(monkeypatch):
    """A row that has a new request is sampled as the one before wanted."""
    set_row = SamplingState.set_row

    def mutant(self, row, params):
        set_row(self, row, params)
        self.version = 0

    monkeypatch.setattr(SamplingState, "set_row", mutant)


def columns_of_another_buffer_stay(monkeypatch):
    """What was written to one of the host's buffers is taken to be in all of them."""
    build = BatchBuilder.build

    def mutant(self, plan, state):
        batch = build(self, plan, state)
        self._columns = [batch.columns] * len(self._columns)
        return batch

    monkeypatch.setattr(BatchBuilder, "build", mutant)


def sampler_shown_the_rows_of_another_step(monkeypatch):
    """How many rows there are is taken to say everything of them that concerns all together."""
    unbiased = StepViews.unbiased

    def mutant(self, columns, history):
        last = self._last_unbiased
        if last is not None and len(last[1].seed) == len(columns.rows):
            return last[1]
        return unbiased(self, columns, history)

    monkeypatch.setattr(StepViews, "unbiased", mutant)


def model_shown_another_number_of_tokens(monkeypatch):
    """How many rows there are is taken to say how many tokens."""
    step = StepViews.step

    def mutant(self, num_tokens, num_rows, num_samples):
        last = self._last_step
        if last is not None and len(last[1].seq_lens) == num_rows and len(last[1].logits_indices) == num_samples:
            return last[1]
        return step(self, num_tokens, num_rows, num_samples)

    monkeypatch.setattr(StepViews, "step", mutant)


def large_biases_cut_off(monkeypatch):
    """Biases that do not fit the buffer are read from it all the same."""
    monkeypatch.setattr(batch_module, "BIAS_CAPACITY", 1 << 30)


def min_tokens_forgets_tokens_in_flight(monkeypatch):
    """What ends an answer is forbidden one token too long."""
    fill = SamplingState.fill

    def mutant(self, rows, num_prompt_tokens, out):
        columns = fill(self, rows, num_prompt_tokens, out)
        return columns._replace(min_tokens=columns.min_tokens + 1)

    monkeypatch.setattr(SamplingState, "fill", mutant)


def alternatives_of_another_row(monkeypatch):
    """Log-probabilities are handed to the row before."""
    logprobs = SampledBuffer._logprobs

    def mutant(self, top_logprobs, max_top_logprobs):
        found = logprobs(self, top_logprobs, max_top_logprobs)
        return dict(zip(found, [*list(found.values())[1:], *list(found.values())[:1]], strict=True))

    monkeypatch.setattr(SampledBuffer, "_logprobs", mutant)


def state_row_given_away_twice(monkeypatch):
    """A removed request's row is free again while it is in use."""
    apply = RequestState.apply

    def mutant(self, plan):
        apply(self, plan)
        if plan.removed_request_ids and self._row_of:
            self._free_rows.append(next(iter(self._row_of.values())))

    monkeypatch.setattr(RequestState, "apply", mutant)


def blocks_of_running_rows_forgotten(monkeypatch):
    """Blocks that a row gets while it runs do not reach its table."""
    apply = RequestState.apply

    def mutant(self, plan):
        apply(self, replace(plan, rows=tuple(row._replace(new_block_ids=()) for row in plan.rows)))

    monkeypatch.setattr(RequestState, "apply", mutant)


def empty_plans_answered_out_of_turn(monkeypatch):
    """A plan without rows is answered before the steps in front of it."""
    collect = TorchModelRunner.collect

    def mutant(self):
        for index, (_, step) in enumerate(self._in_flight):
            if step is None:
                self._in_flight.rotate(-index)
                break
        return collect(self)

    monkeypatch.setattr(TorchModelRunner, "collect", mutant)


def sampled_late_rows_shift(monkeypatch):
    """Tokens are dealt to rows of the plan as if every row sampled."""
    array = np.flatnonzero
    monkeypatch.setattr(batch_module.np, "flatnonzero", lambda samples: np.arange(len(array(samples))))


MUTANTS = [
    (one_host_buffer_for_all_steps, (OracleViolation, AssertionError), None),
    (one_result_buffer_for_all_steps, (AssertionError, ValueError), None),
    (results_read_before_the_event, (AssertionError, ValueError), None),
    (newest_step_collected_first, AssertionError, None),
    (ids_fed_to_the_next_row, (OracleViolation, AssertionError), None),
    (ids_fed_by_row_of_the_batch, (OracleViolation, AssertionError), None),
    (ids_not_resolved, OracleViolation, "reads token -"),
    (ids_resolved_one_row_off, (OracleViolation, AssertionError), None),
    (failed_row_feeds_minus_one, OracleViolation, "reads token -1"),
    (late_token_lands_in_a_row_with_a_new_owner, (OracleViolation, AssertionError), None),
    (late_tokens_never_land, (OracleViolation, AssertionError), None),
    (tokens_in_flight_not_counted, OracleViolation, "has position|has num_tokens|reads token|has biases"),
    (freed_blocks_not_deferred, AssertionError, "resumed before its rows landed"),
    (padding_writes_to_slot_0, OracleViolation, "padding"),
    (padding_wants_logits_of_old_tokens, OracleViolation, "logits of tokens"),
    (bucket_too_small, Exception, None),
    (history_not_uploaded_on_resumption, OracleViolation, "history"),
    (samples_missing_in_history, OracleViolation, "history"),
    (host_history_shared_with_a_late_device, OracleViolation, "history"),
    (table_sent_one_block_short, OracleViolation, "its table is|attends"),
    (biases_of_the_last_step_stay, OracleViolation, "biases .* of 0"),
    (columns_of_the_last_step_stay, (OracleViolation, AssertionError), None),
    (columns_of_another_buffer_stay, OracleViolation, None),
    (sampler_shown_the_rows_of_another_step, OracleViolation, "are said to be"),
    (model_shown_another_number_of_tokens, OracleViolation, "tokens in"),
    (large_biases_cut_off, Exception, None),
    (min_tokens_forgets_tokens_in_flight, OracleViolation, "has biases"),
    (alternatives_of_another_row, AssertionError, None),
    (state_row_given_away_twice, AssertionError, "two owners"),
    (blocks_of_running_rows_forgotten, (OracleViolation, AssertionError), None),
    (empty_plans_answered_out_of_turn, AssertionError, "is due"),
    (sampled_late_rows_shift, (OracleViolation, AssertionError), None),
]


@pytest.mark.parametrize(("mutate", "error", "message"), MUTANTS, ids=[mutate.__name__ for mutate, _, _ in MUTANTS])
def test_mutant_is_found(monkeypatch, simulate_all, mutate, error, message):
    mutate(monkeypatch)
    with pytest.raises(error, match=message):
        simulate_all()
