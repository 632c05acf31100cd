"""The engine's flags, and the defaults that depend on the device."""

import re
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig, parse_config
from engine.demo import MODEL_DIR
from engine.errors import ConfigError


def test_step_limits_default_to_the_device() -> None:
    config = EngineConfig(model="m")
    assert config.step_limits("cpu") == (64, 512)
    assert config.step_limits("cuda") == (256, 2048)


def test_the_token_budget_grows_with_the_slots() -> None:
    assert EngineConfig(model="m", max_num_seqs=1000).step_limits("cpu") == (1000, 1000)


def test_a_budget_below_the_slots_is_rejected_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 16 .* --max-num-seqs 32"):
        EngineConfig(model="m", max_num_seqs=32, max_num_batched_tokens=16).step_limits("cpu")


def test_addresses() -> None:
    assert EngineConfig(model="m", host="::1", port=5).address == "[::1]:5"
    assert EngineConfig(model="m", uds=Path("/run/x.sock")).address == "unix:/run/x.sock"


def test_the_default_model_name_is_that_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    assert EngineConfig(model=str(folder)).model_name == "tiny-llama"
    assert EngineConfig(model="owner/name").model_name == "owner/name"
    assert EngineConfig(model=str(MODEL_DIR)).model_name == "chairlift-demo"
    assert EngineConfig(model=str(folder), served_model_name=("mine",)).model_name == "mine"


def test_a_model_may_have_several_names() -> None:
    for config in (
        parse_config(["--served-model-name", "a", "org/b", "--seed", "1"], {}),
        parse_config(["--served-model-name=a", "--served-model-name=org/b"], {}),
        parse_config([], {"CHAIRLIFT_SERVED_MODEL_NAME": "a,org/b"}),
    ):
        assert (config.model_name, config.model_names) == ("a", ("a", "org/b"))
    assert EngineConfig(model="owner/name").model_names == ("owner/name",)


@pytest.mark.parametrize(("names", "message"), [(("a", "b", "a"), "has 'a' twice"), (("a", " "), "is  , it must be a")])
def test_names_that_cannot_be_served_are_refused(
    names: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(["--served-model-name", *names], {})
    error = capsys.readouterr().err
    assert (caught.value.code, error.count("\n")) == (2, 1)
    assert f"--served-model-name {message}" in error


@pytest.mark.parametrize(("asked", "cpu", "cuda"), [(None, 1, 2), (True, 2, 2), (False, 1, 1)])
def test_two_steps_are_in_flight_on_a_gpu_by_default(asked: bool | None, cpu: int, cuda: int) -> None:
    config = EngineConfig(model="m", async_scheduling=asked)
    assert (config.max_steps_in_flight("cpu"), config.max_steps_in_flight("cuda")) == (cpu, cuda)


def test_flags_default_to_the_config_of_the_demo_model() -> None:
    config = parse_config([], {})
    assert config == EngineConfig() == EngineConfig(model=str(MODEL_DIR))
    assert (config.host, config.port, config.address) == ("127.0.0.1", 50052, "127.0.0.1:50052")
    assert (config.block_size, config.gpu_memory_utilization, config.seed) == (16, 0.92, 0)


def test_every_flag_reaches_its_field() -> None:
    argv = (
        "--model m --served-model-name s --load-format dummy --dtype float32 --max-model-len 2K --seed 3 "
        "--host ::1 --port 7 --uds /tmp/x --exit-on-stdin-close --shutdown-timeout 1.5 --max-num-seqs 8 "
        "--max-num-batched-tokens 1k --scheduling-policy priority --max-num-queued-reqs 9 --async-scheduling "
        "--max-logprobs 2 --block-size 32 --no-enable-prefix-caching --gpu-memory-utilization 0.5 "
        "--kv-cache-memory-bytes 1.5G --num-gpu-blocks-override 11 --quantization int8 --kv-cache-dtype int8 "
        "--batch-invariant --device cpu -tp 4 --rank-timeout 9.5 --threads 2 --step-log s.jsonl --log-level "
        "debug"
    )
    assert parse_config(argv.split(), {}) == EngineConfig(
        model="m",
        served_model_name=("s",),
        load_format="dummy",
        dtype="float32",
        max_model_len=2048,
        seed=3,
        host="::1",
        port=7,
        uds=Path("/tmp/x"),
        exit_on_stdin_close=True,
        shutdown_timeout_s=1.5,
        max_num_seqs=8,
        max_num_batched_tokens=1000,
        scheduling_policy="priority",
        max_num_queued_reqs=9,
        async_scheduling=True,
        max_logprobs=2,
        block_size=32,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=3 * 2**29,
        num_gpu_blocks_override=11,
        quantization="int8",
        kv_cache_dtype="int8",
        batch_invariant=True,
        device="cpu",
        tensor_parallel_size=4,
        rank_timeout_s=9.5,
        threads=2,
        step_log=Path("s.jsonl"),
        log_level="debug",
    )


def test_address_has_other_variables_than_the_frontends() -> None:
    frontend = {"CHAIRLIFT_PORT": "1", "CHAIRLIFT_HOST": "0.0.0.0", "CHAIRLIFT_TLS_CERT": "c"}
    assert parse_config([], frontend) == parse_config([], {})
    engine = parse_config([], {**frontend, "CHAIRLIFT_ENGINE_PORT": "2", "CHAIRLIFT_ENGINE_HOST": "::1"})
    assert (engine.host, engine.port) == ("::1", 2)


def test_help_names_every_variable_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--help"], {})
    variables = re.findall(r"\[(CHAIRLIFT_[A-Z_]+)\]", capsys.readouterr().out)
    assert len(variables) == len(set(variables)) == len(EngineConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--max-num-seqs 0", "--max-num-seqs is 0, it must be a whole number between 1 and 65536"),
        ("--block-size 8", "--block-size is 8, it must be one of 16, 32, 64, 128"),
        ("--quantization int4", "--quantization is int4, it must be one of int8, fp8"),
        ("--kv-cache-dtype fp4", "--kv-cache-dtype is fp4, it must be one of auto, bfloat16, int8, fp8"),
        ("--max-model-len 1", "--max-model-len is 1, it must be a whole number between 2 and 2147483647, or auto"),
        ("--dtype int3", "--dtype is int3, it must be one of auto, float32, bfloat16, float16"),
        ("Qwen/Qwen3-0.6B --port 3", "unknown: Qwen/Qwen3-0.6B; did you mean --model Qwen/Qwen3-0.6B?"),
        ("--max-num-seq 3", "unknown: --max-num-seq 3; did you mean --max-num-seqs?"),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], argv: str, says: str) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(argv.split(), {})
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"chairlift-engine: error: {says} (see chairlift-engine --help)\n"


@pytest.mark.parametrize(
    ("fields", "records"),
    [
        ({}, True),
        ({"attention_backend": "triton", "kernels": "triton"}, True),
        ({"enforce_eager": True}, False),
        ({"kernels": "torch"}, False),
        ({"attention_backend": "torch"}, False),
        ({"attention_backend": "flashinfer"}, False),
        ({"attention_backend": "flash-attn"}, False),
    ],
)
def test_graphs_are_recorded_unless_they_are_disabled_or_not_supported(fields: dict[str, Any], records: bool) -> None:
    assert EngineConfig(model="m", **fields).records_graphs is records
