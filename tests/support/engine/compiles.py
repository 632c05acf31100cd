"""Serves random requests with a model of a common shape on a GPU that is not there, and tells which kernels were
compiled after the start-up that is to compile them all: `python -m tests.support.engine.compiles --help`.

Scheduler, runner, model and operations are the real ones, on tensors without memory, so that every launch has the
shapes, strides and alignments that it would have on a GPU. Every token that is drawn is 0.
"""

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch

from engine.core.config import SchedulerConfig
from engine.core.request import Request, RequestId, SamplingParams
from engine.core.scheduler import Scheduler
from engine.interfaces import execute
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.fp8 import Fp8Weights
from engine.model.shapes import find_shape, shape_names
from engine.runner.buckets import decode_buckets, mixed_buckets
from engine.runner.kv_cache import plan_kv_cache
from engine.runner.model_runner import RunnerOptions, TorchModelRunner
from engine.runner.sampler import SampledBuffer
from engine.runner.step_buffers import BIAS_CAPACITY
from engine.runner.stream import Event, InlineStream
from kernels.gpu.compile_only_driver import use_compile_only_driver
from kernels.gpu.launch import CompileCounter
from kernels.gpu.ops import GpuOps
from kernels.gpu.targets import TARGETS, Target
from kernels.interface import Step
from kernels.metadata import StepInputs
from kernels.scale_groups import FP8_BLOCK_SIZE
from tests.support.kernels.graphs import FakeGraphs

_META = torch.device("meta")
_MAX_NUM_SEQS = 21
_MAX_NUM_BATCHED_TOKENS = 150
_MAX_MODEL_LEN = 700
_MAX_OUTPUT_TOKENS = 9


class Variant(NamedTuple):
    """A model and the flags that decide which kernels it needs."""

    shape: str
    quantizes: bool = False
    has_fp8_cache: bool = False
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    sliding_window: int | None = None
    batch_invariant: bool = False
    has_block_scales: bool = False


class MetaStream:
    """`engine.runner.stream.Stream` of a device without memory."""

    device = _META
    is_inline = False

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Zeros: what is copied from the device never arrives."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def run(self, work: Callable[[], None]) -> None:
        """Does the work."""
        work()

    def mark(self) -> Event:
        """An event that is past."""
        return InlineStream().mark()


class _RecordingOps(GpuOps):
    """Operations with fake CUDA graphs."""

    graphs: FakeGraphs

    def compile_step(self, step: Step, largest: StepInputs, *sizes: Any, **options: Any) -> Step:
        return super().compile_step(self.graphs.recordable(step), largest, *sizes, **options)


def find_late_compiles(target: Target, variant: Variant, *, seed: int) -> list[str]:
    """Starts up, serves, and tells what was compiled outside of `compile_only`: nothing, if the set is closed.

    Args:
        target: Triton's interpreter must be off.
        variant: what is served.
        seed: of the requests.
    """
    use_compile_only_driver(target)
    generator = random.Random(seed)
    compiled: list[str] = []
    counter = CompileCounter(compiled.append)
    graphs = FakeGraphs()
    try:
        with ExitStack() as patches:
            for name, replacement in graphs.patches().items():
                patches.enter_context(mock.patch.object(torch.cuda, name, replacement))
            patches.enter_context(mock.patch.object(SampledBuffer, "receive"))
            for is_recorded in (False, True):
                _serve(target, variant, graphs, is_recorded, _requests(generator, variant, 40))
    finally:
        counter.close()
    assert graphs.replayed, "no recorded step was replayed"
    return compiled


def _serve(
    target: Target, variant: Variant, graphs: FakeGraphs, is_recorded: bool, requests: Sequence[Request]
) -> None:
    folder = find_shape(variant.shape)
    assert folder is not None, f"no shape {variant.shape}"
    config = ModelConfig.from_dir(folder)
    config = replace(config, num_layers=2)
    if variant.has_block_scales:
        config = replace(config, quantized=Fp8Weights((), has_blocks=True))
    if variant.sliding_window:
        config = replace(config, traits=replace(config.traits, sliding_windows=(variant.sliding_window, None)))
    ops = _RecordingOps(
        _META,
        target,
        num_processors=132,
        quantize_weights=variant.quantizes,
        quantize_inputs=variant.quantizes or (variant.has_block_scales and target.fp8_dtype is not None),
        input_group_size=FP8_BLOCK_SIZE if variant.has_block_scales else None,
        batch_invariant=variant.batch_invariant,
    )
    ops.graphs = graphs
    model = Decoder(config, ops, max_positions=_MAX_MODEL_LEN, dtype=variant.dtype, device=_META)
    model.load(lambda _parts: None)
    kv_dtype = target.require_fp8("an 8-bit cache") if variant.has_fp8_cache else variant.dtype
    num_blocks = _MAX_NUM_SEQS * _MAX_MODEL_LEN // variant.block_size // 3  # some requests are preempted
    kv_plan = plan_kv_cache(config.shape, kv_dtype, variant.block_size, 0, _MAX_MODEL_LEN, num_blocks)
    runner = TorchModelRunner(
        model,
        config.shape,
        kv_plan,
        ops,
        RunnerOptions(
            max_num_seqs=_MAX_NUM_SEQS,
            max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS,
            kv_dtype=kv_dtype,
            stream=MetaStream(),
            max_steps_in_flight=2,
            decode_buckets=decode_buckets(_MAX_NUM_SEQS) if is_recorded else (),
            mixed_buckets=mixed_buckets(_MAX_NUM_BATCHED_TOKENS) if is_recorded else (),
        ),
    )
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            block_size=variant.block_size,
            max_num_seqs=_MAX_NUM_SEQS,
            max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS,
            max_model_len=_MAX_MODEL_LEN,
            end_token_ids=config.end_token_ids,
        )
    )
    waiting = list(requests)
    step = 0
    for wave_size in itertools.cycle((1, 1, 2, 3, _MAX_NUM_SEQS, 7)):
        for request in waiting[:wave_size]:
            scheduler.add_request(request)
        del waiting[:wave_size]
        while scheduler.has_work():
            plan = scheduler.schedule(float(step))
            scheduler.update(plan, execute(runner, plan), float(step))
            step += 1
        if not waiting:
            return


def _requests(generator: random.Random, variant: Variant, number: int) -> list[Request]:
    """Prompts from one token up to the longest context, and each way of sampling alone and with others."""
    block_size = variant.block_size
    prompt_lens = (1, 1, 2, 3, 5, block_size - 1, block_size, block_size + 1, 37, 64, 129)
    requests = []
    for index in range(number):
        is_longest = index in (1, number // 2)
        num_prompt_tokens = _MAX_MODEL_LEN - _MAX_OUTPUT_TOKENS if is_longest else generator.choice(prompt_lens)
        prompt_ids = tuple(generator.randrange(1000) for _ in range(num_prompt_tokens))
        requests.append(Request(RequestId(index + 1), prompt_ids, _params(generator, index), arrival_s=0.0))
    return requests


def _params(generator: random.Random, index: int) -> SamplingParams:
    max_tokens = generator.randint(1, _MAX_OUTPUT_TOKENS)
    params = SamplingParams(seed=index, max_tokens=max_tokens, temperature=0.0, ignore_end_token=True)
    many = tuple((token_id, 1.0) for token_id in range(BIAS_CAPACITY + 1))
    changes: tuple[Callable[[SamplingParams], SamplingParams], ...] = (
        lambda params: replace(params, temperature=0.7),
        lambda params: replace(params, temperature=1.0, top_k=generator.choice((1, 40, 1000))),
        lambda params: replace(params, temperature=1.0, top_p=0.9, min_p=0.05),
        lambda params: replace(params, repetition_penalty=1.1),
        lambda params: replace(params, presence_penalty=0.5, frequency_penalty=0.5),
        lambda params: replace(params, logit_bias=generator.choice((((7, 1.0),), ((7, 1.0), (8, 2.0)), many))),
        lambda params: replace(params, top_logprobs=generator.choice((0, 1, 5, 20))),
        lambda params: replace(params, min_tokens=2, stop_token_ids=(5, 6, 7), ignore_end_token=False),
    )
    num_changes = (0, 0, 1, 1, 3, len(changes))[index % 6]
    for change in generator.sample(changes, num_changes):
        params = change(params)
    return params


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what was compiled late; 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, default="sm_90")
    parser.add_argument("--model", choices=shape_names(), default="llama-3.1-8b")
    parser.add_argument("--fp8", action="store_true", help="8-bit linear layers and cache")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--sliding-window", type=int, help="of the first layer")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--block-scales", action="store_true", help="8-bit linear layers with scales per block")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    variant = Variant(
        options.model,
        options.fp8,
        options.fp8,
        options.block_size,
        sliding_window=options.sliding_window,
        batch_invariant=options.batch_invariant,
        has_block_scales=options.block_scales,
    )
    compiled = find_late_compiles(TARGETS[options.target], variant, seed=options.seed)
    for kernel in compiled:
        sys.stderr.write(f"compiled late: {kernel}\n")
    return 1 if compiled else 0


if __name__ == "__main__":
    sys.exit(main())
