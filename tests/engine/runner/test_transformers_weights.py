"""Models that transformers computes: their linear layers come from the files, in any format that native ones have.

The truth is transformers with the values that the integers and 8-bit floats of a checkpoint stand for.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.request import SamplingParams
from engine.errors import CheckpointError
from engine.model.transformers_probe import TransformersConfig
from kernels.families import cpu_ops, reference_ops
from kernels.interface import LinearWeights
from kernels.reference.ops import ReferenceOps
from tests.support.engine.families import (
    STATEFUL_FAMILIES,
    TRANSFORMERS_FAMILIES,
    family_config,
    save_as_part,
    save_family,
)
from tests.support.engine.float_checkpoints import FloatLayout, quantise_floats
from tests.support.engine.int_checkpoints import Scheme, quantise_checkpoint
from tests.support.engine.weights import PeakBytes, save_block_scaled

FAMILIES = {**TRANSFORMERS_FAMILIES, **STATEFUL_FAMILIES}
SIZES = {"intermediate_size": 128, "moe_intermediate_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32}
LENGTHS = (1, 7, 40)
GREEDY = SamplingParams(seed=0, max_tokens=8, temperature=0.0, ignore_end_token=True, top_logprobs=1)


@pytest.fixture
def make_family(tmp_path: Path) -> Callable[..., Path]:
    """make_family(name, **fields) -> folder of a checkpoint in float32."""

    def make(name: str, **fields: Any) -> Path:
        prefix, own = FAMILIES[name]
        save_family(tmp_path / "original", family_config(prefix, **{**own, **fields}))
        return tmp_path / "original"

    return make


@pytest.fixture
def check(transformers_on, reference_of, prompt) -> Callable[[Path, Path], None]:
    """check(folder, twin): chunks of requests get the tokens that transformers chooses with the twin's weights."""

    @torch.inference_mode()
    def compare(folder: Path, twin: Path) -> None:
        prompts = [prompt([(7 * i + length) % 300 + 3 for i in range(length)], GREEDY) for length in LENGTHS]
        run = transformers_on(folder, cpu_ops()).serve(
            prompts, num_blocks=40, max_num_seqs=3, max_num_batched_tokens=16
        )
        model = reference_of(twin).model
        for request, answer in zip(prompts, run.answers, strict=True):
            ids = torch.tensor([[*request.prompt_ids, *answer.token_ids]])
            logits = model(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].float()
            assert logits.argmax(dim=-1).tolist() == answer.token_ids
            wanted = logits.log_softmax(dim=-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
            chosen = torch.tensor([row.chosen for row in answer.logprobs], dtype=torch.float32)
            torch.testing.assert_close(chosen, wanted, atol=1e-4, rtol=0)

    return compare


def quantise(original: Path, scheme: Scheme | FloatLayout) -> tuple[Path, Path]:
    """Returns folders with the numbers of a format, and with their values."""
    quantised, twin = original.with_name("quantised"), original.with_name("twin")
    shutil.copytree(original, quantised)
    shutil.copytree(original, twin)
    if isinstance(scheme, Scheme):
        quantise_checkpoint(original, quantised, twin, scheme)
    else:
        quantise_floats(original, quantised, twin, scheme)
    tensors = load_file(twin / "model.safetensors")
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    return quantised, twin


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("Command R", Scheme("awq")),
        ("Qwen3.5", Scheme("gptq", shuffled=True)),  # layers with state
        ("OLMoE", Scheme("packed", group_size=16)),  # experts
        ("Qwen3.5-MoE", Scheme("gptq", group_size=16)),
        ("Granite 4", Scheme("awq", group_size=16)),  # experts in one tensor, which is not quantised
        ("LFM2", Scheme("int8", 8, symmetric=True)),
        ("Gemma 4", Scheme("packed", 8, symmetric=True, group_size=16)),
        ("DeepSeek-V2", Scheme("gptq_v2", 8, group_size=16)),
    ],
)
def test_integers(name, scheme, make_family, check):
    check(*quantise(make_family(name, **SIZES), scheme))


@pytest.mark.parametrize(
    ("name", "layout"),
    [("Command R", "modelopt fp8"), ("OLMoE", "nvfp4"), ("Qwen3.5", "modelopt"), ("Hunyuan", "mxfp4")],
)
def test_floats_of_4_and_8_bits(name, layout, make_family, check):
    check(*quantise(make_family(name, **SIZES), layout))


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Command R"])
def test_floats_of_8_bits_in_blocks_of_which_the_last_are_partial(name, make_family, check, tmp_path):
    original = make_family(name, hidden_size=192, intermediate_size=320)
    check(save_block_scaled(original, tmp_path / "blocks", twin=tmp_path / "twin"), tmp_path / "twin")


def test_the_text_part_of_a_checkpoint_names_its_modules_as_the_files_do(make_family, check, tmp_path):
    original = make_family("Qwen3.5", intermediate_size=128)
    quantised, twin = quantise(original, Scheme("packed", group_size=16))
    save_as_part(tmp_path / "whole", quantised, "Qwen3_5ForConditionalGeneration", "qwen3_5")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    section = config["text_config"].pop("quantization_config")
    section["ignore"] = ["re:model.visual.*", "lm_head"]
    section["config_groups"]["group_0"]["targets"] = [r"re:model\.language_model\.layers\..*_proj"]
    (tmp_path / "whole" / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    check(tmp_path / "whole", twin)


class CountingOps(ReferenceOps):
    """Notes in which dtype or format matrices are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []
        self.num_grouped = 0

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, for_logits: bool = False
    ) -> LinearWeights:
        self.dtypes.append(weight.dtype)
        return super().pack_linear(weight, bias, for_logits=for_logits)

    def pack_grouped(self, *args: Any) -> LinearWeights:
        self.num_grouped += 1
        return super().pack_grouped(*args)


def test_matrices_are_packed_as_they_are_stored(make_family, transformers_on):
    """And none of them is ever in memory in float32: every linear layer but the head is read from the file."""
    original = make_family("Command R", intermediate_size=128)
    quantised, _ = quantise(original, Scheme("awq"))
    ops = CountingOps()
    transformers_on(quantised, ops)
    assert ops.num_grouped == 3 * 7
    assert len(ops.dtypes) == 1, "the output head"


def test_experts_are_packed_as_they_are_stored(make_family, transformers_on):
    quantised, _ = quantise(make_family("OLMoE", **SIZES), Scheme("packed", group_size=16))
    ops = CountingOps()
    engine = transformers_on(quantised, ops)
    assert len(engine.config.experts) == 3
    assert ops.num_grouped == 3 * (4 + 2 * 4), "projections of attention, and both layers of 4 experts"
    assert len(ops.dtypes) == 1, "the output head"


@pytest.mark.parametrize("name", ["OLMoE", "Granite MoE", "Mixtral"])
def test_experts_in_16_bits_stay_in_16_bits(name, make_family, transformers_on):
    """In tensors of their own, in one for all, and under older names."""
    original = make_family(name)
    tensors = load_file(original / "model.safetensors")
    save_file(
        {name: part.bfloat16() for name, part in tensors.items()}, original / "model.safetensors", {"format": "pt"}
    )
    ops = CountingOps()
    engine = transformers_on(original, ops, weights_dtype=torch.bfloat16)
    assert ops.dtypes == [torch.bfloat16] * (3 * (4 + 2 * 4) + 1)
    for module in engine.config.experts:
        assert engine.model._model.get_submodule(module).gate_up_proj.is_meta


def test_16_bits_stay_16_bits(make_family, transformers_on):
    original = make_family("Command R")
    tensors = load_file(original / "model.safetensors")
    save_file(
        {name: part.bfloat16() for name, part in tensors.items()}, original / "model.safetensors", {"format": "pt"}
    )
    assert TransformersConfig.from_dir(original).exact_dtype() == "bfloat16"
    ops = CountingOps()
    transformers_on(original, ops, weights_dtype=torch.bfloat16)
    assert ops.dtypes == [torch.bfloat16] * (3 * 7 + 1)


@pytest.mark.parametrize("name", ["Command R", "OLMoE", "Granite MoE"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_load_takes_little_more_memory_than_what_stays(name, dtype, make_family, transformers_on):
    sizes = {"hidden_size": 128, "intermediate_size": 1024 if name == "Command R" else 256, "num_hidden_layers": 12}
    original = make_family(name, **sizes)
    tensors = load_file(original / "model.safetensors")
    save_file(
        {name: part.to(dtype) for name, part in tensors.items()}, original / "model.safetensors", {"format": "pt"}
    )
    transformers_on(original, reference_ops(), weights_dtype=dtype)  # imports
    with PeakBytes(counts_meta=False) as memory:
        engine = transformers_on(original, reference_ops(), weights_dtype=dtype)
    assert memory.peak_bytes < 1.15 * memory.bytes
    wanted = engine.config.packed_bytes(dtype, torch.float32, is_quantized=False, kept=())
    assert memory.bytes == pytest.approx(wanted, rel=0.05)


def test_a_broken_matrix_is_named(make_family, transformers_on):
    original = make_family("Command R", intermediate_size=128)
    quantised, _ = quantise(original, Scheme("awq"))
    tensors = load_file(quantised / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.scales"
    tensors[name] = tensors[name][:1]
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {name} has shape \[1, 128\], config.json requires \[2, 128\]"):
        transformers_on(quantised, reference_ops())
