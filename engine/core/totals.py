"""What a scheduler has counted since its start."""

from dataclasses import dataclass

from engine.core.request import Request, RequestStatus


@dataclass(slots=True)
class Totals:
    """Counts since the start; see `SchedulerStats`, whose totals they are."""

    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_generated_tokens: int = 0

    def count_admission(self, request: Request, num_hit_tokens: int) -> None:
        """Counts what an admitted request found in the prefix cache; call it before its status changes."""
        if request.status is RequestStatus.PREEMPTED:
            self.num_recomputed_tokens += max(0, request.num_discarded_tokens - num_hit_tokens)
            return
        if request.num_owed_logits <= 0:  # otherwise the cache was not queried
            self.num_queried_tokens += request.num_prompt_tokens
        self.num_hit_tokens += min(num_hit_tokens, request.num_prompt_tokens)
