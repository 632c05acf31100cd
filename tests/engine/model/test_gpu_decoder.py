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
from kernels.families import reference_ops
from kernels.gpu.linear import PackedLinear
from kernels.gpu.ops import GpuOps
from kernels.gpu.quantize import QuantizedRows
from kernels.gpu.targets import TARGETS, target_of
from kernels.metadata import AttentionMetadata, StepInputs
from tests.support.engine.weights import BLOCK_SIZES, save_block_scaled
from tests.support.kernels.batches import cache_tensors, poison_cache

TOLERANCE = 2e-5
BLOCK_SIZE, BLOCKS_PER_ROW = 16, 4
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHECKPOINTS = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 208}),  # the head could be in 8 bits
    "llama 3 rope, tied, heads of 80": (
        "llama",
        {
            "rope_parameters": LLAMA3_ROPE,
            "tie_word_embeddings": True,
            "head_dim": 80,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
    ),
    "mistral window": ("mistral", {"sliding_window": 8}),
    "qwen2, window in some layers": ("qwen2", SLIDING),
    "qwen3": ("qwen3", {}),
    "qwen2 with experts": ("qwen2_moe", {}),
    "qwen3 with experts": ("qwen3_moe", {}),
    "qwen3.5": ("qwen3_5", {}),
    "qwen3-next": ("qwen3_next", {}),
    "mixtral": ("mixtral", {}),
    "gpt-oss": ("gpt_oss", {}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.75, "sliding_window": 8}),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "glm4": ("glm4", {}),
    "gemma2": ("gemma2", {"sliding_window": 8}),
    "gemma3": ("gemma3", {"sliding_window": 8}),
}
# Query tokens of each row, step by step: prompts, chunks beside decodes, decodes alone with a row that waits.
STEPS = [(3, 15, 20, 0), (1, 1, 2, 9), (1, 0, 1, 1)]
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
    prompts = [torch.randint(0, 208, (length,), generator=generator) for length in PROMPT_LENS]
    return Case(path, ModelConfig.from_dir(path), prompts, transformers_logits(path, prompts))


@pytest.fixture(scope="module")
def case_of(make_checkpoint):
    """case_of(name in CHECKPOINTS) -> Case."""
    cases = {}

    def case(name):
        if name not in cases:
            architecture, overrides = CHECKPOINTS[name]
            cases[name] = make_case(make_checkpoint(architecture, dtype="bfloat16", **overrides))  # exact in all dtypes
        return cases[name]

    return case


@pytest.fixture(params=["llama", "qwen3", "gemma2", "gemma3"])
def case(request, case_of):
    """One with biases, one with norms of heads, one with soft caps, and two with fp32 norms around each part."""
    return case_of(request.param)


@pytest.fixture
def llama(case_of):
    return case_of("llama")


class Server:
    """A model with a cache, poisoned at first, that computes some rows in steps."""

    def __init__(self, case, ops, device, *, dtype=torch.float32, kv_dtype=None):
        self._prompts = case.prompts
        self._device = device
        self._model = load_model(case.path, case.config, ops, dtype=dtype, device=device)
        self._model.allocate_states(len(case.prompts))
        generator = torch.Generator().manual_seed(1)
        num_blocks = len(case.prompts) * BLOCKS_PER_ROW
        self._block_table = torch.randperm(num_blocks, generator=generator).view(-1, BLOCKS_PER_ROW).int()
        shape = (num_blocks, BLOCK_SIZE, case.config.num_kv_heads, case.config.head_dim)
        self.kv_caches = [ops.make_kv_cache(*shape, kv_dtype or dtype) for _ in case.config.attention_layers]
        for kv_cache in self.kv_caches:
            poison_cache(kv_cache)
        self.num_computed = [0] * len(case.prompts)

    def slot(self, row, position):
        block = self._block_table[row, position // BLOCK_SIZE].long()
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        return slot if isinstance(position, torch.Tensor) else int(slot)

    def bytes_by_slot(self):
        """Of each tensor of all layers' caches [num_slots, bytes], heads of a token together."""
        parts = [part for kv_cache in self.kv_caches for part in cache_tensors(kv_cache) if part.numel()]
        return [part.transpose(1, 2).flatten(0, 1).contiguous().flatten(1).view(torch.uint8) for part in parts]

    def step(self, query_lens, num_padded_rows=0):
        """{row: logits of its tokens}."""
        # rows of one token first, as the scheduler has them
        rows = sorted((row for row, n in enumerate(query_lens) if n), key=lambda row: query_lens[row] > 1)
        positions = []
        for row in rows:
            start = self.num_computed[row]
            self.num_computed[row] = start + query_lens[row]
            positions.append(torch.arange(start, self.num_computed[row]))
        slots = [self.slot(row, p) for row, p in zip(rows, positions, strict=True)]
        input_ids = [self._prompts[row][p] for row, p in zip(rows, positions, strict=True)]
        num_tokens = sum(map(len, positions))
        padding = [0] * num_padded_rows
        lens = [query_lens[row] for row in rows] + [1] * num_padded_rows
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *lens]).cumsum(0).int().to(self._device),
            seq_lens=torch.tensor([self.num_computed[row] for row in rows] + padding, dtype=torch.int32).to(
                self._device
            ),
            block_table=self._block_table[rows + padding].to(self._device),
            slot_mapping=torch.cat([*slots, torch.full((num_padded_rows,), -1)]).to(self._device),
            block_size=BLOCK_SIZE,
            max_query_len=max(lens),
            max_seq_len=max(self.num_computed),
            num_one_token_reqs=lens.count(1),
            state_slots=torch.tensor(rows + padding, dtype=torch.int32).to(self._device),
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_those_of_transformers_and_of_the_reference(case_of, gpu_ops, gpu_device, name):
    case = case_of(name)
    logits = Server(case, gpu_ops(), gpu_device).run()
    assert logits.dtype is torch.float32
    assert largest_error(logits, case.expected) < TOLERANCE
    reference = Server(case, reference_ops(), torch.device("cpu")).run()
    assert largest_error(logits, reference) < TOLERANCE


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "quantize_inputs"),
    [("llama", True), ("llama", False), ("qwen3", True)],
    ids=["llama", "llama, inputs quantised in the layers", "qwen3"],
)
def test_8_bit_linear_layers_compute_what_transformers_does_with_rounded_ones(
    case_of, gpu_ops, gpu_device, float8, name, quantize_inputs
):
    """Rounding costs about a tenth. To the same rounding in transformers there is nothing at most tokens. At others a
    value between two 8-bit ones may go the other way, which moves it, and then more, by up to 1/16.
    """
    case = case_of(name)
    ops = gpu_ops(quantize_weights=True, quantize_inputs=quantize_inputs)
    logits = Server(case, ops, gpu_device).run()
    theirs = transformers_logits(case.path, case.prompts, change=round_linear_layers(float8))
    assert 0.05 < error(theirs, case.expected) < 0.2
    assert error(logits, theirs) < 0.04
    if gpu_device.type == "cpu":  # matrix units sum up 8-bit products less exactly
        assert float((logits - theirs).abs().amax(1).median()) < TOLERANCE


def test_an_8_bit_cache_is_near(llama, gpu_ops, gpu_device, float8):
    """3 bits of mantissa: keys and values are off by up to 1/16, by 1/38 as a root mean square. Two layers add up, of
    one or a few keys each at the beginning of a prompt, where nothing averages out.
    """
    logits = Server(llama, gpu_ops(), gpu_device, kv_dtype=float8).run()
    assert 0.01 < error(logits, llama.expected) < 0.06


@pytest.mark.slow
def test_all_of_it_together_is_near(llama, gpu_ops, gpu_device, float8):
    """Errors of layers, cache and bfloat16, about 0.1, 0.05 and 0.02, are independent: their squares add up."""
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
    config = json.loads((llama.path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    small = llama._replace(path=tmp_path, config=ModelConfig.from_dir(tmp_path))
    logits = Server(small, gpu_ops(quantize_inputs=True), gpu_device).run()
    rounded = Server(llama, gpu_ops(quantize_weights=True, quantize_inputs=True), gpu_device).run()
    assert torch.equal(logits, rounded)


@pytest.fixture(scope="module")
def block_scaled(make_checkpoint, tmp_path_factory):
    """Returns the case of a checkpoint with scales per block; expected are the logits of its copy in fp32."""
    folder = tmp_path_factory.mktemp("block_scaled")
    original = make_checkpoint("qwen3", dtype="bfloat16", **BLOCK_SIZES)
    path = save_block_scaled(original, folder / "blocks", twin=folder / "twin")
    twin = make_case(folder / "twin")
    return twin._replace(path=path, config=ModelConfig.from_dir(path)), folder / "twin"


@pytest.mark.slow
def test_block_scaled_weights_compute_what_transformers_does_with_inputs_rounded_by_groups(
    block_scaled, gpu_ops, gpu_device, float8
):
    """As `test_8_bit_linear_layers_compute_what_transformers_does_with_rounded_ones`, where weights are rounded too."""
    case, twin = block_scaled

    def round_inputs(model):
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.register_forward_pre_hook(
                    lambda _, args: (rounded_rows(args[0].unflatten(-1, (-1, 128)), float8).flatten(-2),)
                )

    theirs = transformers_logits(twin, case.prompts, change=round_inputs)
    assert 0.01 < error(theirs, case.expected) < 0.2
    for quantize_inputs in (True, False):  # where they are made, or in the layers
        ops = gpu_ops(quantize_inputs=quantize_inputs, input_group_size=128)
        logits = Server(case, ops, gpu_device).run()
        assert error(logits, theirs) < 0.04
        if gpu_device.type == "cpu":
            assert float((logits - theirs).abs().amax(1).median()) < TOLERANCE


@pytest.mark.slow
def test_block_scaled_weights_are_exact_on_a_gpu_without_8_bit_floats(block_scaled, gpu_device):
    case, _ = block_scaled
    target = TARGETS["sm_80"] if gpu_device.type == "cpu" else target_of(gpu_device)
    if target.fp8_dtype is not None:
        pytest.skip("the GPU multiplies in 8 bits")
    logits = Server(case, GpuOps(gpu_device, target, num_processors=132), gpu_device).run()
    assert largest_error(logits, case.expected) < TOLERANCE


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_quantized", [False, True], ids=["fp32", "8 bits"])
def test_rows_of_padding_change_nothing(llama, gpu_ops, gpu_device, request, is_quantized):
    """Logits of the real rows, which a matrix product of more rows may round otherwise, and no other slot."""
    kv_dtype = request.getfixturevalue("float8") if is_quantized else torch.float32
    ops = gpu_ops(quantize_weights=is_quantized, quantize_inputs=is_quantized)
    plain, padded = (Server(llama, ops, gpu_device, kv_dtype=kv_dtype) for _ in range(2))
    for server in (plain, padded):
        server.step((4, 14, 17, 0))
    for num_padded_rows, query_lens in ((1, (1, 1, 1, 0)), (6, (0, 1, 0, 0))):
        want = plain.step(query_lens)
        before = padded.bytes_by_slot()
        got = padded.step(query_lens, num_padded_rows)
        for row, logits in want.items():
            assert error(got[row], logits) < (0.04 if is_quantized else TOLERANCE)
        changed = {slot for a, b in zip(before, padded.bytes_by_slot(), strict=True) for slot in differing_rows(a, b)}
        assert changed == {padded.slot(row, padded.num_computed[row] - 1) for row in want}


def differing_rows(a, b):
    return (a != b).any(1).nonzero().flatten().tolist()
