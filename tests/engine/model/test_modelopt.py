"""Settings of ModelOpt: in `quantization_config` or in a file beside it, and the checkpoints in fp8 that it writes."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.model.checkpoint import open_checkpoint
from engine.model.config import ModelConfig
from engine.model.fp4 import Fp4Weights
from engine.model.fp8 import Fp8Weights
from engine.model.implementation import choose_implementation
from engine.model.loader import load_model
from kernels.families import cpu_ops, reference_ops
from kernels.fp8_weights import FP8_DTYPE
from tests.support.engine.float_checkpoints import FILE, quantise_floats

PROJECTION = "model.layers.1.self_attn.k_proj"
SETTINGS = "hf_quant_config.json"


def of_file(algorithm, **fields):
    """Returns the contents of a file with settings."""
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"], **fields}
    return {"producer": {"name": "modelopt", "version": "0.19.0"}, "quantization": quantization}


@pytest.fixture
def make_twins(make_checkpoint, tmp_path):
    """make_twins(layout, file=None) -> (quantised checkpoint, the same values in fp32)

    file: settings that are in a file of their own, and not in config.json.
    """

    def make(layout="modelopt fp8", file=None, architecture="llama", **overrides):
        original = make_checkpoint(architecture, dtype="bfloat16", **overrides)
        floats, twin = (shutil.copytree(original, tmp_path / name) for name in ("floats", "twin"))
        quantise_floats(original, floats, twin, layout)
        if file is not None:
            shutil.copy(original / "config.json", floats / "config.json")
            (floats / SETTINGS).write_text(json.dumps(file))
        return floats, twin

    return make


def logits(path, ops):
    """Returns what the output head and the linear layers of the last layer compute."""
    model = load_model(path, ModelConfig.from_dir(path), ops)
    generator = torch.Generator().manual_seed(0)
    results = [model.compute_logits(torch.randn(5, model.config.hidden_size, generator=generator))]
    inputs = [torch.randn(5, linear._in_features.total, generator=generator) for linear in model.layers[-1].linears]
    return results + [linear(ops, x) for linear, x in zip(model.layers[-1].linears, inputs, strict=True)]


@pytest.fixture
def path(make_checkpoint, tmp_path):
    """Returns a checkpoint that is not quantised."""
    return shutil.copytree(make_checkpoint("llama"), tmp_path / "plain")


def assert_same(results, expected):
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("file", [None, of_file("FP8"), of_file("fp8")])
@pytest.mark.parametrize("make_ops", [reference_ops, cpu_ops])
def test_fp8_gives_the_bits_of_its_values(make_twins, file, make_ops):
    floats, twin = make_twins(file=file)
    assert isinstance(ModelConfig.from_dir(floats).quantized, Fp8Weights)
    assert_same(logits(floats, make_ops()), logits(twin, make_ops()))


def test_nvfp4_of_a_file_gives_the_bits_of_its_values(make_twins):
    floats, twin = make_twins("modelopt", of_file("NVFP4", group_size=16))
    assert isinstance(ModelConfig.from_dir(floats).quantized, Fp4Weights)
    assert_same(logits(floats, cpu_ops()), logits(twin, cpu_ops()))


def test_scales_per_channel_give_the_bits_of_their_values(make_twins):
    floats, twin = make_twins()
    config = json.loads((floats / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "FP8_PER_CHANNEL_PER_TOKEN"
    (floats / "config.json").write_text(json.dumps(config))
    stored, plain = load_file(floats / FILE), load_file(twin / FILE)
    scales = torch.linspace(0.01, 0.02, 32)
    stored[f"{PROJECTION}.weight_scale"] = scales
    plain[f"{PROJECTION}.weight"] = stored[f"{PROJECTION}.weight"].float() * scales[:, None]
    save_file(stored, floats / FILE)
    save_file(plain, twin / FILE)
    assert_same(logits(floats, cpu_ops()), logits(twin, cpu_ops()))


def test_scales_that_are_not_used_are_logged(make_twins, caplog):
    floats, _ = make_twins()
    with caplog.at_level("INFO"):
        logits(floats, reference_ops())
    lines = [record.getMessage() for record in caplog.records if "are not used" in record.getMessage()]
    assert [line.split(" in ")[0].split(" of the")[0] for line in lines] == [
        "14 scales of activations (input_scale)",
        "4 key and value scales",
    ]


def test_modules_that_a_file_excludes_stay_as_they_are(make_twins):
    file = of_file("FP8", exclude_modules=["lm_head", "model.layers.0.self_attn*", "*.1.mlp.down_proj"])
    floats, twin = make_twins(file=file)
    excluded = re.compile(r"model\.layers\.(0\.self_attn|1\.mlp\.down_proj)\.")
    stored = {name: tensor for name, tensor in load_file(floats / FILE).items() if not excluded.match(name)}
    plain = {name: tensor for name, tensor in load_file(twin / FILE).items() if excluded.match(name)}
    save_file(stored | plain, floats / FILE)
    assert_same(logits(floats, cpu_ops()), logits(twin, cpu_ops()))


def test_config_json_takes_precedence_over_the_file(make_twins):
    floats, twin = make_twins()
    (floats / SETTINGS).write_text(json.dumps(of_file("W4A16_AWQ")))
    assert_same(logits(floats, cpu_ops()), logits(twin, cpu_ops()))


@pytest.mark.parametrize("file", [{"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, {}])
def test_a_file_may_say_that_weights_are_not_quantised(path, file):
    (path / SETTINGS).write_text(json.dumps(file))
    assert ModelConfig.from_dir(path).quantized is None


def test_models_whose_settings_differ_are_different(make_twins):
    floats, _ = make_twins(file=of_file("FP8"))
    descriptions = {open_checkpoint(floats).description()}
    (floats / SETTINGS).write_text(json.dumps(of_file("FP8", exclude_modules=[])))
    descriptions.add(open_checkpoint(floats).description())
    (floats / SETTINGS).unlink()
    descriptions.add(open_checkpoint(floats).description())
    assert len(descriptions) == 3


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            of_file("FP8_PB_WO"),
            "quantization: quant_algo is 'FP8_PB_WO', supported of modelopt are FP8, FP8_PER_CHANNEL",
        ),
        (of_file("MIXED_PRECISION"), "quant_algo is 'MIXED_PRECISION', supported of modelopt are FP8, FP8_PER_CHANNEL"),
        (of_file(["FP8"]), "quant_algo is ['FP8'], supported of modelopt are"),
        (of_file("NVFP4", group_size=32), "group_size is 32, supported with 4-bit floats is 16"),
        (of_file("FP8", exclude_modules="lm_head"), "exclude_modules is 'lm_head', expected a list of module names"),
        ({"quantization": []}, "quantization is [], expected an object"),
        ([], "holds a list, expected an object"),
    ],
)
def test_settings_that_are_not_supported_are_refused_with_the_file(path, file, message):
    (path / SETTINGS).write_text(json.dumps(file))
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        ModelConfig.from_dir(path)
    assert str(path / SETTINGS) in str(caught.value)


def test_nested_settings_in_config_json_are_read(path):
    config = json.loads((path / "config.json").read_text())
    section = {"quant_method": "modelopt_fp4", **of_file("NVFP4")}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    quantized = ModelConfig.from_dir(path).quantized
    assert isinstance(quantized, Fp4Weights)
    assert quantized.holds("model.layers.0.mlp.up_proj")
    assert not quantized.holds("lm_head")


def test_models_of_transformers_have_the_settings_of_the_file_too(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["CohereForCausalLM"]}))
    (path / SETTINGS).write_text(json.dumps(of_file("FP8")))
    assert choose_implementation(path, "auto") == "transformers"
    (path / SETTINGS).write_text(json.dumps(of_file("MIXED_PRECISION")))
    with pytest.raises(CheckpointError, match="quant_algo is 'MIXED_PRECISION', supported of modelopt are"):
        choose_implementation(path, "auto")


def test_scales_of_keys_must_belong_to_keys(make_twins):
    """A scale of another module is no scale of the cache."""
    floats, _ = make_twins()
    stored = load_file(floats / FILE)
    save_file(stored | {"model.layers.0.self_attn.q_proj.k_scale": torch.tensor(1.0)}, floats / FILE)
    with pytest.raises(CheckpointError, match=re.escape("q_proj.k_scale is not part of this architecture")):
        load_model(floats, ModelConfig.from_dir(floats), reference_ops())


def test_weights_are_checked(make_twins):
    floats, _ = make_twins()
    stored = load_file(floats / FILE)
    assert stored[f"{PROJECTION}.weight"].dtype is FP8_DTYPE
    save_file(stored | {f"{PROJECTION}.weight_scale": torch.tensor(torch.nan)}, floats / FILE)
    with pytest.raises(CheckpointError, match=re.escape(f"tensor {PROJECTION}.weight_scale holds NaN or infinity")):
        load_model(floats, ModelConfig.from_dir(floats), reference_ops())
