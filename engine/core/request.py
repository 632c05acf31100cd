"""A request as the engine knows it: token ids, limits, progress.

It knows neither text nor sockets. Only the scheduler writes to a `Request`; everyone else reads.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from engine.constraints.constraint import Constraint

RequestId = NewType("RequestId", int)
BlockId = NewType("BlockId", int)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping options with all values filled in; `engine/serving/convert.py` checks the ranges.

    Attributes:
        seed: keys the random numbers together with the output position, and nothing else.
        temperature: 0 is greedy.
        top_k: 0 keeps all tokens.
        logit_bias: pairs of token id and the value added to its logit.
        max_tokens: most output tokens in all, earlier ones (`Request.num_prior_output_tokens`) included.
        min_tokens: no end or stop token before this many.
        stop_token_ids: tokens that end the answer besides the model's end tokens.
        ignore_eos: do not stop at the model's end tokens.
        top_logprobs: alternatives to report per token; None reports no logprobs at all.
        prompt_logprobs: the same for the tokens of the prompt, all but the first.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None


class RequestStatus(Enum):
    """Where a request is. WAITING holds no blocks, RUNNING does; PARKED runs but has no token credit left."""

    WAITING = auto()
    PREEMPTED = auto()
    RUNNING = auto()
    PARKED = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way through the engine.

    `num_computed_tokens` is what the scheduler has handed out so far: tokens whose KV is in the cache once every step
    in flight has ended. `num_pending_tokens` counts samples that steps in flight will yield (0 or 1 with one step in
    flight). The request wants `num_computed_tokens` to reach `num_tokens + num_pending_tokens`; there is no other
    notion of prefill or decode.

    Invariants: 0 <= num_computed_tokens <= num_tokens + num_pending_tokens; num_pending_tokens <= num_rows_in_flight;
    num_prior_output_tokens <= len(output_ids); a WAITING, PREEMPTED or FINISHED request owns no blocks.

    Attributes:
        prompt_ids: the prompt; never changes.
        output_ids: tokens generated so far; those it arrived with come first.
        num_prior_output_tokens: how many output tokens it arrived with.
        arrival_s, deadline_s: monotonic seconds, read at the edge; past the deadline it ends with an error.
        budget_end_s: monotonic seconds; from then on it ends well, with what there is.
        token_credit: output tokens it may still generate before it is parked; None is unlimited. Below 0 when tokens
            that were in flight came after an unlimited request had been limited.
        constraint: what its answer may go on with, None for anything. The runner's: the scheduler hands it on unread.
        session: whose it is; the engine is shared out between sessions.
        has_moved: another engine had it before.
        waited_s: its age when it arrived.
        start_tag, num_charged_tokens: its place in the queue and the cost it was given for, see `policy.py`.
        arrival_index: counts accepted requests; breaks ties of arrival.
        max_num_tokens: prompt and output at most: the least of what max_tokens and the context allow; set when
            accepted.
        num_rows_in_flight: rows of it in steps that have not been answered.
        num_cached_tokens: prompt tokens found in the prefix cache at its first admission, -1 before.
        num_prompt_logits: positions of the prompt, from the first on, whose logits were asked for because it wants
            log-probabilities of the prompt; they are reported once the steps in flight have been answered.
        num_discarded_tokens: computed tokens that its last preemption threw away, cached or not.
        first_token_s: monotonic seconds, None before.
        spent_s, charged_until_s: where its time went until then; see `lifecycle.py`.
        has_time_news: whether it was parked or preempted since its account was last told.
    """

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    output_ids: list[int] = field(default_factory=list)
    priority: int = 0
    cache_salt: bytes = b""
    deadline_s: float | None = None
    budget_end_s: float | None = None
    token_credit: int | None = None
    label: str = ""
    session: int = 0
    has_moved: bool = False
    waited_s: float = 0.0
    constraint: "Constraint | None" = None

    status: RequestStatus = RequestStatus.WAITING
    arrival_index: int = 0
    start_tag: int = 0
    num_charged_tokens: int = 0
    max_num_tokens: int = 0
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_rows_in_flight: int = 0
    num_cached_tokens: int = -1
    num_prompt_logits: int = 0
    num_preemptions: int = 0
    num_discarded_tokens: int = 0
    first_token_s: float | None = None
    spent_s: list[float] = field(default_factory=lambda: [0.0] * 5)
    has_time_news: bool = False
    charged_until_s: float = field(init=False)
    num_prior_output_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.charged_until_s = self.arrival_s
        self.num_prior_output_tokens = len(self.output_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_owed_logits(self) -> int:
        """Positions of the prompt whose logits have still to be asked for. The last one shows no prompt token."""
        if self.params.prompt_logprobs is None:
            return 0
        return len(self.prompt_ids) - 1 - self.num_prompt_logits

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_finished(self) -> bool:
        """Whether its terminal output has been produced."""
        return self.status is RequestStatus.FINISHED

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known token ids [start, stop) of prompt and output together."""
        n = len(self.prompt_ids)
        if stop <= n:
            return list(self.prompt_ids[start:stop])
        if start >= n:
            return self.output_ids[start - n : stop - n]
        return [*self.prompt_ids[start:], *self.output_ids[: stop - n]]
