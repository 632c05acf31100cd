"""Who yields when the blocks run out."""

from collections.abc import Iterable

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.policy import SchedulingPolicy
from engine.core.request import Request


def choose_victim(candidates: Iterable[Request], policy: SchedulingPolicy, cache: KVCacheManager) -> Request:
    """Of the lowest class, the running request that loses the fewest computed tokens; of equals, the latest.

    Tokens in published blocks count as kept: the prefix cache will probably give them back.
    """
    return max(
        candidates,
        key=lambda request: (
            policy.preemption_class(request),
            cache.num_published_tokens(request) - request.num_computed_tokens,
            request.arrival_index,
        ),
    )
