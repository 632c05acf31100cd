"""G9: against `transformers` on the same GPU and the same weights: `generate`, and its continuous batching.

Claim: a paged engine with kernels of its own, recorded steps and two of them in flight is several times as fast as the
reference implementation, and gives the same tokens.

Goal: at least 2.5 times the tokens per second of its continuous batching on 32 requests of 512 tokens in and 2,048 out;
every greedy token of a small fp32 model is one that `transformers` would choose, near-ties counted.

Method: first a small random checkpoint in fp32: our answers on this device are judged, position by position, by
`transformers` on the CPU. Then the model asked for, random weights in bf16, made on the device by `transformers` and
saved: both sides load the same. `generate` gets 64 requests of one prompt length and of spread answers in one batch,
ours gets them at once; only tokens that were asked for count, and `generate` is stopped when its share of the time is
over. Its continuous batching runs with its defaults, CUDA graphs and overlapped host work where it has them, warmed up;
what is timed are the requests alone. Ours runs the engine's step loop in this process. One round each: a round takes a
minute.
"""

import argparse
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from chairlift.bench.agreement import require_same_ids
from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings, positive
from chairlift.bench.report import Result
from chairlift.bench.shapes import SHAPES
from chairlift.bench.workload import Workload, uniform_workload
from engine.bench.agreement import greedy_agreement, load_reference
from engine.bench.floor import Length
from engine.bench.gpu.driver import greedy_answers
from engine.bench.gpu.expected import expected_over_transformers
from engine.bench.gpu.setting import GpuSetting, add_gpu_arguments, release_memory
from engine.bench.gpu.stage import run_stage
from engine.bench.shapes import save_checkpoint
from engine.bench.transformers_peer import continuous_batching, generate, random_model

_GOAL = 2.5
_SMALL = "15M"
_PROMPT_LEN, _OUTPUT_LEN, _NUM_BATCH_REQUESTS = 512, 2048, 32
_NUM_GENERATE_REQUESTS, _GENERATE_OUTPUTS = 64, (64, 1024)
_OURS_S = 150.0  # what ours needs: to load, to warm up, to answer


def run(settings: Settings) -> Outcome:
    """Judges tokens, then times both sides."""
    return run_stage(settings, lambda setting: _measure(setting, settings))


def _measure(setting: GpuSetting, settings: Settings) -> None:
    _judge(setting, settings)
    even, spread = _workloads(setting, settings)
    checkpoint, theirs = _transformers(setting, even, spread)
    setting.progress("ours: loading")
    longest = max(max(map(len, w.prompts)) + max(w.max_tokens) for w in (even, spread))
    num_requests = max(len(even.prompts), len(spread.prompts))
    config = setting.engine_config(
        max_num_seqs=num_requests,
        max_num_batched_tokens=max(64 if setting.quick else 8192, num_requests),
        max_model_len=longest + 1,
        cache_tokens=num_requests * (longest + 32),
    )
    parts = setting.start(replace(config, model=str(checkpoint), load_format="auto"))
    for name, workload, goal in (("continuous batching", even, _GOAL), ("generate", spread, None)):
        if name not in theirs:
            continue
        greedy_answers(parts, workload)  # warms up libraries
        started_s = time.perf_counter()
        greedy_answers(parts, workload)
        seconds = time.perf_counter() - started_s
        _add(setting, name, workload, workload.num_output_tokens / seconds, theirs[name], goal)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _judge(setting: GpuSetting, settings: Settings) -> None:
    """Greedy tokens of a small fp32 model on this device, by `transformers` on the CPU."""
    shape = "tiny" if setting.quick else _SMALL
    setting.progress(f"greedy tokens of shape {shape} in fp32")
    checkpoint = save_checkpoint(shape, settings.scratch / "judged")
    num_requests, longest, most = (2, 12, 3) if setting.quick else (16, 100, 48)
    workload = uniform_workload(
        num_requests,
        prompt_lens=(8, longest),
        output_lens=(min(8, most), most),
        vocab_size=SHAPES[shape].vocab_size,
        seed=1,
    )
    config = setting.engine_config(
        max_num_seqs=16, max_num_batched_tokens=256, max_model_len=256, cache_tokens=16 * 256
    )
    parts = setting.start(
        replace(
            config, model=str(checkpoint), load_format="auto", dtype="float32", quantization=None, kv_cache_dtype="auto"
        )
    )
    answers = greedy_answers(parts, workload)
    agreement = greedy_agreement(load_reference(checkpoint), workload.prompts, answers)
    require_same_ids("ours", agreement)
    setting.journal.add(
        Result(
            "G9",
            f"greedy tokens that are transformers' own, shape {shape}, fp32",
            100.0 * agreement.num_same / agreement.num_tokens,
            "%",
            note=str(agreement),
        )
    )
    del parts
    release_memory(setting.device.device)


def _workloads(setting: GpuSetting, settings: Settings) -> tuple[Workload, Workload]:
    """For its continuous batching, and for `generate`."""
    options = settings.options
    random = np.random.default_rng(0)
    num_even, num_spread = (2, 2) if setting.quick else (options.requests, _NUM_GENERATE_REQUESTS)
    prompt_len, output_len = (6, 3) if setting.quick else (_PROMPT_LEN, options.output_len)
    outputs = (2, 3) if setting.quick else _GENERATE_OUTPUTS

    def prompts(count: int) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, random.integers(1, setting.vocab_size, (count, prompt_len)).tolist()))

    spread = random.integers(outputs[0], outputs[1] + 1, num_spread).tolist()
    return Workload(prompts(num_even), (output_len,) * num_even), Workload(prompts(num_spread), tuple(spread))


def _transformers(setting: GpuSetting, even: Workload, spread: Workload) -> tuple[Path, dict[str, float]]:
    """Makes and saves the checkpoint, times `transformers` on it -> the folder, and tokens per second by way."""
    device = setting.device.device
    dtype = torch.bfloat16 if setting.device.is_gpu else torch.float32
    setting.progress(f"making {setting.shape} in {str(dtype).removeprefix('torch.')}")
    model = random_model(setting.model_dir, device, dtype)
    checkpoint = setting.model_dir
    model.save_pretrained(checkpoint)
    theirs: dict[str, float] = {}
    share_s = (setting.budget.left_s - _OURS_S) / 2
    warm = Workload(even.prompts[:2], (4, 4))
    if setting.quick or share_s > 30:
        setting.progress("transformers: generate")
        generate(model, warm, len(warm.prompts), max_seconds=30.0)
        started_s = time.perf_counter()
        answers, _ = generate(model, spread, len(spread.prompts), max_seconds=max(10.0, share_s))
        theirs["generate"] = sum(map(len, answers)) / (time.perf_counter() - started_s)
    else:
        setting.journal.leave_out("transformers' generate")
    left_s = setting.budget.left_s - _OURS_S
    if setting.quick or left_s > 60:
        setting.progress("transformers: continuous batching")
        try:
            with continuous_batching(model, even) as answer:
                answer(warm, max_seconds=60.0)
                started_s = time.perf_counter()
                answer(even, max_seconds=max(10.0, left_s - 15))
                theirs["continuous batching"] = even.num_output_tokens / (time.perf_counter() - started_s)
        except BenchmarkError as error:
            setting.journal.fail(f"transformers' continuous batching: {error}")
    else:
        setting.journal.leave_out("transformers' continuous batching")
    del model
    release_memory(device)
    return checkpoint, theirs


def _add(setting: GpuSetting, name: str, workload: Workload, ours: float, theirs: float, goal: float | None) -> None:
    """Three figures: the ratio, and both rates beside the floor of their work."""
    outputs = workload.max_tokens
    spread = f"{min(outputs):,}" if min(outputs) == max(outputs) else f"{min(outputs):,} to {max(outputs):,}"
    what = f"{len(outputs)} requests, {len(workload.prompts[0]):,} tokens in, {spread} out, {setting.label}"
    lengths = [Length(len(prompt), n) for prompt, n in zip(workload.prompts, outputs, strict=True)]
    floor = workload.num_output_tokens / setting.floor.all_at_once_s(lengths)
    ratio_id = "G9" if goal is not None else ""
    note = ""
    if goal is not None and setting.is_expected and setting.precision.name == "bf16":
        context = statistics.fmean(length.prompt + length.output / 2 for length in lengths)
        note = expected_over_transformers(setting.floor, len(lengths), context).note
    ratio = f"ours over transformers' {name}, {what}"
    setting.journal.add(Result(ratio_id, ratio, ours / theirs, "x", goal=goal, note=note))
    setting.journal.add(Result("", f"ours, {what}", ours, "tok/s", floor=floor))
    setting.journal.add(Result("", f"transformers' {name}, {what}", theirs, "tok/s", floor=floor))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_gpu_arguments(parser)
    parser.add_argument(
        "--requests", type=positive, default=_NUM_BATCH_REQUESTS, help="of continuous batching (default: %(default)s)"
    )
    parser.add_argument("--output-len", type=positive, default=_OUTPUT_LEN, help="of each (default: %(default)s)")
