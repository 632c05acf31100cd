"""What scheduler, runner and server hand to each other: frozen, complete when created, plain ints and tuples."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.core.request import BlockId, FinishReason, RequestId, SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """Everything the runner must learn of a request that (re)enters the batch.

    Attributes:
        token_ids: prompt and output known so far.
        num_prompt_tokens: how many of them are prompt: penalties and random numbers need to know.
        block_ids: its whole block table so far, prefix-cache hits first.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams
    block_ids: tuple[BlockId, ...]


class ScheduledRow(NamedTuple):
    """One request's share of a step.

    Attributes:
        num_scheduled_tokens: query tokens of this row, >= 1.
        num_computed_tokens: position of the first of them.
        new_block_ids: blocks appended to its table since the row before (empty for a row that is in `new_requests`).
        samples: whether the row reaches the last known token, so that a next token is drawn.
    """

    request_id: RequestId
    num_scheduled_tokens: int
    num_computed_tokens: int
    new_block_ids: tuple[BlockId, ...]
    samples: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step. The runner keeps per-request state and applies these differences in this order.

    Attributes:
        step: counts plans from 1.
        removed_request_ids: forget these (finished or preempted since the last plan).
        new_requests: learn these (admitted or resumed).
        rows: the batch, in the order in which it is packed: one-token rows first.
        num_tokens: sum of num_scheduled_tokens.
    """

    step: int
    removed_request_ids: tuple[RequestId, ...]
    new_requests: tuple[NewRequest, ...]
    rows: tuple[ScheduledRow, ...]
    num_tokens: int


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one output position: of the chosen token and of the best alternatives, best first.

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
    """

    step: int
    token_ids: tuple[int, ...]
    logprobs: dict[int, TokenLogprobs]
    failures: dict[int, str]


class RequestCompletion(NamedTuple):
    """The end of a request, produced exactly once."""

    reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    queued_s: float
    prefill_s: float
    stop_token_id: int | None = None
    detail: str = ""


class RequestOutput(NamedTuple):
    """News of one request after a step: new tokens, its end, or both.

    Attributes:
        start_index: index in the output of the first of `token_ids`.
        num_cached_tokens: set with the first token since admission, else None.
    """

    request_id: RequestId
    start_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int | None = None
    completion: RequestCompletion | None = None


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
