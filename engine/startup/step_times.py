"""Measures steps of known shapes before the engine serves, for the prior of the step-time model.

The plans are made by hand: rows may claim computed tokens whose keys and values were never written. The time is the
same, and a long context costs nothing to set up. Sampled tokens and failed rows are ignored.
"""

import logging
import time
from collections.abc import Callable, Iterator
from itertools import count
from statistics import median
from typing import NamedTuple

from engine.core.config import SchedulerConfig
from engine.core.latency.step_time import StepShape, StepTimePrior, shape_of
from engine.core.latency.step_time_prior import MIN_SAMPLES, solve_prior
from engine.core.outputs import NewRequest, ScheduledRow, SchedulerOutput
from engine.core.request import BlockId, RequestId, SamplingParams
from engine.interfaces import ModelRunner, execute

_NUM_TIMED = 3
_SHORT_CONTEXT = 16
_LONG_CHUNK = 64
_LONGEST_STEP_S = 0.5  # larger chunks are not measured: no step that is planned by targets lasts as long
_GREEDY = SamplingParams(seed=0, max_tokens=_NUM_TIMED + 2, temperature=0.0, ignore_end_token=True)

_log = logging.getLogger(__name__)


class _Rows(NamedTuple):
    """Equal rows of a step: how many, their tokens, and how many tokens of each count as computed."""

    num_rows: int
    num_tokens: int
    num_computed: int


def measure_prior(
    runner: ModelRunner, config: SchedulerConfig, vocab_size: int, clock: Callable[[], float] = time.perf_counter
) -> StepTimePrior | None:
    """Times steps on an idle runner and returns the prior; the runner knows none of their requests afterwards.

    Each shape runs once untimed and three times timed; the median counts. Prompt chunks double until a step takes half
    a second.

    Returns: None if the limits allow too few different shapes.
    Raises: EngineError: a step failed.
    """
    samples: list[tuple[StepShape, float]] = []
    steps = count(1)
    is_slow = False
    for rows in _shapes(config):
        if is_slow:  # only longer chunks follow
            break
        sample = _time(runner, config, rows, vocab_size, steps, clock)
        samples.append(sample)
        is_slow |= rows.num_tokens >= _LONG_CHUNK and sample[1] > _LONGEST_STEP_S
    if len(samples) < MIN_SAMPLES:
        return None
    prior = solve_prior(samples)
    a, b, c, d, e = prior.coefficients
    _log.info(
        "Step times: %.2f ms, %.1f us per token beyond %d, %.1f us per row, %.1f ns per token of context, "
        "%.2f ns per query and key (%d shapes measured)",
        1e3 * a, 1e6 * b, prior.knee_tokens, 1e6 * c, 1e9 * d, 1e9 * e, len(samples),
    )  # fmt: skip
    return prior


def _shapes(config: SchedulerConfig) -> Iterator[_Rows]:
    """Decodes of few and many rows with short and long contexts, then chunks from short to long, at the start and late
    in a prompt.
    """
    num_seqs, block_size = config.max_num_seqs, config.block_size
    longest = config.max_model_len - _NUM_TIMED - 2
    for num_rows in sorted({1, max(1, num_seqs // 4), num_seqs}):
        fitting = config.num_blocks // config.cache_groups.num_groups // num_rows * block_size - _NUM_TIMED - 2
        for context in sorted({min(_SHORT_CONTEXT, longest, fitting), min(longest, fitting)}):
            if context > 0:
                yield _Rows(num_rows, 1, context)
    chunk = 16
    while chunk <= min(config.max_num_batched_tokens, longest):
        yield _Rows(1, chunk, 0)
        if chunk >= _LONG_CHUNK and (late := (longest - chunk) // block_size * block_size) > chunk:
            yield _Rows(1, chunk, late)
        chunk *= 2


def _time(
    runner: ModelRunner,
    config: SchedulerConfig,
    rows: _Rows,
    vocab_size: int,
    steps: Iterator[int],
    clock: Callable[[], float],
) -> tuple[StepShape, float]:
    """Runs a shape and returns it with the median of its times, in seconds."""
    num_groups = config.cache_groups.num_groups
    num_blocks = config.num_blocks // num_groups // rows.num_rows
    is_decode = rows.num_tokens == 1
    num_known = rows.num_computed + rows.num_tokens
    request_ids = [RequestId(-1 - index) for index in range(rows.num_rows)]
    token_ids = tuple(index % vocab_size for index in range(num_known + (not is_decode)))
    num_held = min(num_blocks, -(-(num_known + _NUM_TIMED) // config.block_size))
    new = tuple(
        NewRequest(
            request_id, token_ids, len(token_ids), _GREEDY,
            tuple(map(BlockId, range(index * num_blocks * num_groups, (index * num_blocks + num_held) * num_groups))),
        )
        for index, request_id in enumerate(request_ids)
    )  # fmt: skip
    times_s = []
    for run in range(1 + _NUM_TIMED):
        num_computed = rows.num_computed + (run if is_decode else 0)
        plan = SchedulerOutput(
            next(steps),
            (),
            new if run == 0 else (),
            tuple(ScheduledRow(request_id, rows.num_tokens, num_computed, (), is_decode) for request_id in request_ids),
            rows.num_rows * rows.num_tokens,
        )
        started_s = clock()
        execute(runner, plan)
        times_s.append(clock() - started_s)
    execute(runner, SchedulerOutput(next(steps), tuple(request_ids), (), (), 0))
    return shape_of(plan), median(times_s[1:])
