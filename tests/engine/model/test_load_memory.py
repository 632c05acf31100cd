"""While a model loads on a CPU, tensors take at most 1.15 times the memory of those that stay.

The shapes are those of Llama 3.2 1B and gpt-oss with all sizes but the number of layers divided. Packing works on 2^18
numbers at a time, which would hide the rest in models of this size: here it takes few.
"""

import ctypes
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.flags import StepLimits
from engine.model.checkpoint_part import CheckpointPart
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.fp4 import Fp4Weights, Layout
from engine.model.int_weights import IntWeights
from engine.model.loader import weights_bytes
from engine.model.mxfp4 import Mxfp4Weights
from engine.model.shapes import find_shape
from engine.startup import cpu_memory
from kernels.cpu import packed_linear
from kernels.families import cpu_ops
from tests.hang import HANG_S
from tests.support.engine.weights import PeakBytes

MOST = 1.15
GROUP = 64


def llama(**fields: Any) -> ModelConfig:
    shape = find_shape("llama-3.2-1b")
    assert shape is not None
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_heads": 4, "num_kv_heads": 1, "vocab_size": 16032}
    return replace(ModelConfig.from_dir(shape), **sizes, **fields)


def fill(parts: dict[str, CheckpointPart]) -> None:
    for name, part in parts.items():
        part.tensor.zero_()
        if name.endswith("g_idx"):
            part.tensor.copy_(torch.arange(len(part.tensor)) // GROUP)
        if name.endswith("global_scale"):
            part.tensor.fill_(1)


def check(config: ModelConfig, dtype: torch.dtype, **options: Any) -> None:
    ops = cpu_ops(**options)
    model = Decoder(config, ops, max_positions=1, dtype=dtype, device=torch.device("cpu"))
    with PeakBytes() as memory:
        model.load(fill)
    assert memory.peak_bytes < MOST * memory.bytes


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_PACK_VALUES", 1 << 12)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_floats(dtype: torch.dtype, quantization: str | None, is_tied: bool) -> None:
    check(llama(tie_word_embeddings=is_tied), dtype, quantization=quantization)


@pytest.mark.parametrize("is_tied", [True, False])
def test_integers(is_tied: bool) -> None:
    stored = IntWeights("gptq", 4, GROUP, has_input_order=True)
    check(llama(tie_word_embeddings=is_tied, quantized=stored), torch.float16)


@pytest.mark.parametrize("layout", ["modelopt", "nvfp4", "mxfp4"])
def test_4_bit_floats(layout: Layout) -> None:
    check(llama(quantized=Fp4Weights(layout)), torch.bfloat16)


@pytest.mark.parametrize("quantized", [Mxfp4Weights(), None])
def test_experts_in_one_tensor(make_checkpoint: Callable[..., Path], quantized: Mxfp4Weights | None) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 12, "vocab_size": 2048}
    config = ModelConfig.from_dir(make_checkpoint("gpt_oss", dtype="bfloat16", **sizes))
    check(replace(config, quantized=quantized), torch.bfloat16)


def test_an_8b_model_in_int8_is_admitted_with_10_gib_and_loads_within_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packed weights take 7.97 GiB. While the head is packed, with the embedding, the layers are not there yet."""
    shape = find_shape("llama-3.1-8b")
    assert shape is not None
    num_bytes = weights_bytes(ModelConfig.from_dir(shape), torch.bfloat16, quantization="int8")
    monkeypatch.setattr(cpu_memory, "available_memory_bytes", lambda: 10 * 2**30)
    free_bytes = cpu_memory.bytes_beside_weights(num_bytes, "int8")
    assert 7.9 * 2**30 < num_bytes < 8.0 * 2**30
    assert num_bytes * MOST < 10 * 2**30
    limits, kv_shape = StepLimits(64, 256), ModelConfig.from_dir(shape).shape
    config = EngineConfig(model=str(shape))
    cache_bytes = cpu_memory.kv_cache_bytes(config, kv_shape, torch.float32, limits, free_bytes)
    assert num_bytes + cache_bytes < 9.1 * 2**30
    monkeypatch.setattr(cpu_memory, "available_memory_bytes", lambda: num_bytes - 1)
    with pytest.raises(ConfigError, match="the weights take"):
        cpu_memory.bytes_beside_weights(num_bytes, "int8")


LOADING = """
import sys
from dataclasses import replace
import torch
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.loader import weights_bytes
from engine.model.shapes import find_shape
from engine.startup.machine import returning_freed_matrices
from kernels.families import cpu_ops

def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

def fill(parts):
    for part in parts.values():
        part.tensor.fill_(0.01)

quantization = None if sys.argv[1] == "None" else sys.argv[1]
shape = ModelConfig.from_dir(find_shape("llama-3.2-1b"))
sizes = dict(hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, vocab_size=49152, num_layers=30)
traits = replace(shape.traits, sliding_windows=(None,) * 30, ropes=shape.traits.ropes[:1] * 30)
config = replace(shape, **sizes, traits=traits)
torch.set_num_threads(1)
ops = cpu_ops(quantization=quantization)
model = Decoder(config, ops, max_positions=1, dtype=torch.bfloat16, device=torch.device("cpu"))
ops.pack_linear(torch.ones(32, 32, dtype=torch.bfloat16), None)  # loads what torch needs for it
open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts anew
before = status("VmRSS")
with returning_freed_matrices():
    model.load(fill)
num_bytes = weights_bytes(config, torch.bfloat16, quantization=quantization)
print(num_bytes, status("VmRSS") - before, status("VmHWM") - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="of glibc")
@pytest.mark.parametrize("quantization", ["int8", None])
def test_the_process_takes_little_more_memory_than_the_weights(quantization: str | None) -> None:
    """With all pages, those of holes in the heap too, and the shape of SmolLM2 135M, whose matrices are small."""
    command = [sys.executable, "-c", LOADING, str(quantization)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    num_bytes, stays, peak = map(int, done.stdout.split())
    assert 0.95 * num_bytes < stays
    assert peak < MOST * num_bytes
    assert peak < MOST * stays
