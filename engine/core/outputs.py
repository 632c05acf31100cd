"""What scheduler, runner and server hand to each other: frozen, complete when created, plain ints and tuples."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from chairlift.service.end_reason import EndReason
from engine.core.request import BlockId, RequestId, SamplingParams

if TYPE_CHECKING:
    from engine.constraints.constraint import Constraint


@dataclass(frozen=True, slots=True)
class NewRequest:
    """Everything the runner must learn of a request that (re)enters the batch.

    Attributes:
        token_ids: prompt and output known so far.
        num_prompt_tokens: how many of them are prompt: penalties and random numbers need to know.
        block_ids: its whole block table so far, prefix-cache hits first.
        constraint: what its answer may go on with; may be behind by tokens that were drawn before it left the batch.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams
    block_ids: tuple[BlockId, ...]
    constraint: "Constraint | None" = None


class ScheduledRow(NamedTuple):
    """One request's share of a step.

    Attributes:
        num_scheduled_tokens: query tokens of this row, >= 1.
        num_computed_tokens: position of the first of them.
        new_block_ids: blocks appended to its table since the row before (empty for a row that is in `new_requests`).
        samples: whether the row reaches the last known token, so that a next token is drawn.
        num_prompt_logits: so many of its positions in the prompt yield the log-probabilities of the tokens behind them:
            the last ones, that of the last prompt token excepted.
    """

    request_id: RequestId
    num_scheduled_tokens: int
    num_computed_tokens: int
    new_block_ids: tuple[BlockId, ...]
    samples: bool
    num_prompt_logits: int = 0

    def prompt_logits(self, num_prompt_tokens: int) -> range:
        """The positions that `num_prompt_logits` counts."""
        stop = min(self.num_computed_tokens + self.num_scheduled_tokens, num_prompt_tokens - 1)
        return range(stop - self.num_prompt_logits, stop)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step. The runner keeps per-request state and applies these differences in this order.

    Attributes:
        step: counts plans from 1.
        removed_request_ids: forget these (finished or preempted since the last plan).
        new_requests: learn these (admitted or resumed).
        rows: the batch, in the order in which it is packed: one-token rows first.
        num_tokens: sum of num_scheduled_tokens.

    Logits are wanted at max_num_seqs positions at most: of rows that sample and of prompts together.
    """

    step: int
    removed_request_ids: tuple[RequestId, ...]
    new_requests: tuple[NewRequest, ...]
    rows: tuple[ScheduledRow, ...]
    num_tokens: int


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: of the token that is there and of the best alternatives, best first.

    Raw model logprobs: temperature 1, before penalties, bias and filters.
    """

    chosen: float
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What one step yielded, aligned with the rows of its plan.

    Attributes:
        token_ids: one per row: the sampled token, or -1 for a row that does not sample or has failed.
        logprobs: per row that asked for them, by row index.
        failures: rows that failed by themselves (NaN logits), row index -> what happened. Others are unaffected.
        prompt_logprobs: of the prompt tokens behind the positions that `num_prompt_logits` of a row counts, by row
            index.
    """

    step: int
    token_ids: tuple[int, ...]
    logprobs: dict[int, TokenLogprobs]
    failures: dict[int, str]
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)


class PromptLogprobs(NamedTuple):
    """Log-probabilities of prompt tokens from an index in the prompt on."""

    start_index: int
    tokens: tuple[TokenLogprobs, ...]


class TimeAccount(NamedTuple):
    """Where the time of a request went since it arrived; the five add up.

    Attributes:
        queued_s: until the first step that ran it.
        prefill_s: from that step to its first token, decode_s: from then on; both without the next two.
        parked_s: without token credit.
        preempted_s: out of the batch after a preemption, with credit.
    """

    queued_s: float
    prefill_s: float
    decode_s: float
    parked_s: float
    preempted_s: float
    num_preemptions: int


class RequestCompletion(NamedTuple):
    """The end of a request, produced exactly once."""

    reason: EndReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    time: TimeAccount
    stop_token_id: int | None = None
    detail: str = ""


class RequestOutput(NamedTuple):
    """News of one request after a step: new tokens, log-probabilities of its prompt, its end, or several of these.

    Attributes:
        start_index: index in the output of the first of `token_ids`.
        num_cached_tokens: set with the first token since admission, else None.
        time: up to these tokens; set with the first token, the last one before it is parked, and the first one after it
            was parked or preempted.
        prompt_logprobs: pieces come in order from index 1 on, the last one before the first token.
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
    """Load and totals, for status messages and admission. Totals count since start."""

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
