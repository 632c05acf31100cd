"""--lora: adapters that can be served, and the settings with which they cannot."""

import re
import shutil

import pytest

from engine.config import EngineConfig, parse_config
from engine.errors import CheckpointError, ConfigError
from engine.model.config import ModelConfig
from engine.model.transformers_probe import TransformersConfig
from engine.startup.adapters import adapters_bytes, open_adapters
from engine.startup.build import build_engine
from engine.startup.progress import StartupProgress
from tests.support.engine.adapters import save_adapter
from tests.support.engine.families import TRANSFORMERS_FAMILIES, family_config, save_family


@pytest.fixture(scope="module")
def base(make_checkpoint):
    return make_checkpoint("llama")


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return save_adapter(tmp_path_factory.mktemp("lora") / "adapter", base)


def opened(base, *settings, **options):
    config = EngineConfig(model=str(base), served_model_name=("base", "alias"), lora=settings, **options)
    return open_adapters(config, ModelConfig.from_dir(base))


def test_adapters_are_opened_in_the_order_of_the_flags(base, adapter):
    adapters = opened(base, f"b={adapter}", f"org/a={adapter}")
    assert [one.name for one in adapters] == ["b", "org/a"]
    assert adapters[0].sha256 == adapters[1].sha256
    assert opened(base) == ()


def test_settings_without_adapters_are_refused(base, adapter):
    setting = f"a={adapter}"
    with pytest.raises(ConfigError, match="--lora is not supported with --tensor-parallel-size 2: use 1"):
        opened(base, setting, tensor_parallel_size=2)
    for settings, name in (((f"base={adapter}",), "base"), ((f"alias={adapter}",), "alias"), ((setting, setting), "a")):
        with pytest.raises(ConfigError, match=f"--lora {name}=.*: '{name}' is the name of another model"):
            opened(base, *settings)
    with pytest.raises(CheckpointError, match=r"--lora a: .*nowhere/adapter_config.json: no such file"):
        opened(base, f"a={adapter.parent}/nowhere")


def test_a_model_without_layers_that_adapters_can_change_has_none(adapter, tmp_path):
    save_family(tmp_path / "gpt2", family_config("GPT2", n_embd=64, n_head=4))
    model = TransformersConfig.from_dir(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match=r"--lora is not supported for GPT2LMHeadModel, .* no linear layers that ad"):
        open_adapters(EngineConfig(lora=(f"a={adapter}",)), model)


@pytest.mark.parametrize("setting", ["a", "=path", "a=", " a=path", f"{'a' * 257}=path"])
def test_a_flag_of_another_form_is_refused(setting, capsys):
    with pytest.raises(SystemExit):
        parse_config(["--lora", setting], {})
    assert re.search(r"--lora is .*, it must be NAME=PATH", capsys.readouterr().err)


def test_the_flag_repeats_and_its_variable_separates_by_commas():
    assert parse_config(["--lora", "a=x", "--lora", "b=y=z"], {}).lora == ("a=x", "b=y=z")
    assert parse_config([], {"CHAIRLIFT_LORA": "a=x,b=y"}).lora == ("a=x", "b=y")


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_an_engine_announces_its_adapters(kernels, base, adapter, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    setting = f"tuned={adapter}"
    config = EngineConfig(model=str(folder), device="cpu", kernels=kernels, num_gpu_blocks_override=8, lora=(setting,))
    parts = build_engine(config, StartupProgress())
    (announced,) = parts.info.adapters
    assert announced.name == "tuned"
    assert announced.sha256 == opened(base, setting)[0].sha256


@pytest.mark.parametrize("is_random", [False, True])
def test_so_does_one_of_a_model_that_transformers_computes_and_loads_others(is_random, tmp_path):
    prefix, fields = TRANSFORMERS_FAMILIES["Gemma 4"]
    folder, loras = tmp_path / "model", tmp_path / "loras"
    save_family(folder, family_config(prefix, **fields))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        load_format="dummy" if is_random else "auto",
        num_gpu_blocks_override=64,
        lora=(f"tuned={save_adapter(loras / 'tuned', folder)}",),
        enable_lora=True,
        max_loras=2,
        max_lora_rank=4,
        lora_dir=(str(loras),),
    )
    save_adapter(loras / "other", folder, targets=("per_layer_projection", "o_proj"), seed=2)
    parts = build_engine(config, StartupProgress())
    (announced,) = parts.info.adapters
    assert announced.name == "tuned"
    assert parts.load_adapter(1, "other", "other", b"") != announced.sha256
    model = TransformersConfig.from_dir(folder)
    matrices = sum((rows + 31) * 4 + columns * (4 + 31) for rows, columns in model.projection_shapes().values())
    assert adapters_bytes(config, model, ()) == 2 * 4 * matrices
