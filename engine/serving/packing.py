"""Converts dataclasses to wire messages: step rows to the columns of a StepResult, and completions, rejections and
engine states.
"""

from dataclasses import dataclass, field

from google.protobuf.duration import from_nanoseconds

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.core.latency.step_time import ERROR_BOUNDS, StepTimeErrors
from engine.core.outputs import (
    PromptLogprobs,
    RequestCompletion,
    RequestOutput,
    SchedulerStats,
    TimeAccount,
    TokenLogprobs,
)
from engine.errors import AdapterNotFound, EngineDraining, QueueFull, RequestError, RequestTooLong
from engine.interfaces import EngineState, LoopSnapshot

QUEUE_FULL_RETRY_S = 1.0

_STATES = {
    EngineState.LOADING: pb.ENGINE_STATE_LOADING,
    EngineState.SERVING: pb.ENGINE_STATE_SERVING,
    EngineState.DRAINING: pb.ENGINE_STATE_DRAINING,
    EngineState.FAILED: pb.ENGINE_STATE_FAILED,
}


@dataclass(slots=True)
class _Row:
    epoch: int
    start_index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class StepColumns:
    """Unsent rows of one session, from one or several steps.

    A request has at most one row; tokens of later steps are appended to it.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._completions: list[pb.Completion] = []
        self._ended_handles: set[int] = set()
        self._first_tokens: list[pb.FirstToken] = []
        self._prompt_logprobs: list[pb.PromptLogprobs] = []
        self._times: dict[int, pb.TimeAccount] = {}
        self._num_tokens = 0
        self._num_logprobs = 0  # of prompts and outputs

    def __bool__(self) -> bool:
        return bool(self._rows or self._completions or self._first_tokens or self._prompt_logprobs)

    @property
    def num_values(self) -> int:
        """Unsent tokens and log-probabilities, which make up the size of the message: at most 9 bytes each."""
        return self._num_tokens + self._num_logprobs

    def add(self, handle: int, epoch: int, output: RequestOutput) -> None:
        """Adds the output of a step for one request."""
        if output.prompt_logprobs is not None:
            self._add_prompt_logprobs(handle, epoch, output.prompt_logprobs)
        if output.token_ids:
            self._add_tokens(handle, epoch, output)
        if output.num_cached_tokens is not None:
            self._first_tokens.append(
                pb.FirstToken(handle=handle, epoch=epoch, num_cached_tokens=output.num_cached_tokens)
            )
        if output.time is not None:
            self._times[handle] = _time_message(handle, epoch, output.time)
        if output.completion is not None:
            self.add_completion(completion_message(handle, epoch, output.completion))

    def add_completion(self, completion: pb.Completion) -> None:
        """Adds the completion of a request."""
        self._completions.append(completion)
        self._ended_handles.add(completion.handle)

    def has_ended(self, handle: int) -> bool:
        """Whether a completion of this handle is among the rows."""
        return handle in self._ended_handles

    def to_message(self) -> pb.StepResult:
        """Returns the rows as columns; the caller sets step counts, load and times."""
        rows = self._rows.values()
        message = pb.StepResult(
            handles=self._rows.keys(),
            token_ids=[token_id for row in rows for token_id in row.token_ids],
            start_indices=[row.start_index for row in rows],
            completions=self._completions,
            first_tokens=self._first_tokens,
            prompt_logprobs=self._prompt_logprobs,
            time_accounts=self._times.values(),
        )
        if self._num_tokens != len(rows):
            message.token_counts.extend(len(row.token_ids) for row in rows)
        if any(row.epoch for row in rows):
            message.epochs.extend(row.epoch for row in rows)
        if any(row.logprobs for row in rows):
            message.logprobs.CopyFrom(_logprob_columns(list(rows)))
        return message

    def _add_prompt_logprobs(self, handle: int, epoch: int, logprobs: PromptLogprobs) -> None:
        message = pb.PromptLogprobs(handle=handle, epoch=epoch, start_index=logprobs.start_index)
        message.top_width = len(logprobs.tokens[0].top_ids)
        for token in logprobs.tokens:
            message.chosen.append(token.chosen)
            message.top_ids.extend(token.top_ids)
            message.top_values.extend(token.top_values)
        self._prompt_logprobs.append(message)
        self._num_logprobs += len(message.chosen) + len(message.top_ids)

    def _add_tokens(self, handle: int, epoch: int, output: RequestOutput) -> None:
        self._num_tokens += len(output.token_ids)
        for logprobs in output.logprobs:
            self._num_logprobs += 1 + len(logprobs.top_ids)
        row = self._rows.get(handle)
        if row is None:
            self._rows[handle] = _Row(epoch, output.start_index, list(output.token_ids), list(output.logprobs))
            return
        assert output.start_index == row.start_index + len(row.token_ids), "a step skipped or repeated a token"
        row.token_ids.extend(output.token_ids)
        row.logprobs.extend(output.logprobs)


def _logprob_columns(rows: list[_Row]) -> pb.LogprobColumns:
    columns = pb.LogprobColumns()
    for index, row in enumerate(rows):
        if not row.logprobs:
            continue
        columns.rows.append(index)
        columns.top_widths.append(len(row.logprobs[0].top_ids))
        for logprobs in row.logprobs:
            columns.chosen.append(logprobs.chosen)
            columns.top_ids.extend(logprobs.top_ids)
            columns.top_values.extend(logprobs.top_values)
    return columns


def completion_message(handle: int, epoch: int, completion: RequestCompletion) -> pb.Completion:
    """Converts a completion."""
    time = completion.time
    return pb.Completion(
        handle=handle,
        epoch=epoch,
        reason=f"COMPLETION_REASON_{completion.reason.name}",
        stop_token_id=completion.stop_token_id or 0,
        num_prompt_tokens=completion.num_prompt_tokens,
        num_cached_tokens=completion.num_cached_tokens,
        num_output_tokens=completion.num_output_tokens,
        queued_us=_microseconds(time.queued_s),
        prefill_us=_microseconds(time.prefill_s),
        decode_us=_microseconds(time.decode_s),
        parked_us=_microseconds(time.paused_s),
        preempted_us=_microseconds(time.preempted_s),
        num_preemptions=time.num_preemptions,
        detail=completion.detail,
    )


def _time_message(handle: int, epoch: int, time: TimeAccount) -> pb.TimeAccount:
    return pb.TimeAccount(
        handle=handle,
        epoch=epoch,
        queued_us=_microseconds(time.queued_s),
        prefill_us=_microseconds(time.prefill_s),
        parked_us=_microseconds(time.paused_s),
        preempted_us=_microseconds(time.preempted_s),
        num_preemptions=time.num_preemptions,
    )


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def rejection_message(handle: int, epoch: int, error: RequestError) -> pb.Rejection:
    """Converts the error of a rejected submission."""
    rejection = pb.Rejection(handle=handle, epoch=epoch, detail=str(error), reason=pb.REJECTION_REASON_INVALID)
    if isinstance(error, RequestTooLong):
        rejection.reason = pb.REJECTION_REASON_TOO_LONG
    elif isinstance(error, EngineDraining):
        rejection.reason = pb.REJECTION_REASON_DRAINING
    elif isinstance(error, AdapterNotFound):
        rejection.reason = pb.REJECTION_REASON_NO_ADAPTER
    elif isinstance(error, QueueFull):
        rejection.reason = pb.REJECTION_REASON_QUEUE_FULL
        rejection.retry_after.CopyFrom(from_nanoseconds(round(QUEUE_FULL_RETRY_S * 1e9)))
    return rejection


def status_message(
    state: EngineState,
    detail: str,
    snapshot: LoopSnapshot | None,
    *,
    is_stalled: bool,
    adapters: pb.AdapterList | None = None,
) -> pb.EngineStatus:
    """Converts state, heartbeat and load; without a snapshot, before the step loop runs, there is no load."""
    status = pb.EngineStatus(state=_STATES[state], detail=detail, is_stalled=is_stalled, adapters=adapters)
    if snapshot is not None:
        status.engine_step = snapshot.engine_step
        status.loop_turns = snapshot.loop_turns
        status.load.CopyFrom(load_message(snapshot))
        if snapshot.stats.step_time_errors is not None:
            status.latency.CopyFrom(_latency_message(snapshot.stats, snapshot.stats.step_time_errors))
    return status


def _latency_message(stats: SchedulerStats, errors: StepTimeErrors) -> pb.LatencyStats:
    return pb.LatencyStats(
        error_bounds=ERROR_BOUNDS,
        decode_errors=errors.decode,
        prompt_errors=errors.prompt,
        decode_error_sum=errors.decode_sum,
        prompt_error_sum=errors.prompt_sum,
        num_stalls_total=errors.num_stalls,
        num_infeasible_total=stats.num_infeasible_total,
        num_degraded_total=stats.num_degraded_total,
        num_itl_infeasible_total=stats.num_itl_infeasible_total,
    )


def load_message(snapshot: LoopSnapshot) -> pb.LoadStats:
    """Converts the load of the engine."""
    stats = snapshot.stats
    message = pb.LoadStats(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_waiting_prefill_tokens=stats.num_waiting_prefill_tokens,
        num_free_blocks=stats.num_free_blocks,
        num_preemptions_total=stats.num_preemptions_total,
        num_recomputed_tokens_total=stats.num_recomputed_tokens_total,
        prefix_cache_queries_total=stats.prefix_cache_queries_total,
        prefix_cache_hits_total=stats.prefix_cache_hits_total,
        step_us=snapshot.step_us,
        execute_us=snapshot.execute_us,
        num_batched_tokens=snapshot.num_batched_tokens,
        num_generated_tokens_total=stats.num_generated_tokens_total,
        jit_compiles_after_ready_total=snapshot.num_late_compiles,
        integrity_checks_total=snapshot.num_integrity_checks,
        integrity_failures_total=snapshot.num_integrity_failures,
        prompt_tokens_per_second=stats.prompt_tokens_per_s,
        model_coefficients=stats.model_coefficients,
        min_slack_us=None if stats.min_slack_s is None else _microseconds(stats.min_slack_s),
        num_drafts_total=stats.num_drafts_total,
        num_draft_tokens_total=stats.num_draft_tokens_total,
        num_accepted_tokens_total=stats.num_accepted_tokens_total,
    )
    if stats.model_coefficients:  # the policy has lanes
        message.lane_tokens.extend((stats.on_time_tokens, stats.best_effort_tokens))
    return message
