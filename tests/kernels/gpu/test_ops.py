"""`GpuOps` beyond its single kernels; tests/engine/model/test_gpu_decoder.py runs whole models on it."""

from contextlib import contextmanager, nullcontext
from dataclasses import fields

import pytest
import torch

import kernels.gpu.ops
from kernels.gpu.ops import GpuOps
from kernels.gpu.quantize import QuantizedRows
from kernels.gpu.targets import TARGETS, UnsupportedTargetError
from kernels.sampling import RowStatus
from tests.support.kernels.batches import make_step_buffers
from tests.support.kernels.gpu_memory import FakeGpuMemory
from tests.support.kernels.graphs import FakeGraphs

NUM_PROCESSORS = 132


@pytest.fixture
def make_ops(device, target):
    return lambda **options: GpuOps(device, target, num_processors=NUM_PROCESSORS, **options)


def random(*shape, device):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize("option", ["quantize_weights", "quantize_inputs"])
def test_8_bits_are_rejected_without_hardware_support(option):
    with pytest.raises(UnsupportedTargetError, match="--quantization fp8: sm_80 has no 8-bit floats"):
        GpuOps(torch.device("cpu"), TARGETS["sm_80"], num_processors=NUM_PROCESSORS, **{option: True})


def test_8_bit_rows_are_made_for_linear_layers_only(make_ops, device, float8):
    ops, x, weight = make_ops(quantize_inputs=True), random(3, 32, device=device), torch.ones(32, device=device)
    assert isinstance(ops.rms_norm(x, weight, 1e-6), torch.Tensor)
    assert isinstance(ops.add_rms_norm(x, x.clone(), weight, 1e-6)[0], torch.Tensor)
    normed, residual = ops.add_rms_norm(x, x.clone(), weight, 1e-6, for_linear=True)
    assert isinstance(residual, torch.Tensor)
    gated = ops.gate_columns(x, torch.cat((x, x), dim=1)[:, 32:])
    for rows in (ops.rms_norm(x, weight, 1e-6, for_linear=True), normed, ops.gate_and_mul(x, "silu_and_mul"), gated):
        assert isinstance(rows, QuantizedRows)
        assert rows.values.dtype is float8


def test_8_bit_checkpoint_stays_8_bit_without_quantisation_on_load(make_ops, device, float8):
    ops = make_ops(quantize_inputs=True)
    values, scales = random(16, 32, device=device).to(torch.float8_e4m3fn), torch.full((16,), 0.5, device=device)
    assert ops.pack_quantized(values, scales, None, torch.bfloat16).weight.dtype is float8
    assert ops.pack_linear(values.bfloat16(), None).scales is None


class Step:
    """A step that returns one-hot logits of its input ids and records its inputs."""

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size
        self.calls = []

    def __call__(self, inputs):
        self.calls.append(inputs)
        ids = inputs.input_ids[inputs.logits_indices]
        logits = torch.empty(len(ids), self.vocab_size, device=ids.device) if inputs.logits is None else inputs.logits
        return logits.zero_().scatter_(1, ids[:, None], 1.0)


def test_step_without_decode_sizes_is_unchanged(make_ops, device):
    ops, step = make_ops(), Step(50)
    assert ops.compile_step(step, make_step_buffers(4, 9, 2, device=device)) is step
    assert ops.graphs_bytes == 0
    assert [inputs.metadata.num_reqs for inputs in step.calls] == [1]  # to compile what it launches


def test_the_memory_of_graphs_is_measured_with_an_empty_cache(make_ops, monkeypatch):
    """A capture empties the cache, so 3 GiB become free while graphs take memory."""
    memory = FakeGpuMemory()
    graphs = FakeGraphs(memory, bytes_per_graph=2**20)
    for name, replacement in graphs.patches().items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(kernels.gpu.ops, "compile_only", lambda **_: nullcontext([]))
    meta = torch.device("meta")
    with memory:
        ops, buffers = (
            GpuOps(meta, TARGETS["sm_90"], num_processors=NUM_PROCESSORS),
            make_step_buffers(4, 9, 2, device=meta),
        )
        ops.sample = lambda *_: None
        _ = torch.empty(3 * 2**30, dtype=torch.int8, device=meta).add(1)
        ops.compile_step(graphs.recordable(Step(50)), buffers, (1, 4))
        logits_bytes, ids_bytes = 1024, 512
        assert ops.graphs_bytes == 2 * 2**20 + logits_bytes + ids_bytes
        ops.compile_step(Step(50), buffers)
    assert ops.graphs_bytes == 0


def test_progress_is_shown_for_compiling_and_recording(make_ops, device, monkeypatch):
    graphs = FakeGraphs()
    for name, replacement in graphs.patches().items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    shown, passed_on, compile_only = [], [], kernels.gpu.ops.compile_only

    def progress(iterable, /, *, desc, total):
        shown.append((desc, total))
        return iterable

    @contextmanager
    def recorded(*, progress):
        passed_on.append(progress)
        with compile_only() as compiled:
            yield compiled

    monkeypatch.setattr(kernels.gpu.ops, "compile_only", recorded)
    make_ops(progress=progress).compile_step(
        graphs.recordable(Step(50)), make_step_buffers(4, 9, 2, device=device), (1, 4)
    )
    assert passed_on == [progress]  # the interpreter compiles nothing
    assert shown == [("recording CUDA graphs", 2)]


def test_compile_batches_of_the_sampler_are_valid(make_ops, device, monkeypatch):
    """If it ran, every index would be within its tensor."""
    ops, seen = make_ops(), []
    sample = ops.sample
    monkeypatch.setattr(ops, "sample", lambda logits, batch: seen.append((logits, batch)) or sample(logits, batch))
    ops.compile_step(Step(50), make_step_buffers(4, 9, 2, device=device))
    ((logits, batch),) = seen
    for field in fields(batch):
        value = getattr(batch, field.name)
        assert not isinstance(value, torch.Tensor) or value.device.type == device.type
    sampled = sample(logits, batch)
    assert sampled.token_ids.tolist() == [0]  # the largest logit is that of input id 0
    assert sampled.status.tolist() == [RowStatus.OK]
