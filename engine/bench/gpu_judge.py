"""Greedy answers of whole models in bf16 on a GPU, judged by `transformers`.

Claim: eager steps, CUDA graphs, two steps in flight and requests served alone choose tokens that `transformers` would
choose, near-ties counted.

Goal: no wrong token.

Method: a random checkpoint in bf16, whose logits have unit scale. `transformers` in fp32, with the same weights, on the
same device, judges every token after the tokens before it. A token is a near-tie if its logit is behind the best one by
at most four times the largest error of the logits of `transformers` itself in bf16: each of two logits may be that far
off, and our roundings differ from theirs. With `--mode` eager, graphs or in-flight all requests are served at once, in
steps of 512 tokens that hold prompt chunks and single tokens; with alone they are served one after the other, and the
KV cache gets the memory that is measured at start. `--device cpu` has no graphs and does not measure memory.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from chairlift.bench.agreement import require_same_ids
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.workload import Workload, uniform_workload
from engine.bench.agreement import answer_logits, greedy_agreement, load_reference
from engine.bench.gpu.driver import greedy_answers
from engine.bench.gpu.setting import GpuSetting, add_gpu_arguments, release_memory
from engine.bench.gpu.stage import run_stage
from engine.bench.gpu.stages import JUDGE_MODES
from engine.bench.transformers_peer import random_model

_ERRORS_BEHIND = 4  # see the method
_BLOCK_MARGIN = 32


def run(settings: Settings) -> Outcome:
    """Judges one mode."""
    return run_stage(settings, lambda setting: _judge(setting, settings))


def _judge(setting: GpuSetting, settings: Settings) -> None:
    mode, device = settings.options.mode, setting.device.device
    setting.progress(f"making {setting.label}")
    checkpoint = setting.model_dir
    random_model(checkpoint, device, torch.bfloat16).save_pretrained(checkpoint)
    release_memory(device)
    workload = _workload(setting)
    setting.progress(f"greedy answers, {mode}")
    answers = _answers(setting, checkpoint, workload, mode)
    release_memory(device)
    setting.progress("transformers in fp32 and in bf16")
    reference = load_reference(checkpoint).to(device)
    near_tie = _ERRORS_BEHIND * _bf16_error(reference, checkpoint, workload.prompts, answers)
    agreement = greedy_agreement(reference, workload.prompts, answers, near_tie=near_tie)
    setting.journal.add(
        Result(
            "",
            f"greedy tokens that are transformers' own, {setting.label}, {mode}",
            100.0 * agreement.share_same,
            "%",
            note=f"{agreement}; a near-tie is within {near_tie:.2g}",
        )
    )
    require_same_ids(mode, agreement)


def _workload(setting: GpuSetting) -> Workload:
    """Prompts of one block to many, of which some are computed in chunks, and answers over the end of a block."""
    if setting.quick:
        return uniform_workload(2, prompt_lens=(5, 20), output_lens=(2, 3), vocab_size=setting.vocab_size)
    return uniform_workload(24, prompt_lens=(1, 1200), output_lens=(8, 64), vocab_size=setting.vocab_size)


def _answers(setting: GpuSetting, checkpoint: Path, workload: Workload, mode: str) -> tuple[tuple[int, ...], ...]:
    longest = max(map(len, workload.prompts)) + max(workload.max_tokens)
    num_requests = len(workload.prompts)
    is_measured = mode == "alone" and setting.device.is_gpu
    config = setting.engine_config(
        max_num_seqs=num_requests,
        max_num_batched_tokens=16 if setting.quick else 512,
        max_model_len=longest + 1,
        cache_tokens=None if is_measured else num_requests * (longest + _BLOCK_MARGIN),
    )
    parts = setting.start(
        replace(
            config,
            model=str(checkpoint),
            load_format="auto",
            dtype="bfloat16",
            enforce_eager=mode == "eager" or config.enforce_eager,
            async_scheduling=mode in ("in-flight", "alone"),
        )
    )
    if mode != "alone":
        return greedy_answers(parts, workload)
    each = (Workload((prompt,), (n,)) for prompt, n in zip(workload.prompts, workload.max_tokens, strict=True))
    return tuple(answer for one in each for answer in greedy_answers(parts, one))


def _bf16_error(
    reference: torch.nn.Module, checkpoint: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> float:
    """Returns the largest error of a logit of `transformers` in bf16."""
    model = load_reference(checkpoint, torch.bfloat16).to(reference.device)
    pairs = zip(prompts, answers, strict=True)
    return max(float((answer_logits(model, *pair) - answer_logits(reference, *pair)).abs().max()) for pair in pairs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_gpu_arguments(parser)
    parser.add_argument("--mode", choices=JUDGE_MODES, default="in-flight", help="see above (default: %(default)s)")
