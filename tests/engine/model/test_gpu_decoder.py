"""Whole models on GPU operations, under Triton's interpreter where there is no GPU, against `transformers`.

In fp32 logits agree within 2e-5, for a standard deviation of one. Where values are rounded to fewer bits, errors are
root mean squares as a part of the standard deviation.
"""

import json
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.config import ModelConfig
from engine.model.loader import load_model
from kernels.gpu.linear import PackedLinear
from kernels.gpu.quantize import QuantizedRows
from kernels.metadata import AttentionMetadata, StepInputs
from kernels.ops import reference_ops
from kernels.testing import cache_tensors, poison_cache

TOLERANCE = 2e-5
BLOCK_SIZE, BLOCKS_PER_ROW = 16, 4
SLIDING = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHECKPOINTS = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 rope, tied, heads of 80": (
        "llama",
        {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "head_dim": 80, "num_key_value_heads": 4},
    ),
    "mistral window": ("mistral", {"sliding_window": 24}),
    "qwen2, window in some layers": ("qwen2", SLIDING),
    "qwen3": ("qwen3", {}),
}
# Query tokens of each row, step by step: prompts, chunks beside decodes, decodes alone with a row that waits.
STEPS = [(5, 17, 33, 0), (1, 1, 4, 18), (1, 1, 1, 1), (1, 0, 1, 1), (16, 1, 0, 1)]
PROMPT_LENS = [sum(lens) for lens in zip(*STEPS, strict=True)]


class Case(NamedTuple):
    """A checkpoint, prompts, and what `transformers` makes of them.

    Attributes:
        expected: [all tokens, vocab_size] of the prompts one after the other.
    """

    path: object
    config: ModelConfig
    prompts: list[torch.Tensor]
    expected: torch.Tensor


def transformers_logits(path, prompts, dtype=torch.float32, change=lambda model: None):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    change(model)
    with torch.inference_mode():
        return torch.cat([model(prompt[None]).logits[0].float() for prompt in prompts])


def make_case(path):
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 211, (length,), generator=generator) for length in PROMPT_LENS]
    return Case(path, ModelConfig.from_dir(path), prompts, transformers_logits(path, prompts))


@pytest.fixture(scope="module", params=CHECKPOINTS)
def case(request, make_checkpoint):
    architecture, overrides = CHECKPOINTS[request.param]
    return make_case(make_checkpoint(architecture, dtype="bfloat16", **overrides))  # exact in all dtypes


@pytest.fixture(scope="module")
def llama(make_checkpoint):
    return make_case(make_checkpoint("llama", dtype="bfloat16"))


class Server:
    """A model with a cache, poisoned at first, that computes some rows in steps."""

    def __init__(self, case, ops, device, *, dtype=torch.float32, kv_dtype=None):
        self._prompts = case.prompts
        self._device = device
        self._model = load_model(case.path, case.config, ops, dtype=dtype, device=device, show_progress_bar=False)
        generator = torch.Generator().manual_seed(1)
        num_blocks = len(case.prompts) * BLOCKS_PER_ROW
        self._block_table = torch.randperm(num_blocks, generator=generator).view(-1, BLOCKS_PER_ROW).int()
        shape = (num_blocks, BLOCK_SIZE, case.config.num_kv_heads, case.config.head_dim)
        self.kv_caches = [ops.make_kv_cache(*shape, kv_dtype or dtype) for _ in range(case.config.num_layers)]
        for kv_cache in self.kv_caches:
            poison_cache(kv_cache)
        self._computed = [0] * len(case.prompts)

    def step(self, query_lens, num_padded_rows=0):
        """{row: logits of its tokens}."""
        # rows of one token first, as the scheduler has them
        rows = sorted((row for row, n in enumerate(query_lens) if n), key=lambda row: query_lens[row] > 1)
        positions = []
        for row in rows:
            start = self._computed[row]
            self._computed[row] = start + query_lens[row]
            positions.append(torch.arange(start, self._computed[row]))
        slots = [
            self._block_table[row, p // BLOCK_SIZE].long() * BLOCK_SIZE + p % BLOCK_SIZE
            for row, p in zip(rows, positions, strict=True)
        ]
        input_ids = [self._prompts[row][p] for row, p in zip(rows, positions, strict=True)]
        num_tokens = sum(map(len, positions))
        padding = [0] * num_padded_rows
        lens = [query_lens[row] for row in rows] + [1] * num_padded_rows
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *lens]).cumsum(0).int().to(self._device),
            seq_lens=torch.tensor([self._computed[row] for row in rows] + padding, dtype=torch.int32).to(self._device),
            block_table=self._block_table[rows + padding].to(self._device),
            slot_mapping=torch.cat([*slots, torch.full((num_padded_rows,), -1)]).to(self._device),
            block_size=BLOCK_SIZE,
            max_query_len=max(lens),
            max_seq_len=max(self._computed),
            num_one_token_reqs=lens.count(1),
        )
        zeros = torch.zeros(num_padded_rows, dtype=torch.int64)
        inputs = StepInputs(
            torch.cat([*input_ids, zeros]).to(self._device),
            torch.cat([*positions, zeros]).to(self._device),
            metadata,
            torch.arange(num_tokens).to(self._device),
        )
        logits = self._model.step(inputs, self.kv_caches).cpu()
        return dict(zip(rows, logits.split([len(p) for p in positions]), strict=True))

    def run(self):
        """Logits of all tokens, row by row."""
        parts = [[] for _ in self._prompts]
        for query_lens in STEPS:
            for row, logits in self.step(query_lens).items():
                parts[row].append(logits)
        return torch.cat([part for row in parts for part in row])


def largest_error(logits, expected):
    return float((logits - expected).abs().max())


def error(logits, expected):
    return float((logits - expected).square().mean().sqrt() / expected.std())


def test_logits_are_those_of_transformers_and_of_the_reference(case, gpu_ops, gpu_device):
    logits = Server(case, gpu_ops(), gpu_device).run()
    assert logits.dtype is torch.float32
    assert largest_error(logits, case.expected) < TOLERANCE
    reference = Server(case, reference_ops(), torch.device("cpu")).run()
    assert largest_error(logits, reference) < TOLERANCE


def test_bfloat16_is_as_near_to_the_truth_as_that_of_transformers(case, gpu_ops, gpu_device):
    """Within a factor of two: the interpreter cuts off bits where a GPU rounds, which is up to twice as wrong."""
    logits = Server(case, gpu_ops(), gpu_device, dtype=torch.bfloat16).run()
    theirs = transformers_logits(case.path, case.prompts, torch.bfloat16)
    assert 1e-3 < error(logits, case.expected) < 2 * error(theirs, case.expected)


def rounded_rows(x, float8):
    scales = x.abs().amax(-1, keepdim=True) / torch.finfo(float8).max
    return (x / scales).to(float8).float() * scales


def round_linear_layers(float8):
    """A change of a transformers model: all but the head multiply 8-bit rows by 8-bit output channels."""

    def change(model):
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.data = rounded_rows(module.weight.data, float8)
                module.register_forward_pre_hook(lambda _, args: (rounded_rows(args[0], float8),))

    return change


@pytest.fixture(scope="module")
def float8(gpu_ops):
    dtype = gpu_ops()._target.fp8_dtype
    if dtype is None:
        pytest.skip("the GPU has no 8-bit floats")
    return dtype


@pytest.mark.parametrize("quantize_inputs", [True, False], ids=["inputs as they are made", "inputs in the layers"])
def test_8_bit_linear_layers_compute_what_transformers_does_with_rounded_ones(
    case, gpu_ops, gpu_device, float8, quantize_inputs
):
    """Rounding costs 10 to 13 %. To the same rounding in transformers there is less than a tenth of that: values
    between two 8-bit ones that differ in their last bit go either way.
    """
    ops = gpu_ops(quantize_weights=True, quantize_inputs=quantize_inputs)
    logits = Server(case, ops, gpu_device).run()
    theirs = transformers_logits(case.path, case.prompts, change=round_linear_layers(float8))
    assert 0.05 < error(theirs, case.expected) < 0.2
    assert error(logits, theirs) < 0.01


def test_an_8_bit_cache_is_near(case, gpu_ops, gpu_device, float8):
    """3 bits of mantissa: keys and values are off by up to 1/16, by 1/38 as a root mean square. Two layers add up, of
    one or a few keys each at the beginning of a prompt, where nothing averages out.
    """
    logits = Server(case, gpu_ops(), gpu_device, kv_dtype=float8).run()
    assert 0.01 < error(logits, case.expected) < 0.06


def test_all_of_it_together_is_near(llama, gpu_ops, gpu_device, float8):
    """Errors of layers, cache and bfloat16 (0.13, 0.05, 0.02) are independent: their squares add up to 0.14^2."""
    ops = gpu_ops(quantize_weights=True, quantize_inputs=True)
    logits = Server(llama, ops, gpu_device, dtype=torch.bfloat16, kv_dtype=float8).run()
    assert 0.05 < error(logits, llama.expected) < 0.2


def test_a_checkpoint_in_8_bits_is_what_rounding_on_load_gives(llama, gpu_ops, gpu_device, float8, tmp_path):
    if float8 is not torch.float8_e4m3fn:
        pytest.skip("rounds to another format than checkpoints have")
    stored = {}
    for name, weight in load_file(llama.path / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scales = weight.float().abs().amax(1, keepdim=True) / 448
            stored |= {name: (weight.float() / scales).to(float8), f"{name}_scale": scales}
        else:
            stored[name] = weight
    save_file(stored, tmp_path / "model.safetensors")
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(
        (llama.path / "config.json")
        .read_text()
        .replace("{", f'{{"quantization_config": {json.dumps(quantization)},', 1)
    )
    small = llama._replace(path=tmp_path, config=ModelConfig.from_dir(tmp_path))
    logits = Server(small, gpu_ops(quantize_inputs=True), gpu_device).run()
    rounded = Server(llama, gpu_ops(quantize_weights=True, quantize_inputs=True), gpu_device).run()
    assert torch.equal(logits, rounded)


@pytest.mark.parametrize("quantizes", [False, True], ids=["plain", "8 bits"])
def test_what_goes_into_linear_layers_is_quantised_where_it_is_made(llama, gpu_ops, gpu_device, monkeypatch, quantizes):
    """All but the output of attention, and the rows that logits are computed of."""
    ops = gpu_ops(quantize_weights=quantizes, quantize_inputs=quantizes)
    seen, linear = [], ops.linear
    monkeypatch.setattr(ops, "linear", lambda x, weights: seen.append((x, weights)) or linear(x, weights))
    Server(llama, ops, gpu_device).step((3, 1, 1, 1))
    *layers, (head_input, head) = seen
    assert isinstance(head_input, torch.Tensor)
    assert head.scales is None
    assert len(layers) == 4 * llama.config.num_layers
    made = [isinstance(x, QuantizedRows) for x, _ in layers]
    assert made == [quantizes, False, quantizes, quantizes] * llama.config.num_layers  # qkv, o, gate and up, down
    assert all(isinstance(packed, PackedLinear) and (packed.scales is not None) == quantizes for _, packed in layers)


@pytest.mark.parametrize("is_quantized", [False, True], ids=["fp32", "8 bits"])
def test_rows_of_padding_change_nothing(case, gpu_ops, gpu_device, request, is_quantized):
    """Neither logits nor a byte of the cache."""
    kv_dtype = request.getfixturevalue("float8") if is_quantized else torch.float32
    ops = gpu_ops(quantize_weights=is_quantized, quantize_inputs=is_quantized)
    plain, padded = (Server(case, ops, gpu_device, kv_dtype=kv_dtype) for _ in range(2))
    for server in (plain, padded):
        server.step((5, 17, 33, 0))
    for num_padded_rows, query_lens in ((1, (1, 1, 1, 0)), (5, (1, 0, 1, 0)), (7, (0, 0, 1, 0))):
        want, got = plain.step(query_lens), padded.step(query_lens, num_padded_rows)
        assert want.keys() == got.keys()
        for row in want:
            # on a GPU another number of rows may be another matrix product
            torch.testing.assert_close(got[row], want[row], rtol=0, atol=TOLERANCE)
        for ours, theirs in zip(padded.kv_caches, plain.kv_caches, strict=True):
            for a, b in zip(cache_tensors(ours), cache_tensors(theirs), strict=True):
                assert is_written_alike(a, b)


def is_written_alike(a, b):
    """Poison stays poison, and what is written is the same up to rounding of products before it."""
    a, b = a.float(), b.float()
    return torch.equal(a.isnan(), b.isnan()) and torch.allclose(a, b, rtol=0, atol=TOLERANCE, equal_nan=True)
