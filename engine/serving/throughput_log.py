"""Logs throughput and load every few seconds while there is work."""

import logging

from engine.interfaces import LoopSnapshot

_log = logging.getLogger(__name__)


class ThroughputLog:
    """Logs the difference between two snapshots of the step loop.

    Args:
        interval_s: interval between two lines.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._logged_at_s = 0.0
        self._last: LoopSnapshot | None = None

    def tick(self, snapshot: LoopSnapshot, now_s: float) -> None:
        """Logs a line if one is due: at INFO while there is work, at DEBUG when idle."""
        if self._last is None:
            self._last, self._logged_at_s = snapshot, now_s
        elapsed_s = now_s - self._logged_at_s
        if elapsed_s < self._interval_s:
            return
        last, stats = self._last, snapshot.stats
        num_prompt = snapshot.num_prompt_tokens_total - last.num_prompt_tokens_total
        num_generated = stats.num_generated_tokens_total - last.stats.num_generated_tokens_total
        num_queries = stats.prefix_cache_queries_total - last.stats.prefix_cache_queries_total
        num_hits = stats.prefix_cache_hits_total - last.stats.prefix_cache_hits_total
        is_busy = snapshot.engine_step > last.engine_step or stats.num_running + stats.num_waiting > 0
        prompt_rate, generation_rate = num_prompt / elapsed_s, num_generated / elapsed_s
        usage = 1 - stats.num_free_blocks / stats.num_blocks
        hit_rate = num_hits / num_queries if num_queries else 0.0
        num_preemptions = stats.num_preemptions_total - last.stats.num_preemptions_total
        _log.log(
            logging.INFO if is_busy else logging.DEBUG,
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%, Preemptions: %d",
            prompt_rate,
            generation_rate,
            stats.num_running,
            stats.num_waiting,
            100 * usage,
            100 * hit_rate,
            num_preemptions,
            extra={
                "prompt_tokens_per_s": round(prompt_rate, 1),
                "generation_tokens_per_s": round(generation_rate, 1),
                "num_running": stats.num_running,
                "num_waiting": stats.num_waiting,
                "kv_cache_usage": round(usage, 4),
                "prefix_cache_hit_rate": round(hit_rate, 4),
                "num_preemptions": num_preemptions,
            },
        )
        self._last, self._logged_at_s = snapshot, now_s
