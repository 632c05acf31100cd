"""Data between scheduler, runner and server: frozen, complete when created, plain ints and tuples."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from chairlift.service.end_reason import EndReason
from engine.core.latency.step_time import StepTimeErrors
from engine.core.request import BlockId, RequestId, SamplingParams
from engine.core.state_snapshots import SavedState

if TYPE_CHECKING:
    from engine.constraints.constraint import Constraint


class NewRequest(NamedTuple):
    """A request that enters or re-enters the batch, as the runner needs it.

    Attributes:
        token_ids: prompt and output known so far.
        num_prompt_tokens: number of prompt tokens among them; penalties and random numbers depend on it.
        block_ids: the complete block table so far, prefix-cache hits first.
        constraint: structured-output constraint; may lag behind by tokens drawn before a preemption.
        adapter: index of the adapter that computes it; None: the base model.
        snapshot: slot of the state copy that it resumes from; None: its first row begins at position 0, or the model
            keeps no state besides keys and values.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams
    block_ids: tuple[BlockId, ...]
    constraint: "Constraint | None" = None
    adapter: int | None = None
    snapshot: int | None = None


class ScheduledRow(NamedTuple):
    """One request's share of a step.

    Attributes:
        num_scheduled_tokens: query tokens of this row, >= 1.
        num_computed_tokens: position of the first of them.
        new_block_ids: blocks appended to its table since the row before (empty for a row that is in `new_requests`).
        samples: whether the row reaches the last known token, so that the next token is sampled.
        num_prompt_logits: number of prompt positions that yield the log-probability of the following prompt token: the
            last ones of the row, without that of the last prompt token.
    """

    request_id: RequestId
    num_scheduled_tokens: int
    num_computed_tokens: int
    new_block_ids: tuple[BlockId, ...]
    samples: bool
    num_prompt_logits: int = 0

    def prompt_logits(self, num_prompt_tokens: int) -> range:
        """Returns the positions that `num_prompt_logits` counts."""
        stop = min(self.num_computed_tokens + self.num_scheduled_tokens, num_prompt_tokens - 1)
        return range(stop - self.num_prompt_logits, stop)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step. The runner keeps per-request state and applies these differences in order.

    Attributes:
        step: number of the plan, from 1.
        removed_request_ids: requests to remove (finished or preempted since the last plan).
        new_requests: requests to add (admitted or resumed).
        rows: the batch in packing order: one-token rows first.
        num_tokens: sum of num_scheduled_tokens.
        saved_states: states to copy before the rows are computed, but after those of new requests are restored.
        drafts: of the last rows, one each: tokens guessed to follow the row's first token, which is its last known one.
            The row computes them too, and draws a token before and behind each of them.

    A plan needs logits at max_num_seqs positions at most, sampling rows, drafts and prompt logprobs together.
    """

    step: int
    removed_request_ids: tuple[RequestId, ...]
    new_requests: tuple[NewRequest, ...]
    rows: tuple[ScheduledRow, ...]
    num_tokens: int
    saved_states: tuple[SavedState, ...] = ()
    drafts: tuple[tuple[int, ...], ...] = ()


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: of the chosen token and of the best alternatives, best first.

    Raw model logprobs: temperature 1, before penalties, bias and filters.
    """

    chosen: float
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of one step, aligned with the rows of its plan.

    Attributes:
        token_ids: one per row: the sampled token, or -1 for a row that does not sample or failed.
        logprobs: of rows that requested them, by row index.
        failures: rows that failed alone (NaN logits): row index -> message. Other rows are unaffected.
        prompt_logprobs: of the prompt tokens that follow the positions of `num_prompt_logits`, by row index.
        draft_tokens: aligned with the drafts of its plan: all tokens that the row yields, see `drafts.confirmed`; the
            first one is that in `token_ids`. Empty for a row that failed.
    """

    step: int
    token_ids: tuple[int, ...]
    logprobs: dict[int, TokenLogprobs]
    failures: dict[int, str]
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    draft_tokens: tuple[tuple[int, ...], ...] = ()


class PromptLogprobs(NamedTuple):
    """Log-probabilities of prompt tokens, starting at an index of the prompt."""

    start_index: int
    tokens: tuple[TokenLogprobs, ...]


class TimeAccount(NamedTuple):
    """Time of a request since its arrival, by activity; the five add up.

    Attributes:
        queued_s: until the first step that ran it.
        prefill_s: from that step to its first token, less the last two.
        decode_s: from the first token on, less the last two.
        paused_s: without token credit (backpressure).
        preempted_s: waiting to be resumed after a preemption, with credit.
    """

    queued_s: float
    prefill_s: float
    decode_s: float
    paused_s: float
    preempted_s: float
    num_preemptions: int


class RequestCompletion(NamedTuple):
    """The end of a request, reported exactly once."""

    reason: EndReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    time: TimeAccount
    stop_token_id: int | None = None
    detail: str = ""


class RequestOutput(NamedTuple):
    """Output of one request after a step: new tokens, prompt logprobs, its completion, or several of these.

    Attributes:
        start_index: output index of the first of `token_ids`.
        num_cached_tokens: set with the first token, otherwise None.
        time: time until these tokens; set with the first token, with the last one before a pause, and with the first
            one after a pause or a preemption.
        prompt_logprobs: parts in order from index 1, the last one before the first token.
    """

    request_id: RequestId
    start_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int | None = None
    completion: RequestCompletion | None = None
    time: TimeAccount | None = None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Load and totals, for status messages and admission. Totals count since start.

    The fields with defaults are those of the policy `slo`, and at the end those of drafts; otherwise they keep them.

    Attributes:
        num_blocks, num_free_blocks: of `block_size` tokens in all layers, see `SchedulerConfig.num_cache_blocks`; those
            that a new request can take, cached ones included, are free.
        prompt_tokens_per_s: prompt tokens computed per second while prompts wait for time in a step, measured in the
            last second of steps, otherwise as the step-time model expects; 0: not measured yet.
        model_coefficients: the five of the step-time model, in seconds (see `Coefficients`); empty: there is no model.
        on_time_tokens, best_effort_tokens: tokens of waiting and running prompts that are not computed yet, by lane.
        min_slack_s: least time to the next due token of a running request when the last step was planned, seconds from
            the start of that step; None: none is due.
        num_stalls: steps that took far longer than predicted.
        step_time_errors: relative errors of predicted step times; None: there is no model.
        num_infeasible_total: requests ended because their targets could not be met.
        num_degraded_total: requests made best effort for the same reason.
        num_itl_infeasible_total: steps that admitted no request with targets because decoding one row more would exceed
            its inter-token target.
        num_drafts_total, num_draft_tokens_total: drafts that were verified, and their tokens.
        num_accepted_tokens_total: of these, those that the model drew too.
    """

    num_running: int
    num_waiting: int
    num_waiting_prefill_tokens: int
    num_free_blocks: int
    num_blocks: int
    num_preemptions_total: int
    num_recomputed_tokens_total: int
    prefix_cache_queries_total: int
    prefix_cache_hits_total: int
    num_generated_tokens_total: int
    prompt_tokens_per_s: float = 0.0
    model_coefficients: tuple[float, ...] = ()
    on_time_tokens: int = 0
    best_effort_tokens: int = 0
    min_slack_s: float | None = None
    num_stalls: int = 0
    step_time_errors: StepTimeErrors | None = None
    num_infeasible_total: int = 0
    num_degraded_total: int = 0
    num_itl_infeasible_total: int = 0
    num_drafts_total: int = 0
    num_draft_tokens_total: int = 0
    num_accepted_tokens_total: int = 0
