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
from engine.model.fp4 import Fp4Weights
from engine.model.transformers_probe import TransformersConfig
from kernels.families import cpu_ops, reference_ops
from kernels.interface import LinearWeights
from kernels.reference.ops import ReferenceOps
from tests.support.engine.families import save_as_part
from tests.support.engine.float_checkpoints import FloatLayout, quantise_floats
from tests.support.engine.int_checkpoints import Scheme, quantise_checkpoint
from tests.support.engine.weights import PeakBytes, save_block_scaled

SIZES = {"intermediate_size": 128, "moe_intermediate_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32}
LENGTHS = (1, 7, 40)
GREEDY = SamplingParams(seed=0, max_tokens=8, temperature=0.0, ignore_end_token=True, top_logprobs=1)


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
        ("GLM", Scheme("awq", group_size=16)),  # biases
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


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("layout", ["nvfp4", "mxfp4"])
def test_the_planned_memory_of_floats_of_4_bits_is_that_of_a_cpu(layout, quantization, make_family, transformers_on):
    """It keeps their codes; with int8 it quantises them again."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
    floats, _ = quantise(make_family("OLMoE", **sizes), layout)
    ops = cpu_ops(quantization=quantization)
    transformers_on(floats, ops)  # imports
    with PeakBytes(counts_meta=False) as memory:
        engine = transformers_on(floats, ops)
    form = {"is_quantized": quantization == "int8", "kept": (Fp4Weights,), "is_compact": True}
    wanted = engine.config.packed_bytes(torch.float32, torch.float32, **form)
    assert memory.bytes == pytest.approx(wanted, rel=0.1)


def test_a_broken_matrix_is_named(make_family, transformers_on):
    original = make_family("Command R", intermediate_size=128)
    quantised, _ = quantise(original, Scheme("awq"))
    tensors = load_file(quantised / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.scales"
    tensors[name] = tensors[name][:1]
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {name} has shape \[1, 128\], config.json requires \[2, 128\]"):
        transformers_on(quantised, reference_ops())


EXPERT = "model.layers.1.mlp.experts.{}.gate_proj"
QUERIES = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def experts_in_blocks(make_family, tmp_path) -> Path:
    """A folder with layers and experts in 8-bit floats with scales per block."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    return save_block_scaled(make_family("OLMoE", **sizes), tmp_path / "blocks", twin=tmp_path / "twin")


def without(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Removes a tensor."""
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without(EXPERT.format(2) + ".weight_scale_inv"),
            f"tensor {EXPERT.format(2)}.weight is F8_E4M3 without the scales that quantization_config requires",
        ),
        (
            without(EXPERT.format(0) + ".weight_scale_inv"),
            f"tensor {EXPERT.format(0)}.weight is F8_E4M3 without the scales that quantization_config requires",
        ),
        (
            without(QUERIES + ".weight_scale_inv"),
            f"tensor {QUERIES}.weight is F8_E4M3, supported for this tensor are F32, F16, BF16",
        ),
        (
            lambda tensors: tensors | {f"{QUERIES}.pre_quant_scale": torch.ones(128)},
            f"tensor {QUERIES}.pre_quant_scale is not part of this architecture",
        ),
        (
            lambda tensors: tensors | {f"{QUERIES}.bias": torch.ones(128)},
            f"tensor {QUERIES}.bias is not part of this architecture",
        ),
        (
            lambda tensors: (
                tensors
                | {
                    "mtp.weight": torch.empty(0, 0, dtype=torch.float8_e4m3fn),
                    "mtp.weight_scale_inv": torch.empty(0, 0),
                }
            ),
            r"quantization_config: mtp has a matrix of \[0, 0\] numbers",
        ),
    ],
)
def test_tensors_that_would_be_taken_for_others_are_named(change, message, experts_in_blocks, transformers_on):
    file = experts_in_blocks / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        transformers_on(experts_in_blocks, reference_ops())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "model.norm.weight",
            lambda norm: norm[:3].clone(),
            r"model.norm.weight has shape \[3\], config.json requires \[128\]",
        ),
        ("model.norm.weight", lambda norm: norm.fill_(float("nan")), "model.norm.weight holds NaN or infinity"),
        (
            "lm_head.weight",
            lambda rows: rows.index_fill_(0, torch.tensor([len(rows) - 1]), float("inf")),
            "the logits of a token are not finite: a tensor holds NaN or too large numbers",
        ),
    ],
)
def test_a_tensor_that_transformers_reads_is_named_too(name, change, message, experts_in_blocks, transformers_on):
    """But for single numbers, of which the model's results tell."""
    file = experts_in_blocks / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: change(tensors[name])}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        transformers_on(experts_in_blocks, reference_ops())


def test_a_tensor_in_two_files_is_refused(experts_in_blocks, transformers_on):
    """transformers reads the norm, so that no reader of ours would see the second one."""
    file, name = experts_in_blocks / "model.safetensors", "model.norm.weight"
    tensors = load_file(file)
    file.unlink()
    save_file(tensors, experts_in_blocks / "a.safetensors", {"format": "pt"})
    save_file({name: tensors[name] + 1}, experts_in_blocks / "b.safetensors", {"format": "pt"})
    index = {"weight_map": dict.fromkeys(tensors, "a.safetensors") | {name: "b.safetensors"}}
    (experts_in_blocks / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"b.safetensors: tensor {name} is in a.safetensors too, as {name}"):
        transformers_on(experts_in_blocks, reference_ops())


def test_two_tensors_with_one_name_in_the_decoder_are_refused(make_family, transformers_on, tmp_path):
    save_as_part(tmp_path / "whole", make_family("Qwen3.5"), "Qwen3_5ForConditionalGeneration", "qwen3_5")
    file = tmp_path / "whole" / "model.safetensors"
    tensors = load_file(file)
    own, other = "model.language_model.norm.weight", "language_model.model.norm.weight"
    save_file(tensors | {other: tensors[own] + 1}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"tensor {own} is in model.safetensors too, as {other}"):
        transformers_on(tmp_path / "whole", reference_ops())


def test_experts_are_read_as_they_are_stored_whatever_a_list_says(experts_in_blocks, check, tmp_path):
    """Layers are too."""
    config = json.loads((experts_in_blocks / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["experts", "self_attn"]
    (experts_in_blocks / "config.json").write_text(json.dumps(config))
    check(experts_in_blocks, tmp_path / "twin")


def test_floats_of_8_bits_of_ministral_3(make_family, check, tmp_path):
    """As it is published: one scale per tensor, by the name that transformers has for scales of blocks."""
    original = make_family("Ministral 3", intermediate_size=128)
    quantised, twin = quantise(original, "modelopt fp8")
    names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    tensors = {}
    for name, tensor in load_file(quantised / "model.safetensors").items():
        module, _, last = name.rpartition(".")
        if last not in ("k_scale", "v_scale"):
            tensors[f"{module}.{names.get(last, last)}"] = tensor
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    save_as_part(tmp_path / "whole", quantised, "Mistral3ForConditionalGeneration", "mistral3")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    del config["text_config"]["quantization_config"]
    config["quantization_config"] = {
        "activation_scheme": "static",
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": None,
    }
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    check(tmp_path / "whole", twin)


def test_floats_of_8_bits_of_experts_in_one_tensor(make_family, check, tmp_path):
    """As Granite 4 is published: scales of llm-compressor, [experts, rows, 1]."""
    original = make_family("Granite 4")
    stored, plain = {}, {}
    for name, tensor in load_file(original / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        if name.endswith(("_proj.weight", "put_linear.weight")):
            scales = tensor.abs().amax(dim=-1, keepdim=True) / 448
            stored[name] = (tensor / scales).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = scales
            plain[name] = stored[name].float() * scales
    assert {tensor.ndim for name, tensor in stored.items() if name.endswith("weight_scale")} == {2, 3}
    for folder, tensors in (("quantised", stored), ("twin", plain)):
        shutil.copytree(original, tmp_path / folder)
        save_file(tensors, tmp_path / folder / "model.safetensors", {"format": "pt"})
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel"},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    section = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*block_sparse_moe.router"],
    }
    config = json.loads((original / "config.json").read_text())
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    check(tmp_path / "quantised", tmp_path / "twin")


def test_scales_of_experts_do_not_widen_matrices_in_16_bits(make_family):
    quantised, _ = quantise(make_family("OLMoE", **SIZES), Scheme("awq", group_size=16))
    tensors = {
        name: tensor.half() if name.endswith(".scales") else tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in load_file(quantised / "model.safetensors").items()
    }
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    assert TransformersConfig.from_dir(quantised).exact_dtype() == "bfloat16"


def test_a_huge_number_of_experts_is_refused(make_family):
    """Before anything is allocated for each of them."""
    original = make_family("OLMoE")
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps(config | {"num_experts": 10**9}))
    with pytest.raises(CheckpointError, match="has 1000000000 experts, at most 65536 are supported"):
        TransformersConfig.from_dir(original)
