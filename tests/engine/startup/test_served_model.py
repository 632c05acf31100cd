"""An engine whose model transformers computes: from the configuration to tokens."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.core.request import SamplingParams
from engine.errors import CheckpointError, ConfigError
from engine.model.config import ModelConfig
from engine.serving.parts import EngineParts
from engine.startup.build import build_engine
from engine.startup.progress import StartupProgress
from engine.startup.served_model import open_model, weights_dtype
from tests.support.engine.families import TRANSFORMERS_FAMILIES, family_config, save_family
from tests.support.engine.small_engine import answer

PROMPT = (5, 6, 9, 40)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "tiny-stablelm"
    prefix, fields = TRANSFORMERS_FAMILIES["StableLM"]
    save_family(path, family_config(prefix, **fields))
    (path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    return path


def tokens(parts: EngineParts) -> list[int]:
    return answer(parts, PROMPT, SamplingParams(seed=0, max_tokens=6, temperature=0.0, ignore_end_token=True))


def test_a_family_without_a_decoder_is_served_with_one_line_that_names_the_cost(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    config = EngineConfig(model=str(model_dir), device="cpu", num_gpu_blocks_override=8, threads=1)
    with caplog.at_level("INFO"):
        parts = build_engine(config, StartupProgress())
    [line] = [record.getMessage() for record in caplog.records if "computed by transformers" in record.getMessage()]
    assert "StableLmForCausalLM" in line
    assert "1.1 to 3 times the time" in line
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    wanted = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert tokens(parts) == wanted[0, len(PROMPT) :].tolist()
    assert parts.info.vocab_size == 307
    assert parts.info.max_model_len == 8 * 16
    torch_kernels = build_engine(replace(config, kernels="torch"), StartupProgress())
    assert tokens(torch_kernels) == wanted[0, len(PROMPT) :].tolist()


def test_transformers_stores_the_dtype_of_the_checkpoint(model_dir: Path) -> None:
    """On a CPU that of the files, on a GPU that of config.json; plain PyTorch operations have float32 on a CPU."""
    auto = EngineConfig(model=str(model_dir), device="cpu")
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    model = open_model(model_dir, auto, cpu)
    assert not isinstance(model, ModelConfig)
    model = replace(model, shape=replace(model.shape, checkpoint_dtype="bfloat16"))
    assert weights_dtype(model, model_dir, auto, cpu) is torch.float32
    assert weights_dtype(model, model_dir, replace(auto, load_format="dummy"), cpu) is torch.bfloat16
    assert weights_dtype(model, model_dir, replace(auto, dtype="bfloat16"), cpu) is torch.bfloat16
    assert weights_dtype(model, model_dir, auto, gpu) is torch.bfloat16
    with pytest.raises(ConfigError, match=r"dtype is 'bfloat16'.*--kernels torch.* are float32 and auto"):
        weights_dtype(model, model_dir, replace(auto, dtype="bfloat16", kernels="torch"), cpu)


def test_latents_are_kept_unless_adapters_may_change_the_matrix_that_expands_them(
    gpu: SimpleNamespace, tmp_path: Path
) -> None:
    """Nor with attention of other libraries, or on GPUs without kernels. A GPU stores them once, in the keys."""
    prefix, fields = TRANSFORMERS_FAMILIES["DeepSeek-V2"]
    save_family(tmp_path, family_config(prefix, **fields))
    config = EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy")
    for changes, device, num_kv_heads, value_dim, *target in (
        ({}, "cpu", 1, None),
        ({"kernels": "torch"}, "cpu", 1, None),
        ({"enable_lora": True}, "cpu", 4, None),
        ({}, "cuda", 1, 16),
        ({}, "cuda", 4, None, "sm_75"),
        ({"kernels": "torch"}, "cuda", 1, 16, "sm_75"),
        ({"kernels": "torch"}, "cuda", 1, 16),
        ({"attention_backend": "torch"}, "cuda", 1, 16),
        ({"attention_backend": "flashinfer"}, "cuda", 4, None),
        ({"enable_lora": True}, "cuda", 4, None),
    ):
        gpu.target = target[0] if target else "sm_90"
        model = open_model(tmp_path, replace(config, **changes), torch.device(device))
        assert {(layer.num_kv_heads, layer.value_dim) for layer in model.shape.layers} == {(num_kv_heads, value_dim)}


def test_int8_weights_and_an_int8_cache_serve(model_dir: Path) -> None:
    config = EngineConfig(
        model=str(model_dir),
        device="cpu",
        quantization="int8",
        kv_cache_dtype="int8",
        num_gpu_blocks_override=8,
        threads=1,
    )
    assert len(tokens(build_engine(config, StartupProgress()))) == 6


def test_random_weights_depend_on_the_seed_alone(model_dir: Path) -> None:
    config = EngineConfig(
        model=str(model_dir), device="cpu", load_format="dummy", num_gpu_blocks_override=8, threads=1, seed=3
    )
    assert tokens(build_engine(config, StartupProgress())) == tokens(build_engine(config, StartupProgress()))


def test_flags_that_do_not_hold_are_refused_by_name(model_dir: Path) -> None:
    config = EngineConfig(model=str(model_dir), device="cpu", batch_invariant=True)
    with pytest.raises(ConfigError, match=r"--batch-invariant is not supported for StableLmForCausalLM.*: omit it"):
        build_engine(config, StartupProgress())
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 2 is not supported for StableLmForCausalLM"):
        build_engine(replace(config, batch_invariant=False, tensor_parallel_size=2), StartupProgress())
    with pytest.raises(CheckpointError, match=r"architectures is \['StableLmForCausalLM'\], supported are"):
        build_engine(replace(config, batch_invariant=False, model_impl="chairlift"), StartupProgress())
