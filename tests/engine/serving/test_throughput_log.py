"""The line every ten seconds."""

import logging

import pytest

from engine.core.outputs import SchedulerStats
from engine.interfaces import LoopSnapshot
from engine.serving.throughput_log import ThroughputLog


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Returns its records: threads of other tests may still log."""
    return [record for record in caplog.records if record.name == "engine.serving.throughput_log"]


def snapshot(step: int, *, running: int = 0, generated: int = 0, prompt: int = 0, hits: int = 0) -> LoopSnapshot:
    stats = SchedulerStats(running, 0, 0, 75, 100, 0, 0, 2 * hits, hits, generated)
    return LoopSnapshot(step, step, stats, num_prompt_tokens_total=prompt)


def test_rates_are_those_since_the_last_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    log = ThroughputLog(10.0)
    log.tick(snapshot(0), 40.0)  # ready after 40 s, which are in no average
    log.tick(snapshot(5, running=3, generated=500, prompt=100, hits=40), 49.0)
    assert lines(caplog) == []
    log.tick(snapshot(50, running=3, generated=500, prompt=100, hits=40), 50.0)
    log.tick(snapshot(90, running=3, generated=700, prompt=100, hits=40), 60.0)
    first, second = (record.getMessage() for record in lines(caplog))
    assert "Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 50.0 tokens/s, Running: 3 reqs" in first
    assert "KV cache usage: 25.0%, Prefix cache hit rate: 50.0%" in first
    assert "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 20.0 tokens/s" in second
    assert "Prefix cache hit rate: 0.0%" in second
    fields = vars(lines(caplog)[0])  # what a log of JSON lines shows beside the text
    assert (fields["prompt_tokens_per_s"], fields["kv_cache_usage"], fields["num_running"]) == (10.0, 0.25, 3)


def test_an_idle_engine_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    log = ThroughputLog(10.0)
    log.tick(snapshot(7), 0.25)
    log.tick(snapshot(7), 10.25)
    assert [record.levelno for record in lines(caplog)] == [logging.DEBUG]
