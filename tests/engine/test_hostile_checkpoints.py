"""Broken and malicious checkpoints are rejected with one line, before they block, fill the memory or reach a kernel."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.model import checkpoint_file
from engine.model.tokenizer_files import TokenizerFiles
from engine.startup.build import build_engine
from engine.startup.progress import StartupProgress
from tests.support.engine.process import ENVIRONMENT

TOKENIZER = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
DEEP = 100_000
GIB = 1 << 30


@pytest.fixture
def model_dir(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a small checkpoint for modification."""
    path = tmp_path / "model"
    shutil.copytree(make_checkpoint("llama"), path)
    (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return path


def complaint(model_dir: Path) -> str:
    """Returns the error of the start, one line."""
    with pytest.raises(CheckpointError) as caught:
        build_engine(EngineConfig(model=str(model_dir), num_gpu_blocks_override=8), StartupProgress())
    line = str(caught.value)
    assert line.isprintable()
    assert len(line) < 1100
    return line


def replace(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


def fifo(path: Path) -> None:
    os.mkfifo(replace(path))


def bound_socket(path: Path) -> None:
    replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    before = Path.cwd()
    os.fchdir(folder)  # the length of socket paths is limited
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(before)
        os.close(folder)


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "named pipe": (fifo, "is a named pipe, expected a regular file"),
    "socket": (bound_socket, "is a socket, expected a regular file"),
    "device": (lambda path: replace(path).symlink_to("/dev/zero"), "is a device, expected a regular file"),
    "folder": (lambda path: replace(path).mkdir(), "is a folder, expected a regular file"),
    "circular link": (
        lambda path: replace(path).symlink_to(path.name),
        "cannot be read: Too many levels of symbolic links",
    ),
    "broken link": (lambda path: replace(path).symlink_to("nowhere"), "is a link to nowhere, which does not exist"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*FILES, "model.safetensors.index.json", "added_tokens.json"])
def test_a_file_that_is_not_regular_is_rejected(model_dir: Path, name: str, kind: str) -> None:
    make, says = KINDS[kind]
    if name == "model.safetensors.index.json":
        (model_dir / "model.safetensors").unlink()  # beside which no index is read
    make(model_dir / name)
    assert complaint(model_dir) == f"{model_dir / name}: {says}"


def test_a_shard_that_is_not_regular_is_rejected(model_dir: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "shard.safetensors"}}
    (model_dir / "model.safetensors").unlink()
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    fifo(model_dir / "shard.safetensors")
    assert complaint(model_dir) == f"{model_dir / 'shard.safetensors'}: is a named pipe, expected a regular file"


def test_a_template_that_is_not_regular_is_rejected(model_dir: Path) -> None:
    (model_dir / "additional_chat_templates").mkdir()
    fifo(model_dir / "additional_chat_templates" / "tool_use.jinja")
    assert "tool_use.jinja: is a named pipe" in complaint(model_dir)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[" * DEEP, "is nested more than 100 levels deep"),
        (b'{"a":' * DEEP, "is nested more than 100 levels deep"),
        (b"[" * 101 + b"]" * 101, "is nested more than 100 levels deep"),
        (b"[" + b"[]," * checkpoint_file.MAX_ELEMENTS + b"[]]", "elements of JSON, at most 5000000 are read"),
        (b'{"architectures": ["Llama', "cannot be read as JSON: "),
        (b'{"a": 1' + b"0" * 5000 + b"}", "cannot be read as JSON: "),
        (b"", "cannot be read as JSON: "),
        (b"\xff\xfe{}", "cannot be read as JSON: "),
        (b"[7]", "holds a list, expected an object"),
    ],
    ids=[
        "lists",
        "objects",
        "101 lists",
        "many lists",
        "truncated",
        "long number",
        "empty",
        "not UTF-8",
        "list",
    ],
)
def test_unusable_json_is_rejected(model_dir: Path, name: str, content: bytes, says: str) -> None:
    if len(content) > checkpoint_file.MAX_JSON_BYTES and name != "tokenizer.json":
        says = "bytes, at most"
    (model_dir / name).write_bytes(content)
    assert says in complaint(model_dir)


@pytest.mark.parametrize("name", [name for name in FILES if name != "model.safetensors"])
def test_a_file_that_is_too_large_is_not_read(model_dir: Path, name: str) -> None:
    with (model_dir / name).open("wb") as file:
        file.truncate(GIB)  # sparse
    assert f"{name}: has {GIB} bytes, at most" in complaint(model_dir)


def test_the_safetensors_header_has_the_limits_of_other_json(model_dir: Path) -> None:
    for header, says in (
        (b"[" * DEEP, "corrupt header: is nested more than 100 levels deep"),
        (b"[" + b"[]," * checkpoint_file.MAX_ELEMENTS + b"[]]", "corrupt header: has up to 10000002 elements"),
    ):
        (model_dir / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        assert says in complaint(model_dir)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("num_hidden_layers", 1_000_000, "num_hidden_layers is 1000000, the maximum is 1024"),
        ("num_attention_heads", 0, "num_attention_heads is 0, expected an integer >= 1"),
        ("num_attention_heads", 2**40, "num_attention_heads is 1099511627776, the maximum"),
        ("head_dim", 10**30, "head_dim is 1000000000000000000000000000000, the maximum"),
        ("hidden_size", 2**62, "hidden_size is 4611686018427387904, the maximum"),
        ("intermediate_size", 2**62, "intermediate_size is 4611686018427387904, the maximum"),
        ("vocab_size", 2**31, "vocab_size is 2147483648, the maximum"),
        ("max_position_embeddings", 10**12, "max_position_embeddings is 1000000000000, the maximum"),
        ("sliding_window", 2**40, "sliding_window is 1099511627776, the maximum"),
        ("rms_norm_eps", 10**400, "rms_norm_eps is 1000000000"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan, expected a number > 0"),
        ("eos_token_id", 2**70, "eos_token_id is 1180591620717411303424, expected a token id"),
        ("eos_token_id", [[]], "eos_token_id is [[]], expected a token id"),
        ("dtype", ["float32"], "dtype is ['float32'], supported are"),
        ("architectures", "x\n\x1b[31m" * 10_000, "architectures is 'x\\n\\x1b[31m"),
        ("layer_types", ["full_attention"] * 100_000, "layer_types is ['full_attention', 'full_attention'"),
    ],
)
def test_numbers_out_of_range_are_rejected(model_dir: Path, field: str, value: Any, says: str) -> None:
    path = model_dir / "config.json"
    # Llama ignores the fields of windows, Qwen2 reads all of them.
    qwen = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), **qwen, field: value}))
    assert f"config.json: {says}" in complaint(model_dir)


def test_a_slow_pattern_of_a_quantised_checkpoint_is_rejected(model_dir: Path) -> None:
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    for pattern in ("re:(a+)+$", "re:" + ".*" * 5 + "x"):
        quantised = {"quant_method": "fp8", "modules_to_not_convert": [pattern]}
        path.write_text(json.dumps({**config, "quantization_config": quantised}))
        assert "supported are 4 repeats and no repeated groups" in complaint(model_dir)


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        ({}, "has no model.vocab"),
        ({"model": None}, "has no model.vocab"),
        ({"model": {"vocab": {}}}, "has no tokens: neither model.vocab nor added_tokens names one"),
        ({"model": {"type": "Unigram", "vocab": []}, "added_tokens": []}, "has no tokens"),
        ({"model": {"vocab": [7]}}, "model.vocab has an invalid entry"),
        ({"model": {"vocab": {"a": 4_000_000_000}}}, "token 'a' has the id 4000000000, expected 0 to 16777215"),
        ({"model": {"vocab": {"a": -1}}}, "token 'a' has the id -1, expected 0 to"),
        (
            {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "b", "id": 10**9}]},
            "token 'b' has the id 1000000000",
        ),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": ["b"]}, "added_tokens has an invalid entry: 'b'"),
    ],
)
def test_a_tokenizer_without_valid_tokens_is_rejected(model_dir: Path, tokenizer: Any, says: str) -> None:
    (model_dir / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert f"tokenizer.json: {says}" in complaint(model_dir)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}},
            "normalizer: precompiled_charsmap declares a table of 4294967295 bytes, has 8 in all",
        ),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}},
            "normalizer: precompiled_charsmap declares",
        ),
        (
            {
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}] * 8,
                }
            },
            "normalizer: may make a text 1e+08 times longer, supported are 1000",
        ),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "pre_tokenizer: FixedLength has the length 0"),
        (
            {
                "decoder": {
                    "type": "Sequence",
                    "decoders": [{"type": "Strip", "content": "a", "start": 0, "stop": 10**9}],
                }
            },
            "decoder: Strip has stop 1000000000",
        ),
        ({"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 1}}, "decoder: Strip has stop 1"),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
                    "special_tokens": {},
                }
            },
            "post_processor: single has the special token '<s>', which special_tokens does not define",
        ),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": [], "type_id": 0}}],
                    "special_tokens": {},
                }
            },
            "post_processor: single has the special token [], which special_tokens does not define",
        ),
        (
            {"post_processor": {"type": "TemplateProcessing", "single": [], "pair": 5}},
            "post_processor: pair is 5, expected a list",
        ),
    ],
    ids=[
        *("charsmap", "no charsmap", "growth", "chunks", "strip", "strip one"),
        *("template", "no name in a template", "no template"),
    ],
)
def test_a_tokenizer_that_would_crash_a_frontend_is_rejected(model_dir: Path, part: dict[str, Any], says: str) -> None:
    (model_dir / "tokenizer.json").write_text(json.dumps({**TOKENIZER, **part}))
    assert f"tokenizer.json: {says}" in complaint(model_dir)


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "(" * DEEP + " }}",
        "{% if x %}" * DEEP,
        "{%- for x in y -%}" * 101,
        "{{ " + "[" * 101 + "]" * 101 + " }}",
    ],
    ids=["brackets", "blocks", "101 blocks", "101 brackets"],
)
def test_a_deeply_nested_template_is_rejected_in_every_file(model_dir: Path, template: str) -> None:
    says = "the chat template is nested more than 100 levels deep"
    (model_dir / "chat_template.jinja").write_text(template)
    assert complaint(model_dir) == f"{model_dir / 'chat_template.jinja'}: {says}"
    (model_dir / "chat_template.jinja").unlink()
    for found in (template, [{"name": "default", "template": template}]):
        (model_dir / "tokenizer_config.json").write_text(json.dumps({"chat_template": found}))
        assert complaint(model_dir) == f"{model_dir / 'tokenizer_config.json'}: {says}"


def test_a_long_flat_template_is_accepted(model_dir: Path) -> None:
    flat = "{%- if a %}{{ f(x)[0] }}{% elif b %}{% set c = {} %}{# {% if #}{% else %}{% endif %}" * 5000 + "{%" * 1000
    (model_dir / "chat_template.jinja").write_text(flat)
    assert TokenizerFiles.from_dir(model_dir)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_reported_before_kernels_are_loaded(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, value: float, dtype: torch.dtype
) -> None:
    path = model_dir / "model.safetensors"
    weights = {name: tensor.to(dtype) for name, tensor in safetensors.torch.load_file(path).items()}
    weights["model.layers.1.mlp.up_proj.weight"].fill_(value)
    safetensors.torch.save_file(weights, path)
    monkeypatch.setattr("engine.startup.build.build_runner", None)
    assert complaint(model_dir) == f"{path}: tensor model.layers.1.mlp.up_proj.weight holds NaN or infinity"


def test_a_single_nan_is_detected_by_the_warm_up(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][-1, -1] = float("nan")
    safetensors.torch.save_file(weights, path)
    assert "the model fails on its first tokens, the model's logits hold NaN or infinity" in complaint(model_dir)


def test_weights_that_overflow_are_detected_by_the_warm_up(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    for name, tensor in weights.items():
        if "embed" not in name:  # a norm of overflowing squares may be zero, and all that follows
            tensor.fill_(3e37)
    safetensors.torch.save_file(weights, path)
    assert "the model fails on its first tokens, the model's logits hold NaN or infinity" in complaint(model_dir)


def test_program_ends_with_one_line_and_status_2(model_dir: Path, tmp_path: Path) -> None:
    def limit_memory() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (3 * GIB, 3 * GIB))  # torch's libraries alone take one

    (model_dir / "tokenizer.json").write_bytes(b"[" * DEEP)
    flags = ("--model", str(model_dir), "--uds", str(tmp_path / "x.sock"), "--log-level", "error")
    result = subprocess.run(
        [sys.executable, "-m", "engine", *flags],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=tmp_path,
        preexec_fn=limit_memory,
    )
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"chairlift-engine: error: {model_dir / 'tokenizer.json'}: ")
