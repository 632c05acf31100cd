"""LoRA adapters: logits are those of the merged checkpoint in transformers, and what does not fit is refused."""

import contextlib
import json
import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.loader import load_model, projection_shapes
from engine.model.lora import LoraAdapter
from kernels.families import cpu_ops, reference_ops
from kernels.metadata import AdaptedTokens, AttentionMetadata
from tests.support.engine.adapters import CONFIG_FILE, WEIGHTS_FILE, save_adapter, save_merged
from tests.support.engine.int_checkpoints import Scheme, quantise_checkpoint
from tests.support.kernels.batches import assert_same_bits

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHARED = (*ALL[:4], *(f"shared_expert.{name}" for name in ALL[4:]))
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
DELTA_RULE = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
PROMPT_LENS = (1, 37, 5)
TOLERANCE = 2e-5
"""As in test_decoder.py, on logits of unit standard deviation."""

FAMILIES = {
    "llama": ("llama", {}, ALL, {}),
    "llama, some projections": ("llama", {}, ("v_proj", "up_proj"), {}),
    "llama, biases": ("llama", {"attention_bias": True}, ("q_proj", "k_proj"), {"rank": 3}),
    "llama, bf16": ("llama", {}, ALL, {"dtype": torch.bfloat16}),
    "llama, rslora": ("llama", {}, ALL, {"use_rslora": True, "alpha": 4.0}),
    "qwen3": ("qwen3", {}, ALL, {"rank": 40}),
    "qwen3 with experts, attention": ("qwen3_moe", {}, ("q_proj", "k_proj", "v_proj", "o_proj"), {}),
    "qwen2 with experts, attention and the shared expert": ("qwen2_moe", {}, SHARED, {}),
    "gemma2": ("gemma2", {}, ALL, {}),
    "gemma3": ("gemma3", {}, ALL, {}),
    "qwen3.5, gated attention": ("qwen3_5", {}, ALL, {}),
    "qwen3.5, delta rule": ("qwen3_5", {}, DELTA_RULE, {}),
    "qwen3-next, delta rule": ("qwen3_next", {}, ("in_proj_qkvz", "in_proj_ba", "out_proj"), {}),
    "phi3, partial rotation": ("phi3", {"partial_rotary_factor": 0.75}, FUSED, {}),
}


def open_adapter(folder, base):
    return LoraAdapter.open("tuned", folder, projection_shapes(ModelConfig.from_dir(base)))


def logits_of(model, prompts, adapters=None):
    """Computes all prompts in one batch; adapters: the index of each, -1: none."""
    lens = [len(prompt) for prompt in prompts]
    num_tokens, num_blocks = sum(lens), len(prompts) * 4
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=torch.arange(num_blocks, dtype=torch.int32).view(-1, 4),
        slot_mapping=torch.cat([torch.arange(n) + 64 * row for row, n in enumerate(lens)]),
        block_size=16,
        state_slots=torch.arange(len(lens), dtype=torch.int32),
        max_query_len=max(lens),
        max_seq_len=max(lens),
    )
    positions = torch.cat([torch.arange(n) for n in lens])
    adapted = None
    if adapters is not None:
        of_tokens = torch.tensor(adapters).repeat_interleave(torch.tensor(lens))
        order = torch.argsort(of_tokens, stable=True)
        indices = order[of_tokens[order] >= 0]
        adapted = AdaptedTokens(indices, of_tokens[indices])
    config = model.config
    caches = [
        model._ops.make_kv_cache(num_blocks, 16, config.num_kv_heads, config.head_dim, torch.float32)
        for _ in config.attention_layers
    ]
    model.allocate_states(len(lens))
    hidden = model.forward(torch.cat(prompts), positions, caches, metadata, adapted)
    assert len(hidden) == num_tokens
    return model.compute_logits(hidden)


def make_prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 211, (n,), generator=generator) for n in PROMPT_LENS]


def reference_logits(folder, prompts):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return torch.cat([model(prompt[None]).logits[0] for prompt in prompts])


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_merged_checkpoint(name, make_checkpoint, tmp_path):
    family, overrides, targets, options = FAMILIES[name]
    base = make_checkpoint(family, **overrides)
    folder = save_adapter(tmp_path / "adapter", base, targets=targets, **options)
    prompts = make_prompts()
    want = reference_logits(save_merged(tmp_path / "merged", base, folder), prompts)
    unchanged = reference_logits(base, prompts)
    assert (want - unchanged).abs().max() > 0.5  # the adapter matters
    changes = open_adapter(folder, base).read()
    for ops in (reference_ops(), cpu_ops()):
        model = load_model(base, ModelConfig.from_dir(base), ops)
        model.set_adapters(ops, [{}, changes])
        adapted = logits_of(model, prompts, [1] * len(prompts))
        assert (adapted - want).abs().max() < TOLERANCE
        mixed = logits_of(model, prompts, [1, -1, 0])
        n = PROMPT_LENS[0]
        assert (mixed[:n] - want[:n]).abs().max() < TOLERANCE
        assert (mixed[n:] - unchanged[n:]).abs().max() < TOLERANCE


def test_logits_of_a_checkpoint_in_integers_are_those_of_its_values_with_the_adapter_merged(make_checkpoint, tmp_path):
    original = make_checkpoint("llama", dtype="float16", intermediate_size=128)
    integers, twin = (shutil.copytree(original, tmp_path / name) for name in ("integers", "twin"))
    quantise_checkpoint(original, integers, twin, Scheme("awq"))
    folder = save_adapter(tmp_path / "adapter", twin, targets=ALL)
    prompts = make_prompts()
    want = reference_logits(save_merged(tmp_path / "merged", twin, folder), prompts)
    changes = open_adapter(folder, integers).read()
    for ops in (reference_ops(), cpu_ops()):
        model = load_model(integers, ModelConfig.from_dir(integers), ops)
        model.set_adapters(ops, [changes])
        assert (logits_of(model, prompts, [0] * len(prompts)) - want).abs().max() < TOLERANCE


def test_an_adapter_of_experts_is_refused(make_checkpoint, tmp_path):
    base = make_checkpoint("mixtral")
    folder = save_adapter(tmp_path / "adapter", base, targets=("q_proj", "w1"))
    names = "q_proj, k_proj, v_proj, o_proj"
    with pytest.raises(CheckpointError, match=rf"target_modules names 'w1', the linear layers .* are {names}$"):
        open_adapter(folder, base)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_each_request_alone_and_the_base_model_keeps_its_own(
    dtype, quantization, make_checkpoint, tmp_path
):
    base = make_checkpoint("llama", dtype="bfloat16")
    fp32 = make_checkpoint("llama")
    ops = cpu_ops(quantization=quantization, num_threads=2)
    changes = [
        open_adapter(save_adapter(tmp_path / str(seed), fp32, seed=seed, rank=seed, targets=ALL), base).read()
        for seed in (2, 5)
    ]
    model = load_model(base, ModelConfig.from_dir(base), ops, dtype=dtype)
    prompts, adapters = make_prompts() * 2, [0, -1, 1, 1, 0, -1]
    plain = logits_of(model, prompts)
    model.set_adapters(ops, changes)
    together = logits_of(model, prompts, adapters)
    begin = 0
    for prompt, adapter in zip(prompts, adapters, strict=True):
        rows = slice(begin, begin := begin + len(prompt))
        assert_same_bits(together[rows], logits_of(model, [prompt], [adapter]))
        if adapter < 0:
            assert_same_bits(together[rows], plain[rows])
        else:
            assert (together[rows] - plain[rows]).abs().max() > 0.1


@pytest.fixture(scope="module")
def base(make_checkpoint):
    return make_checkpoint("llama")


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")
ELSEWHERE = "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight"

UNFIT = {
    "peft_type": ({"peft_type": "IA3"}, r"peft_type is 'IA3', supported is 'LORA'"),
    "no rank": ({"r": None}, r"r is missing"),
    "rank 0": ({"r": 0}, r"r is 0, expected an integer >= 1"),
    "large rank": ({"r": 513}, r"r is 513, the maximum is 512"),
    "another rank": ({"r": 8}, r"lora_A.weight has shape \[4, 64\], r in .* require \[8, 64\]"),
    "alpha": ({"lora_alpha": "8"}, r"lora_alpha is '8', expected a number > 0"),
    "bias": ({"bias": "all"}, r"bias is 'all', supported is 'none'; merge"),
    "dora": ({"use_dora": True}, r"use_dora is True, supported is False"),
    "kasa": ({"kasa_config": {"beta": 1.0}}, r"kasa_config is {'beta': 1.0}, supported is null; merge"),
    "pissa": ({"init_lora_weights": "pissa"}, r"init_lora_weights is 'pissa', supported is True or False or"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\], supported is \[\]"),
    "ranks by layer": ({"rank_pattern": {"q_proj": 2}}, r"rank_pattern is"),
    "head": (
        {"target_modules": ["lm_head"]},
        r"target_modules names 'lm_head', the linear layers .* are q_proj, k_proj",
    ),
    "target without tensors": (
        {"target_modules": ["q_proj", "k_proj"]},
        r"target_modules names 'k_proj', of which adapter_model.safetensors has no tensors",
    ),
    "targets": ({"target_modules": 3}, r"target_modules is 3, expected a list"),
    "another model": (
        {"tensors": {A: torch.zeros(4, 65)}},
        r"q_proj.lora_A.weight has shape \[4, 65\], r in adapter_config.json and the model require \[4, 64\]",
    ),
    "a deeper model": (
        {"tensors": {ELSEWHERE: torch.zeros(4, 64)}},
        r"layers\.2.* changes none of the 14 linear layers",
    ),
    "half a pair": ({"tensors": {B: None}}, r"layers.0.self_attn.q_proj.lora_B.weight is missing"),
    "8 bits": (
        {"tensors": {A: torch.zeros(4, 64).to(torch.float8_e4m3fn)}},
        r"lora_A.weight is F8_E4M3, supp",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_an_adapter_that_does_not_fit_is_refused_with_the_field_and_the_numbers(name, base, tmp_path):
    options, error = UNFIT[name]
    folder = save_adapter(tmp_path / "adapter", base, **{"targets": ("q_proj",)} | options)
    with pytest.raises(CheckpointError, match=error) as caught:
        open_adapter(folder, base)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_an_adapter_of_a_model_for_images_too_is_one_of_its_text_part(prefix, base, tmp_path):
    of_text = save_adapter(tmp_path / "text", base, targets=ALL)
    tensors = load_file(of_text / WEIGHTS_FILE)
    renamed = {name.replace(".model.model.", f".model.{prefix}"): tensor for name, tensor in tensors.items()}
    assert not renamed.keys() & tensors.keys()
    whole = save_adapter(tmp_path / "whole", base, targets=ALL, tensors={**dict.fromkeys(tensors), **renamed})
    wanted, found = open_adapter(of_text, base).read(), open_adapter(whole, base).read()
    assert found.keys() == wanted.keys()
    for name, change in wanted.items():
        assert torch.equal(found[name].a, change.a)
        assert torch.equal(found[name].b, change.b)
    twice = save_adapter(tmp_path / "twice", base, targets=ALL, tensors={A: tensors[A].clone(), **renamed})
    with pytest.raises(CheckpointError, match=r"lora_[AB].weight is there under another name too$"):
        open_adapter(twice, base)
    name = "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"
    images = save_adapter(tmp_path / "images", base, targets=ALL, tensors={name: torch.zeros(4, 64)})
    with pytest.raises(CheckpointError, match=f"tensor {re.escape(name)} changes none of the 14 linear layers"):
        open_adapter(images, base)


def test_files_that_are_missing_truncated_or_hostile_get_one_line(base, tmp_path):
    def refused(folder):
        with pytest.raises(CheckpointError) as caught:
            open_adapter(folder, base)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "adapter_config.json: no such file" in refused(tmp_path)
    folder = save_adapter(tmp_path / "adapter", base)
    weights = folder / WEIGHTS_FILE
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    assert re.search(r"has \d+ bytes, its header requires \d+: truncated", refused(folder))
    weights.write_bytes((2**62).to_bytes(8, "little") + whole[8:])
    assert f"header of {2**62} bytes" in refused(folder)
    weights.write_bytes(whole[:8] + b"[" * (len(whole) - 8))
    assert "corrupt header" in refused(folder)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"pickled")
    assert "adapter_model.safetensors: no such file; only adapters in safetensors" in refused(folder)
    save_file({"a" * 5000: torch.zeros(1)}, weights)
    assert len(refused(folder)) < 1000
    (folder / CONFIG_FILE).write_text("[" * 1000)
    assert "adapter_config.json" in refused(folder)


def test_every_damaged_byte_of_a_header_is_refused_or_read_as_an_adapter(base, tmp_path):
    folder = save_adapter(tmp_path / "adapter", base)
    weights = folder / WEIGHTS_FILE
    whole = weights.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        place, value = (int(torch.randint(0, most, (1,), generator=generator)) for most in (8 + length, 256))
        weights.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
        with contextlib.suppress(CheckpointError):
            open_adapter(folder, base).read()


def test_values_that_are_not_finite_are_refused(base, tmp_path):
    folder = save_adapter(tmp_path / "adapter", base, tensors={A: torch.full((4, 64), math.nan)})
    with pytest.raises(CheckpointError, match=re.escape(f"tensor {A} holds NaN or infinity")):
        open_adapter(folder, base).read()


def test_the_digest_is_that_of_both_files(base, tmp_path):
    folders = [save_adapter(tmp_path / str(i), base, seed=seed) for i, seed in enumerate((1, 1, 2))]
    same, equal, other = (open_adapter(folder, base).sha256 for folder in folders)
    assert same == equal != other
    config = folders[1] / CONFIG_FILE
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 9}))
    assert open_adapter(folders[1], base).sha256 != same
