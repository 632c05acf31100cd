"""Checkpoints in integers of 4 and 8 bits: the layouts of GPTQ, AWQ and llm-compressor give their values."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError, ConfigError
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.int_weights import IntWeights
from engine.model.loader import check_checkpoint, cpu_checkpoint_dtype, load_model, weights_bytes
from engine.model.weights import WeightsReader
from engine.parallel.group import SingleRank
from kernels.families import cpu_ops, reference_ops
from tests.support.engine.int_checkpoints import FILE, Scheme, quantise_checkpoint
from tests.support.engine.weights import PeakBytes

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
SCHEMES = {
    "GPTQ": Scheme("gptq"),
    "GPTQ with 8 bits": Scheme("gptq", num_bits=8, symmetric=True),
    "GPTQ with one group": Scheme("gptq", group_size=-1, symmetric=True),
    "GPTQ in the order of activations": Scheme("gptq", group_size=16, shuffled=True),
    "GPTQ's second format": Scheme("gptq_v2", group_size=64),
    "AWQ": Scheme("awq"),
    "packed": Scheme("packed"),
    "packed, symmetric": Scheme("packed", symmetric=True),
    "packed, per channel": Scheme("packed", group_size=-1, symmetric=True),
    "packed with 8 bits": Scheme("packed", num_bits=8, group_size=-1, symmetric=True),
    "packed in the order of activations": Scheme("packed", symmetric=True, shuffled=True),
    "int8": Scheme("int8", num_bits=8, group_size=-1, symmetric=True),
    "int8 in groups": Scheme("int8", num_bits=8),
}
PROJECTION = "model.layers.1.self_attn.k_proj"


@pytest.fixture
def make_twins(make_checkpoint, tmp_path):
    """make_twins(scheme, architecture="llama") -> (checkpoint in integers, the same values in fp32)."""

    def make(scheme, architecture="llama", **overrides):
        original = make_checkpoint(architecture, dtype="float16", **{**SIZES, **overrides})
        folders = [shutil.copytree(original, tmp_path / name) for name in ("integers", "twin")]
        quantise_checkpoint(original, *folders, scheme)
        return folders

    return make


def load(path, ops):
    return load_model(path, ModelConfig.from_dir(path), ops)


def inputs():
    """Returns inputs of the linear layers of the last decoder layer, by name."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"qkv": 64, "o": 64, "gate_up": 64, "down": 128}
    return {name: torch.randn(5, size, generator=generator) for name, size in sizes.items()}


def last_linears(path, ops):
    """Returns these layers, by name."""
    layer = load(path, ops).layers[-1]
    mlp = layer.feed_forward
    return {"qkv": layer.mixer.qkv, "o": layer.mixer.o, "gate_up": mlp.gate_up, "down": mlp.down}


def outputs(path, ops):
    """Returns the results of these layers."""
    linears = last_linears(path, ops)
    return {name: linears[name](ops, x) for name, x in inputs().items()}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_integers_give_the_results_of_their_values(make_twins, scheme):
    integers, twin = make_twins(scheme)
    expected, got = outputs(twin, reference_ops()), outputs(integers, reference_ops())
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


def test_older_files_name_the_settings_differently(make_twins):
    integers, _ = make_twins(SCHEMES["packed"])
    wanted = ModelConfig.from_dir(integers)
    config = json.loads((integers / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (integers / "config.json").write_text(json.dumps(config))
    assert ModelConfig.from_dir(integers) == wanted


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_a_cpu_multiplies_integers_as_they_are(make_twins, scheme):
    """With the same bits as their values in fp32, but where sums have another order or int8 is scaled after them."""
    integers, twin = make_twins(scheme)
    expected, got = outputs(twin, cpu_ops()), outputs(integers, cpu_ops())
    linears = last_linears(twin, reference_ops())
    is_other_sum = scheme.shuffled or (scheme.num_bits == 8 and scheme.group_size == -1)
    for name, x in inputs().items():
        if not is_other_sum:
            assert torch.equal(got[name], expected[name]), name
        weight = linears[name]._packed[0]
        exact, magnitudes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
        # rounding of a sum of K terms, as in tests/kernels/cpu/test_linear.py, and of scale and weight
        assert ((got[name] - exact).abs() <= (4 * x.shape[1] ** 0.5 + 2) * 2**-24 * magnitudes).all(), name


@pytest.mark.parametrize(
    ("layout", "architecture"),
    [*((layout, "qwen3_moe") for layout in ("gptq", "awq", "packed", "int8")), ("awq", "qwen2_moe")],
)
def test_experts_in_integers_give_the_results_of_their_values(make_twins, layout, architecture):
    """Also one that all tokens share."""
    sizes = {"moe_intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 2}
    if architecture == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = 64
    integers, twin = make_twins(Scheme(layout, num_bits=8 if layout == "int8" else 4), architecture, **sizes)
    x = inputs()["qkv"]
    for ops in (reference_ops(), cpu_ops()):
        expected, got = (load(path, ops).layers[-1].feed_forward(x, None) for path in (twin, integers))
        assert torch.equal(got, expected), ops.name
    config, plain = ModelConfig.from_dir(integers), ModelConfig.from_dir(twin)
    assert weights_bytes(config, torch.float16, kept=(IntWeights,)) < 0.7 * weights_bytes(plain, torch.float16)


@pytest.mark.parametrize(
    ("architecture", "scheme", "targets"),
    [
        ("mistral with images", "packed", r"re:language_model\.model\.layers\..*_proj"),
        ("gemma3 with images", "int8", r"re:.*language_model.*"),
        ("qwen3 with images", "packed", "Linear"),
        ("qwen2.5 with images", "awq", None),
    ],
)
def test_the_text_part_of_a_checkpoint_with_images_may_be_in_integers(make_twins, architecture, scheme, targets):
    """transformers writes names of its own time, and their lists with them."""
    integers, twin = make_twins(Scheme(scheme, num_bits=8 if scheme == "int8" else 4, group_size=16), architecture)
    config = json.loads((integers / "config.json").read_text())
    section = config["quantization_config"]
    if targets is None:
        section["modules_to_not_convert"] = ["visual"]
    else:
        section["config_groups"]["group_0"]["targets"] = [targets]
        section["ignore"] = ["lm_head", "re:.*vision_tower.*", "re:model.visual.*", "re:multi_modal_projector.*"]
    (integers / "config.json").write_text(json.dumps(config))
    expected, got = outputs(twin, reference_ops()), outputs(integers, reference_ops())
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


@pytest.mark.parametrize(
    ("layout", "architecture"),
    [("packed", "qwen3_5"), ("awq", "qwen3_5"), ("gptq", "qwen3_5"), ("gptq", "qwen3_next"), ("packed", "qwen3_next")],
)
def test_projections_of_a_delta_rule_may_be_in_integers_beside_gates_that_are_not(make_twins, layout, architecture):
    """Also if rows of several are exchanged in memory. GPTQModel does not list them, AutoAWQ may."""
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64} if "next" in architecture else {}
    integers, twin = make_twins(Scheme(layout), architecture, **sizes)
    config = json.loads((integers / "config.json").read_text())
    section = config["quantization_config"]
    if layout == "packed":
        section["ignore"] += ["re:.*in_proj_(a|b|ba)"]
    elif layout == "awq":
        section["modules_to_not_convert"] = ["in_proj_b"]
    (integers / "config.json").write_text(json.dumps(config))
    ops = reference_ops()
    found, expected = (load(path, ops).layers[0].mixer.linears for path in (integers, twin))
    x = inputs()["qkv"]
    assert [linear.is_quantized for linear in found] == [True, False, True]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours(ops, x), theirs(ops, x)), ours.names


def test_experts_of_which_only_some_are_quantised_are_refused(make_twins):
    integers, _ = make_twins(Scheme("packed"), "qwen3_moe", moe_intermediate_size=64)
    config = json.loads((integers / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "re:.*experts.3.down_proj"]
    (integers / "config.json").write_text(json.dumps(config))
    message = "all experts of model.layers.0.mlp must be quantised, or none"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        make_decoder(ModelConfig.from_dir(integers), "meta", reference_ops())


def rank(index):
    """Makes one of two ranks, for loading only."""
    return SingleRank(index, 2)


@pytest.mark.parametrize("layout", ["gptq", "awq", "packed", "int8"])
def test_ranks_hold_shards_of_the_integers(make_twins, layout):
    """Each rank reads the rows or columns of its heads, with their scales and zero points."""
    scheme = Scheme(layout, num_bits=8 if layout == "int8" else 4)
    integers, twin = make_twins(scheme, num_attention_heads=4, num_key_value_heads=2)
    config = ModelConfig.from_dir(integers)
    for index in range(2):
        loaded = [
            load_model(path, ModelConfig.from_dir(path), reference_ops(), group=rank(index))
            for path in (integers, twin)
        ]
        for layers in zip(*(model.layers for model in loaded), strict=True):
            for linears in zip(*(layer.linears for layer in layers), strict=True):
                weights = [linear._packed[0] for linear in linears]
                assert torch.equal(*weights)
    assert config.quantized is not None


def test_groups_that_ranks_would_divide_are_refused(make_twins):
    integers, _ = make_twins(Scheme("gptq", group_size=64), num_attention_heads=4, num_key_value_heads=2)
    message = (
        "--tensor-parallel-size gives each rank 32 inputs of model.layers.0.self_attn.o_proj, not a multiple of 64"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_checkpoint(integers, ModelConfig.from_dir(integers), torch.float32, group=rank(0))


def test_groups_in_another_order_are_refused_for_ranks(make_twins):
    scheme = Scheme("gptq", group_size=16, shuffled=True)
    integers, _ = make_twins(scheme, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ConfigError, match=re.escape("o_proj, whose groups of inputs are not contiguous (desc_act)")):
        load_model(integers, ModelConfig.from_dir(integers), reference_ops(), group=rank(0))


def targets(*names, scheme="packed"):
    """Returns fields of a `quantization_config` by which only these modules are quantised."""
    group = Scheme(scheme, num_bits=8 if scheme == "int8" else 4).config["config_groups"]["group_0"]
    return {"config_groups": {"group_0": group | {"targets": list(names)}}, "ignore": []}


@pytest.mark.parametrize(
    ("scheme", "fields"),
    [
        (Scheme("packed"), {"ignore": ["lm_head", "re:.*down_proj"]}),
        (Scheme("packed"), targets("re:.*self_attn.*", "re:.*(gate|up)_proj$")),
        (Scheme("int8", num_bits=8), targets("re:.*self_attn.*", "mlp.gate_proj", "mlp.up_proj", scheme="int8")),
        (Scheme("gptq"), {"dynamic": {"-:.*\\.down_proj": {}, "-:.*\\.router": None}}),
        (Scheme("gptq"), {"dynamic": {"lm_head": {}, "+:model\\.embed_tokens": None, "-:.*\\.down_proj": {}}}),
        (Scheme("awq"), {"modules_to_not_convert": ["lm_head", "mlp.down_proj"]}),
        (Scheme("awq"), {"modules_to_not_convert": ["model.layers.*.mlp.down_proj", "lm_head"]}),
        (Scheme("awq"), {"modules_to_not_convert": [f"model.layers.{layer}.mlp.down_proj." for layer in range(3)]}),
    ],
    ids=str,
)
def test_layers_that_are_not_quantised_stay_as_they_are(make_twins, scheme, fields):
    integers, twin = make_twins(scheme)
    plain, stored = load_file(twin / FILE), load_file(integers / FILE)
    names = [name for name in stored if ".down_proj." in name]
    for name in names:
        del stored[name]
    stored |= {name: tensor.half() for name, tensor in plain.items() if ".down_proj." in name}
    save_file(stored, integers / FILE)
    config = json.loads((integers / "config.json").read_text())
    config["quantization_config"] |= fields
    (integers / "config.json").write_text(json.dumps(config))
    save_file(plain | {name: tensor.half() for name, tensor in plain.items() if ".down_proj." in name}, twin / FILE)
    expected, got = outputs(twin, reference_ops()), outputs(integers, reference_ops())
    assert torch.equal(got["down"], expected["down"])
    assert torch.equal(got["qkv"], expected["qkv"])


@pytest.mark.parametrize("actorder", ["dynamic", True])
def test_an_order_of_inputs_has_several_names(make_twins, actorder):
    integers, twin = make_twins(SCHEMES["packed in the order of activations"])
    config = json.loads((integers / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = actorder
    (integers / "config.json").write_text(json.dumps(config))
    expected, got = outputs(twin, reference_ops()), outputs(integers, reference_ops())
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("scheme", "bits"), [(Scheme("gptq"), 4), (Scheme("packed", num_bits=8), 8)])
def test_memory_is_that_of_the_integers_and_their_factors(make_twins, scheme, bits):
    """4 bits of a weight, and a scale and an offset in fp32 for 32 of them."""
    integers, twin = make_twins(scheme)
    config, plain = ModelConfig.from_dir(integers), ModelConfig.from_dir(twin)
    num_weights = sum(tensor.numel() for name, tensor in load_file(twin / FILE).items() if "_proj." in name)
    expected = weights_bytes(plain, torch.float16) - 2 * num_weights + num_weights * bits // 8 + 8 * num_weights // 32
    assert weights_bytes(config, torch.float16, kept=(IntWeights,)) == expected
    assert weights_bytes(config, torch.float16) == weights_bytes(plain, torch.float16)
    assert cpu_checkpoint_dtype(integers, config) == "float16"


def test_loading_needs_little_memory_besides_the_result(make_twins):
    """Integers of one matrix at a time are unpacked, to a byte each: words, two steps of unpacking, rows and panels."""
    integers, _ = make_twins(Scheme("packed"), num_hidden_layers=8)
    config = ModelConfig.from_dir(integers)
    model = make_decoder(config, "cpu", cpu_ops())
    reader = WeightsReader(integers, model.checkpoint_parts())
    with PeakBytes() as peak:
        model.load(reader.fill)
    num_weights = 2 * 128 * 64  # of the largest matrix, gate and up projection
    assert peak.peak_bytes - peak.bytes < 5 * num_weights


def make_decoder(config, device, ops):
    return Decoder(config, ops, max_positions=1, dtype=torch.float16, device=torch.device(device))


def gptq(**fields):
    return Scheme("gptq").config | fields


def compressed(weights=None, inputs=None, **fields):
    config = Scheme("packed").config
    group = config["config_groups"]["group_0"]
    group["weights"] |= weights or {}
    group["input_activations"] = inputs
    return config | fields


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (gptq(bits=3), "bits is 3, supported is 4 or 8"),
        (gptq(group_size=24), "group_size is 24, expected -1 or a multiple of 16"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format is 'marlin', supported are gptq, gptq_v2"),
        (gptq(lm_head=True), "lm_head is true: a quantised output head is not supported"),
        (gptq(dynamic={"-:.*gate": {}, "+:.*up_proj": {"bits": 8}}), "dynamic has other settings for '+:.*up_proj'"),
        (gptq(dynamic={"-:(a+)+b": {}}), "dynamic has the pattern '(a+)+b', supported are 4 repeats and no repeated"),
        (gptq(dynamic=["-:.*"]), "dynamic is ['-:.*'], expected an object of rules"),
        (
            Scheme("awq").config | {"modules_to_not_convert": ["*" * 4]},
            "modules_to_not_convert has the name '****', supported are 3 of '*'",
        ),
        (gptq(modules_in_block_to_quantize="q_proj"), "modules_in_block_to_quantize is 'q_proj', expected a list"),
        (Scheme("awq").config | {"version": "gemv"}, "version is 'gemv', supported is 'gemm'"),
        (Scheme("awq").config | {"bits": 8}, "bits is 8, supported is 4"),
        (compressed({"num_bits": 2}), "weights: num_bits is 2, supported is 4 or 8"),
        (compressed({"strategy": "tensor"}), "strategy is 'tensor', supported with integers are group, channel"),
        (compressed(format="marlin-24"), "format is 'marlin-24', supported with integers are pack-quantized"),
        (
            compressed(inputs={"num_bits": 8, "type": "float"}),
            "input_activations are 'float' with num_bits 8, strategy 'token' and symmetric True, supported beside",
        ),
        (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is not supported with weights of integers"),
    ],
)
def test_unsupported_settings_are_refused_by_name(make_checkpoint, tmp_path, config, message):
    fields = json.loads((make_checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        ModelConfig.from_dir(tmp_path)


def changed(stored, name, change):
    return stored | {name: change(stored[name])}


@pytest.mark.parametrize(
    ("scheme", "tensor", "change", "message"),
    [
        ("GPTQ", "qweight", torch.Tensor.float, "is F32, quantization_config requires I32"),
        ("GPTQ", "qweight", lambda words: words[1:].clone(), "has shape [7, 32], config.json requires [8, 32]"),
        ("GPTQ", "scales", lambda scales: scales * torch.nan, "holds NaN or infinity"),
        ("GPTQ", "g_idx", lambda groups: groups * 0, "have different groups of inputs (g_idx)"),
        ("GPTQ", "bias", lambda bias: bias + 1, "k_proj.bias is not part of this architecture"),
        ("int8", "weight", torch.Tensor.half, "is F16, quantization_config requires I8"),
    ],
)
def test_wrong_tensors_are_reported_with_their_names(make_twins, scheme, tensor, change, message):
    integers, _ = make_twins(SCHEMES[scheme], num_attention_heads=4, num_key_value_heads=2)
    stored = load_file(integers / FILE)
    save_file(changed(stored, f"{PROJECTION}.{tensor}", change), integers / FILE)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        load_model(integers, ModelConfig.from_dir(integers), reference_ops())
    assert PROJECTION in str(caught.value)


@pytest.mark.parametrize("groups", [[0] * 64, [-1] * 32 + [1] * 32, [0] * 32 + [7] * 32])
def test_groups_of_other_sizes_are_refused(make_twins, groups):
    integers, _ = make_twins(SCHEMES["GPTQ"])
    stored = load_file(integers / FILE)
    stored[f"{PROJECTION.replace('k_proj', 'o_proj')}.g_idx"] = torch.tensor(groups, dtype=torch.int32)
    save_file(stored, integers / FILE)
    with pytest.raises(CheckpointError, match=re.escape("g_idx has groups that are not of 32 inputs each")):
        load_model(integers, ModelConfig.from_dir(integers), reference_ops())


def test_random_weights_are_refused(make_twins):
    integers, _ = make_twins(SCHEMES["AWQ"])
    with pytest.raises(ConfigError, match="--load-format dummy is not supported"):
        load_model(integers, ModelConfig.from_dir(integers), reference_ops(), load_format="dummy")


def test_only_the_modules_that_gptq_names_are_quantised(make_twins):
    integers, _ = make_twins(SCHEMES["GPTQ"])
    config = json.loads((integers / "config.json").read_text())
    config["quantization_config"]["modules_in_block_to_quantize"] = [
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]
    (integers / "config.json").write_text(json.dumps(config))
    model = make_decoder(ModelConfig.from_dir(integers), "meta", reference_ops())
    parts = model.checkpoint_parts()
    assert "model.layers.0.mlp.up_proj.qweight" in parts
    assert "model.layers.0.self_attn.q_proj.weight" in parts
