"""From a configuration to an engine, on a tiny model."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core.request import SamplingParams
from engine.errors import CheckpointError, ConfigError
from engine.flags import Quantization
from engine.serving.parts import EngineParts
from engine.startup.build import build_engine
from engine.startup.machine import usable_cpus
from engine.startup.progress import StartupProgress
from kernels.cpu.cpu_features import cpu_features
from tests.support.engine.small_engine import answer


@pytest.fixture(scope="module")
def model_dir(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "tiny-llama"
    shutil.copytree(make_checkpoint("llama"), path)
    (path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    return path


def _tokens(parts: EngineParts) -> list[int]:
    """Returns the answer to a request of three tokens."""
    return answer(parts, (5, 6), SamplingParams(seed=0, max_tokens=3))


def test_asynchronous_scheduling_changes_no_token(model_dir: Path) -> None:
    tokens = []
    for async_scheduling, max_steps_in_flight in ((None, 1), (False, 1), (True, 2)):
        config = EngineConfig(model=str(model_dir), num_gpu_blocks_override=8, async_scheduling=async_scheduling)
        parts = build_engine(config, StartupProgress())
        assert parts.scheduler.max_steps_in_flight == max_steps_in_flight
        tokens.append(_tokens(parts))
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(tokens[0]) == 3


def test_torch_kernels_give_the_same_answer(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(model_dir), device="cpu", num_gpu_blocks_override=8)
    expected = _tokens(build_engine(config, StartupProgress()))
    monkeypatch.setattr("engine.startup.rank.cpu_ops", pytest.fail)
    assert _tokens(build_engine(replace(config, kernels="torch"), StartupProgress())) == expected


def test_the_blocks_reported_hold_their_tokens_in_all_layers(servable: Callable[..., Path]) -> None:
    """Also with windows, where a block of the pool holds them in the layers of one group."""
    path = servable("gemma3", num_hidden_layers=3, layer_types=["sliding_attention"] * 2 + ["full_attention"])
    parts = build_engine(EngineConfig(model=str(path), num_gpu_blocks_override=200), StartupProgress())
    assert parts.scheduler.config.cache_groups.num_groups == 3
    assert parts.info.num_kv_blocks == 200 // 3
    assert parts.scheduler.stats().num_free_blocks == parts.info.num_kv_blocks


def test_the_parts_have_consistent_limits_and_progress_is_reported(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    details: list[str] = []
    config = EngineConfig(model=str(model_dir), max_num_seqs=4, kv_cache_memory_bytes=2**18, max_num_queued_reqs=6)
    parts = build_engine(config, StartupProgress(details.append))
    assert parts.info.num_kv_blocks == 2**18 // 512 // 16
    assert (parts.info.max_num_seqs, parts.info.max_num_batched_tokens, parts.info.max_model_len) == (4, 512, 512)
    assert list(parts.info.end_token_ids) == [2]
    assert parts.info.tokenizer_sha256 == parts.tokenizer.sha256()
    assert parts.max_open_requests == 10
    assert details.index("reading the tokenizer for grammars") < details.index("loading weights")
    assert "Structured output is not available" in caplog.text  # it has been tried, with a tokenizer of one token
    assert "loading weights" in details
    assert details[-1] == "warming up"
    assert parts.progress is not None
    mark = parts.progress()
    assert parts.progress() == mark
    assert len(_tokens(parts)) == 3
    assert parts.progress() != mark


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_int8_engines_serve(model_dir: Path, quantization: Quantization | None, threads: int) -> None:
    """The cache takes a byte for each of 16 elements, and four for their scale."""
    config = EngineConfig(
        model=str(model_dir),
        quantization=quantization,
        kv_cache_dtype="int8",
        batch_invariant=True,
        max_num_seqs=4,
        kv_cache_memory_bytes=2**18,
        threads=min(threads, usable_cpus()),
    )
    parts = build_engine(config, StartupProgress())
    assert parts.info.num_kv_blocks == 2**18 // (2 * 2 * 2 * (16 + 4)) // 16
    assert len(_tokens(parts)) == 3


@pytest.mark.parametrize("avx512", [False, True])
def test_a_cpu_without_avx512_is_reported(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, avx512: bool
) -> None:
    features = replace(cpu_features(), avx512=avx512)
    monkeypatch.setattr("engine.startup.cpu_threads.cpu_features", lambda: features)
    build_engine(EngineConfig(model=str(model_dir), quantization="int8", threads=1), StartupProgress())
    own = [record for record in caplog.records if record.name == "engine.startup.cpu_threads"]
    warnings = [record.getMessage() for record in own if record.levelname == "WARNING"]
    assert ["no AVX-512:" in warning for warning in warnings] == [True] * (not avx512)


def test_loading_weights_shows_its_progress_and_is_logged(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    details: list[str] = []
    startup = StartupProgress()
    monkeypatch.setattr(startup, "update", details.append)  # all of it, however fast it comes
    with caplog.at_level("INFO"):
        build_engine(EngineConfig(model=str(model_dir), num_gpu_blocks_override=8), startup)
    loading = [detail for detail in details if detail.startswith("loading weights")]
    assert loading[-1].startswith("loading weights 100 %")
    [line] = [record.getMessage() for record in caplog.records if "packing weights took" in record.getMessage()]
    assert re.fullmatch(r"Loading and packing weights took [\d.]+ seconds \([\d.]+ GB, [\d.]+ GB/s\)", line)
    assert re.search(r"weights [\d.]+, KV cache [\d.]+", startup.end())


def test_without_a_size_the_cache_is_no_larger_than_requests_can_fill(model_dir: Path) -> None:
    parts = build_engine(EngineConfig(model=str(model_dir), max_num_seqs=3), StartupProgress())
    assert parts.info.num_kv_blocks == 3 * 512 // 16


def test_the_model_length_is_cut_to_the_cache_unless_it_was_asked_for(model_dir: Path) -> None:
    parts = build_engine(EngineConfig(model=str(model_dir), num_gpu_blocks_override=8), StartupProgress())
    assert parts.info.max_model_len == 8 * 16
    with pytest.raises(ConfigError, match=r"512 tokens needs .* --max-model-len"):
        build_engine(
            EngineConfig(model=str(model_dir), num_gpu_blocks_override=8, max_model_len=512), StartupProgress()
        )


def test_weights_that_do_not_fit_are_rejected_before_loading(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    details: list[str] = []
    monkeypatch.setattr("engine.startup.cpu_memory.available_memory_bytes", lambda: 200_000)
    with pytest.raises(ConfigError, match=r"the weights take 0\.00\d\d GiB in float32, 0\.0002 GiB of memory is free"):
        build_engine(EngineConfig(model=str(model_dir)), StartupProgress(details.append))
    assert not [detail for detail in details if "loading" in detail]


def test_unusable_weights_are_rejected_before_kernels_are_compiled(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.startup.rank.cpu_ops", pytest.fail)
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    [file] = broken.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"safetensors: has \d+ bytes, its header requires \d+: truncated"):
        build_engine(EngineConfig(model=str(broken)), StartupProgress())
    file.unlink()
    with pytest.raises(CheckpointError, match="has neither"):
        build_engine(EngineConfig(model=str(broken)), StartupProgress())


def test_the_cache_is_sized_by_what_the_weights_leave(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights_bytes = (model_dir / "model.safetensors").stat().st_size
    monkeypatch.setattr("engine.startup.cpu_memory.available_memory_bytes", lambda: weights_bytes + 2 * 2**20)
    parts = build_engine(EngineConfig(model=str(model_dir)), StartupProgress())
    header_blocks = 1  # the file's header is counted as a weight above
    assert 0 <= parts.info.num_kv_blocks - 2**20 // 512 // 16 <= header_blocks


def test_a_model_without_its_tokenizer_is_rejected(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken"
    shutil.copytree(model_dir, path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        build_engine(EngineConfig(model=str(path)), StartupProgress())


def test_a_model_of_the_hub_that_is_not_supported_costs_no_download(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake hub has all files but the weights, which must not be asked for."""
    shutil.copytree(model_dir, tmp_path / "hub", ignore=shutil.ignore_patterns("*.safetensors"))
    config = tmp_path / "hub" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["MambaForCausalLM"]}))
    downloads = []

    def snapshot_download(name: str, *, allow_patterns: list[str], tqdm_class: object) -> str:
        downloads.append(allow_patterns)
        return str(tmp_path / "hub")

    monkeypatch.setattr("engine.model.hub.snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="is MambaForCausalLM: its layers keep state"):
        build_engine(EngineConfig(model="owner/name"), StartupProgress())
    assert len(downloads) == 1


def test_a_shipped_shape_is_served_by_name_without_weights_or_tokenizer(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tiny-1b").mkdir()
    shutil.copy(model_dir / "config.json", tmp_path / "tiny-1b")
    monkeypatch.setattr("engine.model.shapes._FOLDER", tmp_path)
    with caplog.at_level("INFO"):
        parts = build_engine(EngineConfig(model="Tiny-1B", load_format="dummy"), StartupProgress())
    assert "Using the bundled shape Tiny-1B" in caplog.text
    assert (parts.info.model, parts.info.weights_revision) == ("Tiny-1B", "dummy-0")
    assert parts.tokenizer.files == ()
    assert len(_tokens(parts)) == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quantization": "fp8"}, "--quantization fp8 is not supported on a CPU: use int8"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 is not supported on a CPU: use int8"),
        ({"threads": 4096}, r"--threads: 4096 threads asked for, 1 to \d+ can be had"),
        ({"max_num_seqs": 32, "max_num_batched_tokens": 16}, "--max-num-batched-tokens 16"),
        ({"dtype": "bfloat16", "kernels": "torch"}, "bfloat16.*--kernels torch.*float32"),
    ],
)
def test_settings_that_this_machine_does_not_support_are_rejected(
    model_dir: Path, fields: dict[str, object], words: str
) -> None:
    config = EngineConfig(model=str(model_dir), device="cpu", **fields)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        build_engine(config, StartupProgress())
