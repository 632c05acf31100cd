"""`--batch-invariant` on a GPU: the same bits in any batch, and what they cost beside the normal mode.

Claim: with `--batch-invariant`, log-probabilities are bit-identical whether a request is served alone, with others, in
chunks, or behind a cached prefix.

Goal: all positions equal. The cost is measured and printed.

Method: dummy weights in bf16. Greedy requests, each with the log-probabilities of its tokens and of 20 alternatives per
token, are served one after the other, then at once, then at once in steps of few tokens, then again with their prefixes
cached. Log-probabilities are compared by their bits; each depends on all logits of its row. The cost is the ratio of
both modes' decode steps (64 requests at context 512) and prompts (2,048 tokens in steps of 8,192), timed as by
`gpu-decode`.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.workload import Workload, uniform_workload
from engine.bench.fresh_scheduler import schedule_anew
from engine.bench.gpu.decode_steps import DecodePoint, Decoding, prefill_seconds
from engine.bench.gpu.driver import GREEDY, EngineDriver, RequestMaker, outputs_of
from engine.bench.gpu.setting import GpuSetting, add_gpu_arguments, release_memory
from engine.bench.gpu.stage import run_stage
from engine.serving.parts import EngineParts

_PARAMS = replace(GREEDY, top_logprobs=20)
_BLOCK_MARGIN = 32

_Answer = tuple[object, ...]


class _Sizes(NamedTuple):
    prompt_lens: tuple[int, int]
    output_lens: tuple[int, int]
    num_requests: int
    num_step_tokens: int
    num_chunk_tokens: int
    point: DecodePoint
    prefill_len: int
    num_prefills: int
    num_prefill_rounds: int


_SIZES = _Sizes((1, 1200), (8, 48), 24, 8192, 96, DecodePoint(64, 512, 48), 2048, 24, 3)
_QUICK = _Sizes((5, 24), (2, 3), 3, 32, 8, DecodePoint(2, 12, 2, 2), 12, 4, 1)


class _Costs(NamedTuple):
    """Medians of a mode, in seconds."""

    decode_step_s: float
    prompt_s: float


def run(settings: Settings) -> Outcome:
    """Compares all ways of serving, then both modes."""
    if settings.options.precision == "fp8":
        raise BenchmarkError("--precision fp8: 8-bit weights are not supported with --batch-invariant")
    return run_stage(settings, lambda setting: _measure(setting, _QUICK if settings.quick else _SIZES))


def _measure(setting: GpuSetting, sizes: _Sizes) -> None:
    workload = uniform_workload(
        sizes.num_requests,
        prompt_lens=sizes.prompt_lens,
        output_lens=sizes.output_lens,
        vocab_size=setting.vocab_size,
    )
    setting.progress("serving with --batch-invariant, alone and at once")
    parts = _start(setting, sizes, batch_invariant=True)
    each = [Workload((prompt,), (n,)) for prompt, n in zip(workload.prompts, workload.max_tokens, strict=True)]
    alone = [answer for one in each for answer in _answers(parts, one)]
    _compare(setting, "at once", _answers(parts, workload), alone)
    setting.progress("timing --batch-invariant")
    invariant = _costs(setting, sizes, parts)
    del parts
    release_memory(setting.device.device)

    setting.progress("serving with --batch-invariant, in chunks and with cached prefixes")
    parts = _start(setting, sizes, batch_invariant=True, num_step_tokens=sizes.num_chunk_tokens)
    scheduled = schedule_anew(parts, enable_prefix_caching=True)
    driver = EngineDriver(scheduled)
    _compare(setting, f"in steps of {sizes.num_chunk_tokens} tokens", _answers(parts, workload, driver), alone)
    num_cached = scheduled.scheduler.stats().prefix_cache_hits_total
    _compare(setting, "with cached prefixes", _answers(parts, workload, driver), alone)
    if scheduled.scheduler.stats().prefix_cache_hits_total == num_cached:
        raise BenchmarkError("no prefix was found in the cache")
    del parts, scheduled, driver
    release_memory(setting.device.device)

    setting.progress("timing the normal mode")
    normal = _costs(setting, sizes, _start(setting, sizes, batch_invariant=False))
    setting.journal.keep({"batch-invariant": invariant._asdict(), "normal": normal._asdict()})
    for what, slow_s, fast_s in (
        (sizes.point.label, invariant.decode_step_s, normal.decode_step_s),
        (f"prompts of {sizes.prefill_len:,} tokens", invariant.prompt_s, normal.prompt_s),
    ):
        setting.journal.add(
            Result(
                "",
                f"{what}, {setting.label}: time with --batch-invariant over without",
                slow_s / fast_s,
                "x",
                direction="at most",
                note=f"{1e3 * slow_s:.2f} against {1e3 * fast_s:.2f} ms",
            )
        )


def _start(
    setting: GpuSetting, sizes: _Sizes, *, batch_invariant: bool, num_step_tokens: int | None = None
) -> EngineParts:
    """Starts an engine."""
    longest = max(map(sum, sizes.point.lengths(sizes.num_step_tokens)))
    longest = max(longest, sizes.prefill_len + 1, sizes.prompt_lens[1] + sizes.output_lens[1])
    num_seqs = max(sizes.num_requests, sizes.point.batch)
    config = setting.engine_config(
        max_num_seqs=num_seqs if num_step_tokens is None else min(num_seqs, num_step_tokens),
        max_num_batched_tokens=num_step_tokens or sizes.num_step_tokens,
        max_model_len=longest + 1,
        cache_tokens=max(num_seqs, sizes.num_prefills) * (longest + _BLOCK_MARGIN),
    )
    return setting.start(replace(config, batch_invariant=batch_invariant))


def _answers(parts: EngineParts, workload: Workload, driver: EngineDriver | None = None) -> list[_Answer]:
    """Returns the tokens and log-probabilities of each request; without a driver, with an empty prefix cache."""
    answers = outputs_of(driver or EngineDriver(schedule_anew(parts)), workload, _PARAMS)
    return [
        tuple(position for output in answer for position in zip(output.token_ids, output.logprobs, strict=True))
        for answer in answers
    ]


def _compare(setting: GpuSetting, what: str, answers: Sequence[_Answer], alone: Sequence[_Answer]) -> None:
    pairs = [pair for one, other in zip(answers, alone, strict=True) for pair in zip(one, other, strict=True)]
    num_equal = sum(a == b for a, b in pairs)
    setting.journal.add(
        Result(
            "",
            f"positions with the bits of the request alone, served {what}, {setting.label}",
            100.0 * num_equal / len(pairs),
            "%",
            goal=100.0,
            note=f"{num_equal} of {len(pairs)}",
        )
    )
    if num_equal < len(pairs):
        setting.journal.fail(f"served {what}: {len(pairs) - num_equal} of {len(pairs)} positions differ")


def _costs(setting: GpuSetting, sizes: _Sizes, parts: EngineParts) -> _Costs:
    maker = RequestMaker(setting.vocab_size)
    driver = EngineDriver(schedule_anew(parts))
    with Decoding(driver, maker, sizes.point, sizes.num_step_tokens) as decoding:
        step_s = statistics.median(decoding.steps(sizes.point.num_steps).step_s)
    prompt_s = [
        prefill_seconds(EngineDriver(schedule_anew(parts)), maker, sizes.prefill_len, sizes.num_prefills)
        for _ in range(sizes.num_prefill_rounds)
    ]
    return _Costs(step_s, statistics.median(prompt_s))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_gpu_arguments(parser)
