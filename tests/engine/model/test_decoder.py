"""Logits against `transformers` on random checkpoints of every architecture, with reference and with CPU operations.

Tolerance: 2e-5 absolute, in fp32, on logits of unit standard deviation. Each test prints its largest error (pytest -s).
"""

import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.loader import load_model, weights_bytes
from kernels.families import cpu_ops, reference_ops
from kernels.metadata import AttentionMetadata
from tests.support.engine.checkpoints import WITH_IMAGES
from tests.support.engine.weights import BLOCK_EXPERTS, BLOCK_SIZES, PeakBytes, save_block_scaled
from tests.support.kernels.batches import assert_same_bits, poison_cache

TOLERANCE = 2e-5
BLOCK_SIZE = 16
PROMPT_LENS = [1, 37, 5, 64, 129]
SERVED_LEN = 256

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


def longrope(num_pairs):
    """Factors for an original context that the longest prompts exceed only if it is 64."""
    short, long = ([1 + step * i for i in range(num_pairs)] for step in (0.1, 0.4))
    return {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long}


WINDOW_FROM_LAYER_1 = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
CHECKPOINTS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without GQA": ("llama", {"num_key_value_heads": 4}),
    "llama odd head": ("llama", {"head_dim": 20}),
    "llama sharded": ("llama", {"max_shard_size": "40KB"}),
    "llama bfloat16": ("llama", {"dtype": "bfloat16"}),
    "llama float16": ("llama", {"dtype": "float16"}),
    "llama yarn rope": ("llama", {"rope_parameters": YARN_ROPE}),
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": 24}),
    "ministral, window in some layers": (
        "mistral",
        {"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "qwen2": ("qwen2", {"sliding_window": 24}),  # not in use
    "qwen2 tied, window in some layers": ("qwen2", {"tie_word_embeddings": True, **WINDOW_FROM_LAYER_1}),
    "qwen3": ("qwen3", {}),
    "qwen3 biases, window in some layers": ("qwen3", {"attention_bias": True, **WINDOW_FROM_LAYER_1}),
    "phi3": ("phi3", {}),
    "phi3 partial, window": (
        "phi3",
        {"partial_rotary_factor": 0.75, "sliding_window": 24, "tie_word_embeddings": True},
    ),
    "phi3 partial, tied": ("phi3", {"partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "phi3 short factors": (
        "phi3",
        {"original_max_position_embeddings": 256, "max_position_embeddings": 512, "rope_parameters": longrope(8)},
    ),
    "qwen2 with experts": ("qwen2_moe", {}),
    "qwen2 with experts, window in other layers, bfloat16, tied, no biases": (
        "qwen2_moe",
        {
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 2,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "qkv_bias": False,
        },
    ),
    "qwen3 with experts": ("qwen3_moe", {}),
    "qwen3 with experts, window, bfloat16": (
        "qwen3_moe",
        {
            "dtype": "bfloat16",
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 24,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "attention_bias": True,
        },
    ),
    "qwen3.5": ("qwen3_5", {}),
    "qwen3.5 bfloat16, tied, biases, a layer in four attends, other sizes": (
        "qwen3_5",
        {
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
            "attention_bias": True,
            "num_hidden_layers": 4,
            "layer_types": None,
            "head_dim": 24,
            "linear_key_head_dim": 20,
            "linear_value_head_dim": 48,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "qwen3.5 with experts": ("qwen3_5_moe", {}),
    "qwen3.5 with experts, bfloat16, tied, in shards": (
        "qwen3_5_moe",
        {"dtype": "bfloat16", "tie_word_embeddings": True, "max_shard_size": "40KB", "num_experts_per_tok": 1},
    ),
    "qwen3.5 with experts that are stored together": ("qwen3_5_moe", {"joins_experts": True}),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3-next bfloat16, tied, biases, a layer in four attends, other sizes": (
        "qwen3_next",
        {
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
            "attention_bias": True,
            "num_hidden_layers": 4,
            "layer_types": None,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "head_dim": 24,
            "linear_key_head_dim": 20,
            "linear_value_head_dim": 48,
            "linear_num_value_heads": 6,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral window, tied, in shards": (
        "mixtral",
        {"sliding_window": 24, "tie_word_embeddings": True, "max_shard_size": "40KB", "num_experts_per_tok": 1},
    ),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss bfloat16, tied, windows in other layers, no attention biases": (
        "gpt_oss",
        {
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "sliding_attention"],
            "attention_bias": False,
            "swiglu_limit": 7.0,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2 bfloat16, tied, biases, one layer": (
        "olmo2",
        {"dtype": "bfloat16", "tie_word_embeddings": True, "attention_bias": True, "num_hidden_layers": 1},
    ),
    "olmo3": ("olmo3", {}),
    "olmo3 rotations": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {**YARN_ROPE, "original_max_position_embeddings": 32},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ),
    "glm": ("glm", {}),
    "glm bfloat16, tied, no biases, whole rotation": (
        "glm",
        {
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
    ),
    "glm4": ("glm4", {}),
    "glm4 quarter rotation, odd head": (
        "glm4",
        {
            "head_dim": 24,
            "rope_parameters": {**YARN_ROPE, "partial_rotary_factor": 0.25},
        },
    ),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", {}),
    "gemma": ("gemma", {}),
    "gemma untied biases": ("gemma", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma2": ("gemma2", {}),
    "gemma2 without caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3", {}),
    "gemma3 bfloat16, untied, rotations": (
        "gemma3",
        {
            "dtype": "bfloat16",
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": 2.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    **{name: (name, {}) for name in WITH_IMAGES if name != "qwen2.5 with images"},
    "mistral with images": ("mistral with images", {"max_shard_size": "40KB"}),
    "qwen2 with images": ("qwen2 with images", {"tie_word_embeddings": True}),
    "qwen2.5 with images, windows": (
        "qwen2.5 with images",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "llama gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "granite tied biases": ("granite", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
}


class Case(NamedTuple):
    config: ModelConfig
    path: Path
    prompts: list[torch.Tensor]
    expected: list[torch.Tensor]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def case(request, make_checkpoint):
    """A checkpoint, prompts, and what `transformers` makes of them, one prompt at a time."""
    import transformers

    architecture, overrides = CHECKPOINTS[request.param]
    path = make_checkpoint(architecture, **overrides)
    auto = "AutoModelForImageTextToText" if architecture in WITH_IMAGES else "AutoModelForCausalLM"
    oracle = getattr(transformers, auto).from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 211, (length,), generator=generator) for length in PROMPT_LENS]
    with torch.inference_mode():
        expected = [oracle(prompt[None]).logits[0] for prompt in prompts]
    return Case(ModelConfig.from_dir(path), path, prompts, expected)


def run(model, ops, prompts, chunk_lens, kv_dtype=torch.float32):
    """Logits of all prompt tokens, computed in steps: each gives every unfinished prompt its next chunk.

    chunk_lens: of each step, the last one for all steps to come.
    """
    config = model.config
    blocks_per_row = -(-max(map(len, prompts)) // BLOCK_SIZE)
    shuffled = torch.randperm(len(prompts) * blocks_per_row, generator=torch.Generator().manual_seed(1))
    block_table = shuffled.view(len(prompts), blocks_per_row).to(torch.int32)
    shape = (block_table.numel(), BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    kv_caches = [ops.make_kv_cache(*shape, kv_dtype) for _ in config.attention_layers]
    for kv_cache in kv_caches:
        poison_cache(kv_cache)
    model.allocate_states(len(prompts))
    logits = [[] for _ in prompts]
    computed = [0] * len(prompts)
    step = 0
    while rows := [row for row, prompt in enumerate(prompts) if computed[row] < len(prompt)]:
        chunk_len = chunk_lens[min(step, len(chunk_lens) - 1)]
        positions = [torch.arange(computed[row], min(computed[row] + chunk_len, len(prompts[row]))) for row in rows]
        query_lens = torch.tensor([0, *map(len, positions)])
        slots = [
            block_table[row, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for row, p in zip(rows, positions, strict=True)
        ]
        for row, p in zip(rows, positions, strict=True):
            computed[row] += len(p)
        metadata = AttentionMetadata(
            query_start_loc=query_lens.cumsum(0).to(torch.int32),
            seq_lens=torch.tensor([computed[row] for row in rows], dtype=torch.int32),
            block_table=block_table[rows],
            slot_mapping=torch.cat(slots).long(),
            block_size=BLOCK_SIZE,
            max_query_len=int(query_lens.max()),
            max_seq_len=max(computed),
            state_slots=torch.tensor(rows, dtype=torch.int32),
        )
        input_ids = torch.cat([prompts[row][p] for row, p in zip(rows, positions, strict=True)])
        hidden = model.forward(input_ids, torch.cat(positions), kv_caches, metadata)
        for row, part in zip(rows, model.compute_logits(hidden).split(query_lens[1:].tolist()), strict=True):
            logits[row].append(part)
        step += 1
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize(
    ("make_ops", "chunk_lens"),
    [
        pytest.param(reference_ops, [1000], id="reference, whole prompts"),
        pytest.param(cpu_ops, [1000], id="cpu, whole prompts"),
        pytest.param(cpu_ops, [17, 1, 40], id="cpu, chunks"),
    ],
)
def test_logits_equal_transformers(case, make_ops, chunk_lens):
    ops = make_ops()
    model = load_model(case.path, case.config, ops, max_model_len=SERVED_LEN)
    logits = run(model, ops, case.prompts, chunk_lens)
    error = max(float((a - e).abs().max()) for a, e in zip(logits, case.expected, strict=True))
    print(f"largest error {error:.1e}, standard deviation {float(torch.cat(case.expected).std()):.2f}")  # noqa: T201
    assert logits[0].dtype is torch.float32
    assert error < TOLERANCE


@pytest.mark.parametrize(
    ("quantization", "kv_dtype", "limit"),
    [("int8", torch.float32, 0.05), (None, torch.int8, 0.02), ("int8", torch.int8, 0.05)],
    ids=["int8 weights", "int8 KV cache", "int8 both"],
)
def test_int8_logits_are_near(case, quantization, kv_dtype, limit):
    """Root mean square of the errors, as a part of the standard deviation of the logits.

    Of a mixture of experts it is that of a token in the middle: rounding makes a few choose another expert.
    """
    ops = cpu_ops(quantization=quantization)
    model = load_model(case.path, case.config, ops, max_model_len=SERVED_LEN)
    logits, expected = torch.cat(run(model, ops, case.prompts, [17, 1, 40], kv_dtype)), torch.cat(case.expected)
    squares = (logits - expected).square().mean(dim=1)
    mean = squares.median() if any(case.config.traits.mixtures) else squares.mean()
    error = float(mean.sqrt() / expected.std())
    print(f"error {error:.4f}")  # noqa: T201
    assert 1e-4 < error < limit


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("architecture", "fields"),
    [("qwen3", {"tie_word_embeddings": True}), ("llama", {"attention_bias": True, "mlp_bias": True})],
)
def test_weights_of_two_bytes_give_the_logits_of_fp32_to_the_last_bit(make_checkpoint, dtype, architecture, fields):
    """With norms of heads and a tied output head; and with biases."""
    path, ops = make_checkpoint(architecture, dtype=dtype, **fields), cpu_ops()
    config = ModelConfig.from_dir(path)
    prompts = [torch.arange(length) * 7 % config.vocab_size for length in (1, 12, 40)]
    stored, widened = (
        load_model(path, config, ops, dtype=number_format, max_model_len=64)
        for number_format in (getattr(torch, dtype), torch.float32)
    )
    for chunk_lens in ([40], [1, 12, 27]):
        assert_same_bits(*(torch.cat(run(model, ops, prompts, chunk_lens)) for model in (stored, widened)))


def test_embeddings_are_shared_when_tied(make_checkpoint):
    path = make_checkpoint("llama", tie_word_embeddings=True)
    config = ModelConfig.from_dir(path)
    model = load_model(path, config, reference_ops())
    assert model.compute_logits(torch.ones(1, config.hidden_size)).any()
    model.vocabulary.table.zero_()
    assert not model.compute_logits(torch.ones(1, config.hidden_size)).any()


def test_a_tied_head_and_the_embedding_are_one_matrix_in_memory_on_a_cpu(make_checkpoint):
    path = make_checkpoint("llama", tie_word_embeddings=True, vocab_size=20_011)
    config = ModelConfig.from_dir(path)
    with PeakBytes() as memory:
        model = load_model(path, config, cpu_ops())
    assert model.vocabulary.shares_head
    head_bytes = config.vocab_size * config.hidden_size * 4
    assert memory.bytes < weights_bytes(config, torch.float32) + head_bytes // 4


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoint_parts_are_those_of_the_file_and_share_no_memory(make_checkpoint, tied):
    path = make_checkpoint("qwen3", attention_bias=True, tie_word_embeddings=tied)
    config = ModelConfig.from_dir(path)
    cpu = torch.device("cpu")
    model = Decoder(config, reference_ops(), max_positions=1, dtype=torch.float32, device=cpu)
    parts = {}
    model.load(parts.update)
    assert parts.keys() == model.checkpoint_parts().keys()
    tensors = {name: part.tensor for name, part in parts.items()}
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors.values())
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    saved = load_file(path / "model.safetensors")
    assert {name: t.shape for name, t in tensors.items()} == {name: t.shape for name, t in saved.items()}
    assert weights_bytes(config, torch.float32) == sum(t.nbytes for t in saved.values())
    if tied:  # and a copy of the head with a scale per row
        head = saved["model.embed_tokens.weight"]
        untied = replace(config, tie_word_embeddings=False)
        assert weights_bytes(config, torch.float32, quantization="int8") == weights_bytes(
            untied, torch.float32, quantization="int8"
        )
        assert weights_bytes(untied, torch.float32) == weights_bytes(config, torch.float32) + head.nbytes


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_loaded_weights_do_not_outlive_their_packing(make_checkpoint, monkeypatch, quantization):
    path, ops, loaded = make_checkpoint("llama"), cpu_ops(quantization=quantization), []
    pack = ops.pack_linear

    def pack_linear(weight, bias, **options):
        assert all(reference() is None for reference in loaded)  # one matrix at a time
        loaded.append(weakref.ref(weight))
        return pack(weight, bias, **options)

    monkeypatch.setattr(ops, "pack_linear", pack_linear)
    model = load_model(path, ModelConfig.from_dir(path), ops)
    assert len(loaded) == 4 * len(model.layers) + 1
    assert loaded[-1]() is None


def test_operations_know_what_logits_are_computed_of(make_checkpoint, monkeypatch):
    """The last norm and the output head: what all others yield, or hold, only linear layers see."""
    path, ops, calls = make_checkpoint("llama"), reference_ops(), []

    def recorded(function, keyword):
        def record(*args, **options):
            calls.append(options.get(keyword, False))
            return function(*args, **options)

        return record

    for name in ("rms_norm", "add_rms_norm"):
        monkeypatch.setattr(ops, name, recorded(getattr(ops, name), "for_linear"))
    monkeypatch.setattr(ops, "pack_linear", recorded(ops.pack_linear, "for_logits"))
    model = load_model(path, ModelConfig.from_dir(path), ops)
    assert calls == [True] + [False] * (4 * len(model.layers))
    calls.clear()
    run(model, ops, [torch.arange(5)], [5])
    assert calls == [True] * (2 * len(model.layers)) + [False]


@pytest.mark.parametrize("architecture", ["qwen3", "glm", "qwen3_next"])
@pytest.mark.parametrize("make_ops", [reference_ops, cpu_ops])
def test_logits_of_block_scaled_weights_equal_those_of_transformers(make_checkpoint, tmp_path, make_ops, architecture):
    """transformers reads a copy whose weights are dequantised. A partial rotation has another order of rows."""
    import transformers

    sizes = BLOCK_EXPERTS if architecture == "qwen3_next" else {}
    original = make_checkpoint(architecture, dtype="bfloat16", **BLOCK_SIZES, **sizes)
    path = save_block_scaled(original, tmp_path / "blocks", twin=tmp_path / "twin")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "twin", dtype=torch.float32)
    prompt = torch.arange(3, 40)
    with torch.inference_mode():
        expected = oracle(prompt[None]).logits[0].log_softmax(-1)
    ops = make_ops()
    [logits] = run(load_model(path, ModelConfig.from_dir(path), ops), ops, [prompt], [len(prompt)])
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert float((logits.log_softmax(-1) - expected).abs().max()) < 1e-4
