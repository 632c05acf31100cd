"""Flags, environment and what is said about bad ones."""

import re
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.demo import MODEL_DIR
from engine.flags import parse_config


def refused(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> str:
    """The one line on stderr for a bad value."""
    with pytest.raises(SystemExit) as caught:
        parse_config(argv, environ)
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_defaults_are_those_users_know() -> None:
    config = parse_config([], {})
    assert config == EngineConfig(model=str(MODEL_DIR))
    assert (config.host, config.port, config.address) == ("127.0.0.1", 50052, "127.0.0.1:50052")
    assert (config.block_size, config.gpu_memory_utilization, config.seed) == (16, 0.92, 0)
    assert config.enable_prefix_caching


def test_every_flag_reaches_its_field() -> None:
    argv = [
        "--model",
        "m",
        "--served-model-name",
        "s",
        "--load-format",
        "dummy",
        "--dtype",
        "float32",
        "--max-model-len",
        "2K",
        "--seed",
        "3",
        "--host",
        "::1",
        "--port",
        "7",
        "--uds",
        "/tmp/x",
        "--exit-on-stdin-close",
        "--shutdown-timeout",
        "1.5",
        "--max-num-seqs",
        "8",
        "--max-num-batched-tokens",
        "1k",
        "--scheduling-policy",
        "priority",
        "--max-num-queued-reqs",
        "9",
        "--async-scheduling",
        "--max-logprobs",
        "2",
        "--block-size",
        "32",
        "--no-enable-prefix-caching",
        "--gpu-memory-utilization",
        "0.5",
        "--kv-cache-memory-bytes",
        "1.5G",
        "--num-gpu-blocks-override",
        "11",
        "--quantization",
        "int8",
        "--kv-cache-dtype",
        "int8",
        "--batch-invariant",
        "--device",
        "cpu",
        "-tp",
        "4",
        "--rank-timeout",
        "9.5",
        "--threads",
        "2",
        "--step-log",
        "s.jsonl",
        "--log-level",
        "debug",
    ]
    assert parse_config(argv, {}) == EngineConfig(
        model="m",
        served_model_name="s",
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


@pytest.mark.parametrize("value", ["auto", "-1"])
def test_max_model_len_can_be_left_to_the_model(value: str) -> None:
    assert parse_config([f"--max-model-len={value}"], {}).max_model_len is None


def test_environment_sets_what_the_command_line_does_not() -> None:
    environ = {"CHAIRLIFT_MAX_NUM_SEQS": "5", "CHAIRLIFT_ENGINE_PORT": "1234", "CHAIRLIFT_ENABLE_PREFIX_CACHING": "off"}
    config = parse_config(["--port", "4321"], environ)
    assert (config.max_num_seqs, config.port, config.enable_prefix_caching) == (5, 4321, False)


def test_address_has_variables_of_its_own_beside_the_frontends() -> None:
    frontend = {"CHAIRLIFT_PORT": "1", "CHAIRLIFT_HOST": "0.0.0.0"}
    assert parse_config([], frontend) == parse_config([], {})
    engine = parse_config([], {**frontend, "CHAIRLIFT_ENGINE_PORT": "2", "CHAIRLIFT_ENGINE_HOST": "::1"})
    assert (engine.host, engine.port) == ("::1", 2)


def test_an_empty_variable_counts_as_unset() -> None:
    names = [f"CHAIRLIFT_{field.upper()}" for field in EngineConfig.__dataclass_fields__]
    names += ["CHAIRLIFT_SHUTDOWN_TIMEOUT", "CHAIRLIFT_RANK_TIMEOUT"]
    assert parse_config([], dict.fromkeys(names, "")) == parse_config([], {})


def test_help_names_every_flag_once_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(["--help"], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    variables = re.findall(r"\[CHAIRLIFT_[A-Z_]+", text)
    assert len(variables) == len(set(variables)) == len(EngineConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "70000"], ["--port", "0", "65535", "70000"]),
        (["--max-num-seqs", "many"], ["--max-num-seqs", "'many'"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs", "between 1", "not 0"]),
        (["--block-size", "17"], ["--block-size", "16, 32, 64, 128", "17"]),
        (["--block-size", "8"], ["--block-size", "16, 32, 64, 128", "8"]),
        (["--quantization", "int4"], ["--quantization", "int8", "int4"]),
        (["--kv-cache-dtype", "fp4"], ["--kv-cache-dtype", "auto", "int8", "fp8", "fp4"]),
        (["--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization", "between 0.01 and 1", "1.5"]),
        (["--gpu-memory-utilization", "nan"], ["--gpu-memory-utilization", "nan"]),
        (["--shutdown-timeout", "-1"], ["--shutdown-timeout", "-1"]),
        (["--kv-cache-memory-bytes", "lotsG"], ["--kv-cache-memory-bytes", "'lotsG'"]),
        (["--kv-cache-memory-bytes", "infG"], ["--kv-cache-memory-bytes", "'infG'"]),
        (["--max-model-len", "1"], ["--max-model-len", "between 2", "not 1"]),
        (["--dtype", "int3"], ["--dtype", "float32", "'int3'"]),
        (["--model", ""], ["--model", "empty"]),
        (["--tensor-parallel-size", "0"], ["-tp", "between 1", "not 0"]),
        (["--max-num-seq", "3"], ["--max-num-seq"]),
        (["--nonsense"], ["--nonsense"]),
    ],
)
def test_a_bad_flag_is_one_line_with_numbers(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]
) -> None:
    line = refused(capsys, *argv)
    assert line.startswith("chairlift-engine: error: ")
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("CHAIRLIFT_ENGINE_PORT", "x", ["whole number"]),
        ("CHAIRLIFT_ENABLE_PREFIX_CACHING", "maybe", ["yes", "no"]),
        ("CHAIRLIFT_SCHEDULING_POLICY", "sjf", ["fcfs, priority, static"]),
    ],
)
def test_a_bad_variable_is_named(
    capsys: pytest.CaptureFixture[str], variable: str, value: str, words: list[str]
) -> None:
    line = refused(capsys, **{variable: value})
    for word in [f"{variable}={value}", *words]:
        assert word in line


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--max-num-sqs", "4"], "unknown: --max-num-sqs 4; did you mean --max-num-seqs? (see"),
        (["--zzz=1"], "unknown: --zzz=1 (see"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_one_meant(
    capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    assert says in refused(capsys, *argv)
