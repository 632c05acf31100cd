"""Cost of LoRA adapters: decode steps of requests for the model, for one adapter and for eight in one batch; and of
loading one meanwhile.

Claim: a row with an adapter costs its two small products per layer, whichever adapters the other rows have; a row
without one costs nothing more than in an engine without adapters.

Method: decode-only steps at a context of 128, random weights, on an engine without adapters and on one with eight of
rank --rank that change all linear layers; the figure of a run is its median step. Each batch also has the same number
of rows; with eight adapters, neighbouring rows have different ones. With --enable-lora, the longest step of
a run is compared with that of a run during which a thread loads one adapter after the other.
"""

import argparse
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from chairlift.bench.alternate import alternate
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.workload import Workload
from engine.bench.decode import median_decode_s
from engine.bench.engine_options import add_engine_arguments, chosen_shape, describe, engine_config
from engine.bench.fresh_scheduler import serve_anew
from engine.bench.serve import engine
from engine.config import EngineConfig
from engine.core.request import Adapter
from engine.flags import DEFAULT_STEP_LIMITS
from engine.model.config import ModelConfig
from engine.model.loader import projection_shapes
from engine.model.lora import CONFIG_FILE, WEIGHTS_FILE
from engine.serving.thread_priority import lower_priority

_NUM_ADAPTERS = 8
_ROWS = (8, 32)
_CONTEXT = 128
_NUM_STEPS = 20


def run(settings: Settings) -> Outcome:
    """Measures all batches at each number of rows, alternating."""
    limits = DEFAULT_STEP_LIMITS["cpu"]
    # The first admitted request decodes until the last one is admitted, and then through the measured steps.
    max_tokens = -(-max(_ROWS) * (_CONTEXT + 1) // limits.max_num_batched_tokens) + 2 + _NUM_STEPS
    config = engine_config(
        settings,
        max_num_seqs=max(_ROWS),
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=_CONTEXT + max_tokens,
    )
    settings.progress(f"saving {_NUM_ADAPTERS} random adapters")
    flags = _save_adapters(Path(config.model), settings.scratch / "adapters", settings.options.rank)
    plain, adapted = engine(config), engine(replace(config, lora=flags))
    prompts = np.random.default_rng(0).integers(1, chosen_shape(settings).vocab_size, (max(_ROWS), _CONTEXT)).tolist()
    known = [Adapter(index, adapter.sha256) for index, adapter in enumerate(adapted.info.adapters)]

    def steps(num_rows: int) -> dict[str, Callable[[], float]]:
        workload = Workload(tuple(map(tuple, prompts[:num_rows])), (max_tokens,) * num_rows)
        mixed = [known[row % _NUM_ADAPTERS] for row in range(num_rows)]
        return {
            "without --lora": lambda: median_decode_s(serve_anew(plain, workload)),
            "no adapter": lambda: median_decode_s(serve_anew(adapted, workload)),
            "one adapter": lambda: median_decode_s(serve_anew(adapted, workload, adapters=known[:1] * num_rows)),
            f"{_NUM_ADAPTERS} adapters": lambda: median_decode_s(serve_anew(adapted, workload, adapters=mixed)),
        }

    results, raw = [], {}
    for num_rows in _ROWS[:1] if settings.quick else _ROWS:
        samples = alternate(steps(num_rows), rounds=settings.rounds, progress=settings.progress)
        raw[f"{num_rows} rows"] = samples.raw
        times = ", ".join(f"{name} {1e3 * samples.best(name):.1f} ms" for name in samples.raw)
        for name in list(samples.raw)[1:]:
            ratio = samples.ratio(name, "without --lora")
            results.append(
                Result(
                    "adapters", f"{num_rows} rows: step with {name} over one without --lora", ratio.best, "x",
                    note=f"{ratio}; {times}; rank {settings.options.rank}, {describe(settings)}",
                )
            )  # fmt: skip
    loading, loading_raw = _loading(settings, config, prompts, max_tokens)
    return Outcome((*results, *loading), raw | loading_raw)


def _loading(
    settings: Settings, config: EngineConfig, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[list[Result], dict[str, Mapping[str, tuple[float, ...]]]]:
    """Measures the longest step with and without a thread that loads adapters, and how long a load takes then."""
    folder = settings.scratch / "adapters"
    changing = engine(
        replace(config, enable_lora=True, max_loras=2, max_lora_rank=settings.options.rank, lora_dir=(str(folder),))
    )
    workload = Workload(tuple(map(tuple, prompts[: _ROWS[0]])), (max_tokens,) * _ROWS[0])
    load, load_s = changing.load_adapter, []
    assert load is not None, "--lora-dir is set"

    def longest_step_s() -> float:
        run = serve_anew(changing, workload)
        return max(step.seconds for step in run.steps if step.num_rows == step.num_tokens == _ROWS[0])

    def while_loading() -> float:
        has_ended = threading.Event()

        def load_adapters() -> None:
            lower_priority()  # as in an engine
            for index in itertools.count():
                began_s = time.perf_counter()
                load(index % 2, "adapter", str(folder / str(index % _NUM_ADAPTERS)), b"")
                load_s.append(time.perf_counter() - began_s)
                if has_ended.is_set():
                    return

        thread = threading.Thread(target=load_adapters)
        thread.start()
        try:
            return longest_step_s()
        finally:
            has_ended.set()
            thread.join()

    samples = alternate(
        {"undisturbed": longest_step_s, "while adapters are loaded": while_loading},
        rounds=settings.rounds,
        progress=settings.progress,
    )
    ratio = samples.ratio("while adapters are loaded", "undisturbed")
    times = ", ".join(f"{name} {1e3 * samples.best(name):.1f} ms" for name in samples.raw)
    rank = f"rank {settings.options.rank}, {describe(settings)}"
    results = [
        Result(
            "adapters", f"{_ROWS[0]} rows: longest step while adapters are loaded, over undisturbed", ratio.best, "x",
            note=f"{ratio}; {times}; {rank}",
        ),
        Result(
            "adapters", "loading an adapter beside steps", statistics.median(load_s), "s",
            note=f"median of {len(load_s)}, {min(load_s):.3f} to {max(load_s):.3f}; {rank}",
        ),
    ]  # fmt: skip
    return results, {"longest step": samples.raw, "load": {"seconds": tuple(load_s)}}


def _save_adapters(model: Path, folder: Path, rank: int) -> tuple[str, ...]:
    """Saves random adapters of all linear layers; returns the values of --lora."""
    layers = projection_shapes(ModelConfig.from_dir(model))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": None, "bias": "none"}
    flags = []
    for index in range(_NUM_ADAPTERS):
        generator = torch.Generator().manual_seed(index)
        tensors = {}
        for layer, (rows, columns) in layers.items():
            a, b = torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator)
            tensors[f"base_model.model.{layer}.lora_A.weight"] = a * columns**-0.5
            tensors[f"base_model.model.{layer}.lora_B.weight"] = b * rank**-0.5 / 4
        path = folder / str(index)
        path.mkdir(parents=True)
        save_file(tensors, path / WEIGHTS_FILE)
        (path / CONFIG_FILE).write_text(json.dumps(config))
        flags.append(f"adapter-{index}={path}")
    return tuple(flags)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_engine_arguments(parser, shape="135M")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters (default: 16)")
