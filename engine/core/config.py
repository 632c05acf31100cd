"""The numbers the scheduler works with; the edge checks them and passes them in."""

from dataclasses import dataclass
from typing import Literal

SchedulingPolicyName = Literal["fcfs", "priority", "static"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy.

    Attributes:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        max_num_seqs: seats: requests that hold blocks at once.
        max_num_batched_tokens: token budget of one step.
        max_model_len: most tokens of prompt and output.
        end_token_ids: the model's end tokens.
        enable_prefix_caching: share full blocks of equal prefixes.
        policy: order of admission; `static` fills a batch and runs it until its longest is done.
        max_waiting: most requests in the queue; more are rejected.
        max_preemptions: bound per request: one that reached it is never chosen again.
        max_steps_in_flight: plans that may be issued before the first is answered.
        ageing_s: under `priority`, waiting this long is worth one priority level.
    """

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    end_token_ids: frozenset[int] = frozenset()
    block_size: int = 16
    enable_prefix_caching: bool = True
    policy: SchedulingPolicyName = "fcfs"
    max_waiting: int = 4096
    max_preemptions: int = 8
    max_steps_in_flight: int = 1
    ageing_s: float = 10.0
