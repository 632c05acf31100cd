"""What a scheduler has counted since its start."""

from collections.abc import Collection
from dataclasses import dataclass

from engine.core.config import SchedulerConfig
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.outputs import SchedulerStats
from engine.core.request import Request, RequestStatus
from engine.core.waiting_queue import WaitingQueue


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

    def stats(
        self, running: Collection[Request], waiting: WaitingQueue, cache: KVCacheManager, config: SchedulerConfig
    ) -> SchedulerStats:
        """Returns the totals with the current load."""
        missing = (request.num_tokens + request.num_pending_tokens - request.num_computed_tokens for request in running)
        return SchedulerStats(
            num_running=len(running),
            num_waiting=len(waiting),
            num_waiting_prefill_tokens=waiting.num_tokens + sum(num for num in missing if num > 1),
            num_free_blocks=cache.num_available_blocks // config.cache_groups.num_groups,
            num_blocks=config.num_cache_blocks,
            num_preemptions_total=self.num_preemptions,
            num_recomputed_tokens_total=self.num_recomputed_tokens,
            prefix_cache_queries_total=self.num_queried_tokens,
            prefix_cache_hits_total=self.num_hit_tokens,
            num_generated_tokens_total=self.num_generated_tokens,
        )
