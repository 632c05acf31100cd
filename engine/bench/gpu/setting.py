"""Setting of a benchmark on a GPU: the device, its measured rates, the model's folder and its floor.

`--device cpu` rehearses a benchmark: the same engine, with the same kernels under Triton's interpreter, without graphs.
"""

import argparse
import gc
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from chairlift.bench.benchmark import BenchmarkError, Settings
from engine.bench.floor import BF16, FP8, DecoderSize, Floor, Precision, Rates
from engine.bench.serve import engine
from engine.bench.shapes import model_names, write_model
from engine.config import EngineConfig
from engine.serving.parts import EngineParts
from engine.startup.gpu import Gpu
from engine.startup.gpu_memory import GpuMemory
from kernels.bench.budget import Budget
from kernels.bench.ceilings import Ceilings, measure_ceilings
from kernels.bench.device import BenchDevice, describe_device, open_device
from kernels.bench.journal import Journal
from kernels.dtypes import dtype_name

DEFAULT_SHAPE, CPU_SHAPE = "llama-3.1-8b", "tiny"
STAGE_BUDGET_S = 530.0
_BLOCK_SIZE = 16


def add_gpu_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that all of these benchmarks have."""
    group = parser.add_argument_group("GPU")
    group.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: test the benchmark, with --quick (default: cuda)",
    )
    group.add_argument(
        "--shape", choices=model_names(), help=f"model shape (default: {DEFAULT_SHAPE}; {CPU_SHAPE} on a CPU)"
    )
    group.add_argument(
        "--precision", choices=("bf16", "fp8"), default="bf16", help="precision of weights and KV cache (default: bf16)"
    )
    group.add_argument(
        "--enforce-eager",
        action="store_true",
        help="measure engines without CUDA graphs, for example where recording them fails (default: with graphs)",
    )
    group.add_argument(
        "--budget",
        type=float,
        default=STAGE_BUDGET_S,
        metavar="S",
        help="wall-clock limit in seconds (default: %(default)g)",
    )
    group.add_argument(
        "--journal", type=Path, metavar="FILE", help="append results as they are measured, one JSON object per line"
    )


@dataclass(frozen=True, slots=True)
class GpuSetting:
    """A device, a model and the settings of a run.

    Attributes:
        shape: name of the model.
        model_dir: its folder: config.json and a tokenizer.
        floor: floor of the model in the chosen precision, at the measured rates.
        ceilings: the measured rates with their samples.
        budget: time limit; cases that do not fit are left out.
        threads: threads of the engine on a CPU.
        quick: use tiny sizes; the figures are meaningless.
        enforce_eager: run engines without CUDA graphs.
        progress: called with lines that describe the progress.
    """

    device: BenchDevice
    shape: str
    model_dir: Path
    floor: Floor
    ceilings: Ceilings
    budget: Budget
    journal: Journal
    threads: int
    quick: bool
    enforce_eager: bool
    progress: Callable[[str], None]

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the model."""
        return int(read_config(self.model_dir)["vocab_size"])

    @property
    def precision(self) -> Precision:
        """Precision of weights and cache."""
        return self.floor.precision

    @property
    def label(self) -> str:
        """Model and precision, for the names of results; and `eager` if a GPU runs without graphs."""
        return f"{self.shape} {self.precision.name}{', eager' if self.enforce_eager and self.device.is_gpu else ''}"

    @property
    def is_expected(self) -> bool:
        """Whether `kernels.bench.expected` has figures for this model."""
        return self.shape == DEFAULT_SHAPE

    def engine_config(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        cache_tokens: int | None = None,
    ) -> EngineConfig:
        """Returns an engine with dummy weights and without a prefix cache.

        Args:
            max_num_seqs, max_num_batched_tokens, max_model_len: see `EngineConfig`.
            cache_tokens: capacity of the KV cache; None uses the available memory.
        """
        narrow = "fp8" if self.precision.kv_bytes == 1 else None
        return EngineConfig(
            model=str(self.model_dir),
            load_format="dummy",
            device="cuda",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_gpu_blocks_override=None if cache_tokens is None else -(-cache_tokens // _BLOCK_SIZE),
            block_size=_BLOCK_SIZE,
            enable_prefix_caching=False,
            enforce_eager=self.enforce_eager or not self.device.is_gpu,
            kernel_check="fail" if self.device.is_gpu else "off",  # interpreted, it takes minutes
            quantization=cast("Any", narrow),
            kv_cache_dtype=cast("Any", narrow or "auto"),
        )

    def start(self, config: EngineConfig) -> EngineParts:
        """Builds an engine on the device, warmed up."""
        return engine(config, None if self.device.is_gpu else _interpreting_gpu(self.device))


def open_setting(settings: Settings) -> GpuSetting:
    """Opens the device, measures its rates (seconds) and writes the model's folder.

    Raises: BenchmarkError: there is no GPU.
    """
    options = settings.options
    if options.device == "cpu" and not settings.quick:
        raise BenchmarkError("--device cpu only tests the benchmark: add --quick")
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is imported
    try:
        device = open_device(options.device)
    except (RuntimeError, ValueError) as error:
        raise BenchmarkError(str(error)) from error
    budget, journal = Budget(options.budget), Journal(options.journal)
    shape = options.shape or (DEFAULT_SHAPE if device.is_gpu else CPU_SHAPE)
    model_dir = write_model(shape, settings.scratch)
    ceilings = measure_ceilings(
        device.device, float8=device.target.fp8_dtype, quick=settings.quick, seconds=0.05 if settings.quick else 0.5
    )
    settings.progress(str(ceilings))
    journal.keep({"device": describe_device(device.device), "ceilings": ceilings.as_json(), "shape": shape})
    return GpuSetting(
        device=device,
        shape=shape,
        model_dir=model_dir,
        floor=Floor(
            DecoderSize.from_config(read_config(model_dir)),
            FP8 if options.precision == "fp8" else BF16,
            _rates(ceilings, options.precision, device),
        ),
        ceilings=ceilings,
        budget=budget,
        journal=journal,
        threads=settings.threads,
        quick=settings.quick,
        enforce_eager=options.enforce_eager,
        progress=settings.progress,
    )


def read_config(model_dir: Path) -> dict[str, Any]:
    """Reads a model's config.json."""
    fields: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    return fields


def release_memory(device: torch.device) -> None:
    """Frees the memory of a deleted engine for the next one."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _interpreting_gpu(device: BenchDevice) -> Gpu:
    """Returns this CPU as a GPU of unlimited memory."""
    return Gpu(device.device, device.target, device.num_processors, GpuMemory("a CPU", 1 << 62, 1 << 62, 1.0))


def _rates(ceilings: Ceilings, precision: str, device: BenchDevice) -> Rates:
    if not device.is_gpu:
        return Rates(ceilings.bytes_per_s, ceilings.flops["float32"], ceilings.flops["float32"])
    flops = ceilings.flops["bfloat16"]
    if precision != "fp8":
        return Rates(ceilings.bytes_per_s, flops, flops)
    float8 = device.target.require_fp8("--precision fp8")
    return Rates(ceilings.bytes_per_s, ceilings.flops[dtype_name(float8)], flops)
