"""docs/models.md: what is read of a checkpoint, the sums of memory, and the line one gets for what is refused."""

import fnmatch
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from chairlift.service.engine_protocol import TEMPLATE_FOLDER, TOKENIZER_FILE_NAMES
from engine.config import DEMO_MODEL_NAME, EngineConfig
from engine.demo import MODEL_DIR
from engine.errors import CheckpointError, ConfigError
from engine.model import gguf_architectures, hub, modelopt
from engine.model.architectures import FAMILIES
from engine.model.config import ModelConfig
from engine.model.config_fields import ConfigFields
from engine.model.gguf_pre_tokenizers import PRE_TOKENIZERS
from engine.model.shapes import find_shape, shape_names
from engine.model.text_decoders import (
    COMPUTED_AS,
    NATIVE_DECODERS,
    PUBLISHED_WITH_CODE,
    TEXT_PARTS,
    THINKERS,
    WITH_ANY_DECODER,
)
from engine.runner.kv_cache import kv_bytes_per_token, plan_kv_cache
from engine.startup.build import build_engine
from engine.startup.progress import StartupProgress
from frontend.text.chat import REASONING_FORMATS, TOOL_FORMATS
from frontend.text.sampling_defaults import API_DEFAULTS, sampling_defaults
from tests.support.engine.adapters import save_adapter
from tests.support.engine.families import STATEFUL_FAMILIES, TRANSFORMERS_FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
CODE = re.compile(r"`([^`]+)`")


def section(title: str) -> str:
    """What stands under a heading of the second level."""
    _, found, rest = PAGE.partition(f"\n## {title}\n")
    assert found, title
    return rest.partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The cells of a section's tables, their heads left out."""
    table = re.findall(r"^\| (.*) \|$", section(title), re.M)
    return [line.split(" | ") for line in table if not set(line) <= set("-| ")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model, as `transformers` saves it, with a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = transformers.Qwen3Config(
        vocab_size=3072,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=7,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        shutil.copy(MODEL_DIR / name, folder)
    return folder


def startup_error(model: Path | str, **options: Any) -> str:
    """What an engine says that does not start."""
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        build_engine(EngineConfig(model=str(model), device="cpu", **options), StartupProgress())
    return str(caught.value)


def test_the_section_on_gguf_files_names_what_is_supported() -> None:
    named = {name: set(CODE.findall(cell)) for name, cell, *_ in (row for row in rows("GGUF files") if len(row) == 3)}
    architectures = {
        name for key, names in named.items() if "architecture" in key or "transformers" in key for name in names
    }
    assert gguf_architectures._ARCHITECTURES.keys() <= architectures
    assert PRE_TOKENIZERS.keys() == next(names for key, names in named.items() if "ggml.pre" in key)


def test_what_transformers_saves_is_served_under_the_folders_name(saved: Path) -> None:
    info = build_engine(EngineConfig(model=str(saved), device="cpu", max_num_seqs=2), StartupProgress()).info
    assert info.model == "tiny"
    assert list(info.end_token_ids) == [1, 7]  # of generation_config.json and of config.json
    named = build_engine(
        EngineConfig(model=str(saved), served_model_name=("x", "y"), load_format="dummy", seed=3), StartupProgress()
    )
    assert (named.info.model, named.info.weights_revision) == ("x", "dummy-3")
    assert list(named.info.aliases) == ["y"]
    assert EngineConfig(model=str(MODEL_DIR)).model_name == DEMO_MODEL_NAME


def test_files_are_those_that_are_read_and_fetched() -> None:
    named = {name for cells in rows("A checkpoint") for name in CODE.findall(cells[0])}
    templates = f"{TEMPLATE_FOLDER}/*.jinja"
    weights = {"model.safetensors", "model.safetensors.index.json"}
    assert named == {"config.json", modelopt.FILE, *weights, *TOKENIZER_FILE_NAMES, templates}
    patterns = {*hub._DESCRIPTION, hub._WEIGHTS}
    assert all(any(fnmatch.fnmatch(name, pattern) for pattern in patterns) for name in named)
    for pattern in patterns:  # nothing is fetched that the page does not have
        assert any(fnmatch.fnmatch(name, pattern) for name in named), pattern


def test_every_field_that_is_read_of_config_json_is_there(saved: Path, tmp_path: Path, monkeypatch: Any) -> None:
    read: set[str] = set()
    raw, contains = ConfigFields.raw, ConfigFields.__contains__

    def noting(fields: ConfigFields, name: str, *default: Any) -> Any:
        read.add(name)
        return raw(fields, name, *default)

    def looking(fields: ConfigFields, name: str) -> bool:
        read.add(name)
        return contains(fields, name)

    monkeypatch.setattr(ConfigFields, "raw", noting)
    monkeypatch.setattr(ConfigFields, "__contains__", looking)
    values = json.loads((saved / "config.json").read_text())
    for architecture in FAMILIES:
        (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": [architecture]}))
        ModelConfig.from_dir(tmp_path)
    of_the_rotation = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    of_gguf = {
        "stacks_experts",
        "tiles_linear_heads",
        "fuses_qkvz",
    }  # which files have not, but what is read from GGUF files
    assert len(read) > 20
    named = set(CODE.findall(section("A checkpoint") + section("Architectures")))
    assert read - of_the_rotation - of_gguf - named == set()


def test_architectures_formats_and_shapes_are_all_there() -> None:
    table = {CODE.findall(cells[0])[0]: cells for cells in rows("Architectures")}
    assert set(table) - {"architectures"} == {*FAMILIES, *TEXT_PARTS}
    for architecture, part in TEXT_PARTS.items():
        decoder, model_type = table[architecture][2:4]
        assert (CODE.findall(decoder), CODE.findall(model_type)[0]) == ([part.architecture], part.model_type)
    formats = {cells[0]: tuple(CODE.findall(cells[1])) for cells in rows("Chat")[1:]}
    assert formats == {"`--tool-call-parser`": TOOL_FORMATS, "`--reasoning-parser`": REASONING_FORMATS}
    assert set(shape_names()) <= set(CODE.findall(section("Without weights")))


def test_all_architectures_with_a_text_part_are_there() -> None:
    named = set(CODE.findall(section("Architectures")))
    assert {*WITH_ANY_DECODER, *PUBLISHED_WITH_CODE, *THINKERS, *NATIVE_DECODERS} <= named
    elsewhere = set(CODE.findall(section("Architectures of transformers")))
    assert {architecture for architecture, _ in COMPUTED_AS} <= named | elsewhere
    served = {*FAMILIES, *TEXT_PARTS, *THINKERS, *WITH_ANY_DECODER, *PUBLISHED_WITH_CODE}
    assert {name for name in named if name.endswith("ForConditionalGeneration")} <= served


def test_the_families_of_transformers_are_those_that_the_tests_compare() -> None:
    table = [cells for cells in rows("Architectures of transformers") if cells[1].startswith("`")]
    names = {cells[0]: CODE.findall(cells[1])[0] for cells in table if cells[0] != "family"}
    assert set(names) == {*TRANSFORMERS_FAMILIES, *STATEFUL_FAMILIES}
    assert set(names.values()) <= {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), "Mistral4ForCausalLM"}


def test_bytes_of_a_token_are_right() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int8)
    table = [cells for cells in rows("Memory") if "," in cells[1] and cells[0] != "shape"]
    assert len(table) == 4
    for name, shape, *sizes in table:
        folder = find_shape(name.strip("`")) or MODEL_DIR
        config = ModelConfig.from_dir(folder)
        assert shape == f"{config.num_layers}, {config.num_kv_heads}, {config.head_dim}"
        layers, heads, head_dim = map(int, shape.split(", "))
        for dtype, text in zip(dtypes, sizes, strict=True):
            by_hand = 2 * layers * heads * (head_dim * dtype.itemsize + (4 if dtype.itemsize == 1 else 0))
            assert kv_bytes_per_token(config.shape, dtype) == by_hand
            assert text == f"{by_hand:,}"


def test_the_worked_example_is_right() -> None:
    numbers = set(re.findall(r"\d[\d,.]*\d", section("Memory")))
    folder = find_shape("qwen3-0.6b")
    assert folder is not None
    config = ModelConfig.from_dir(folder)

    def plan(dtype: torch.dtype, max_model_len: int | None) -> Any:
        return plan_kv_cache(config.shape, dtype, 16, 4 << 30, max_model_len)

    whole, part, eight_bits = plan(torch.float32, None), plan(torch.float32, 4096), plan(torch.int8, None)
    assert {f"{4 << 30:,}", f"{whole.bytes_per_token:,}", f"{whole.num_blocks:,}"} <= numbers
    assert {f"{config.max_position_embeddings:,}", f"{whole.max_model_len:,}"} <= numbers
    assert part.max_model_len == 4096
    assert f"{part.num_tokens / part.max_model_len:.2f}" in numbers
    with pytest.raises(ConfigError, match="KV cache is too small"):
        plan(torch.float32, 40960)
    assert {f"{eight_bits.num_blocks:,}", f"{eight_bits.num_tokens:,}"} <= numbers


def test_defaults_are_those_of_generation_config() -> None:
    values: dict[str, Any] = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.5, "repetition_penalty": 2.0}
    others = {"do_sample": False, "max_new_tokens": 9}
    files = {"generation_config.json": json.dumps({**values, **others}).encode()}
    assert sampling_defaults(files) == values
    assert sampling_defaults({"generation_config.json": b'{"temperature": 101, "top_p": 0}'}) == API_DEFAULTS
    assert {*values, *others} <= set(re.findall(r"\w+", section("Defaults of requests")))


@pytest.fixture
def changed(saved: Path, tmp_path: Path) -> Callable[..., Path]:
    """changed(**fields) -> a copy of the checkpoint with other fields in its config.json."""

    def make(**fields: Any) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(saved, folder)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
        return folder

    return make


def cut(folder: Path) -> Path:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


def without(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


def with_json(folder: Path, name: str, content: object) -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder


def with_pipe(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    return folder


def with_nan(folder: Path, tensor: str) -> Path:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights[tensor][3] = float("nan")
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    return folder


def adapter_error(folder: Path, **options: Any) -> str:
    """What an engine says to an adapter with such fields, or with another matrix."""
    adapter = save_adapter(folder.parent / "adapter", folder, rank=8, targets=("q_proj",), **options)
    return startup_error(folder, lora=(f"a={adapter}",))


REFUSED: dict[str, Callable[[Callable[..., Path]], str]] = {
    "an architecture that cannot be served": lambda made: startup_error(made(architectures=["MambaForCausalLM"])),
    "another rotation": lambda made: startup_error(made(rope_parameters={"rope_type": "ntk", "rope_theta": 1e4})),
    "another quantization": lambda made: startup_error(made(quantization_config={"quant_method": "bitsandbytes"})),
    "a shape that is not the weights'": lambda made: startup_error(made(vocab_size=3000)),
    "no safetensors": lambda made: startup_error(without(made(), "model.safetensors")),
    "an incomplete download": lambda made: startup_error(cut(made())),
    "no tokenizer": lambda made: startup_error(without(made(), "tokenizer.json")),
    "a tokenizer without tokens": lambda made: startup_error(
        with_json(made(), "tokenizer.json", {"model": {"vocab": {}}})
    ),
    "an added token with a conflicting id": lambda made: startup_error(
        with_json(made(), "tokenizer_config.json", {"added_tokens_decoder": {"9999": {"content": "<new>"}}})
    ),
    "weights that are not finite": lambda made: startup_error(with_nan(made(), "model.norm.weight")),
    "not a regular file": lambda made: startup_error(with_pipe(made(), "generation_config.json")),
    "numbers out of range": lambda made: startup_error(made(num_hidden_layers=1_000_000)),
    "a template or JSON that is nested too deeply": lambda made: startup_error(
        with_json(made(), "tokenizer_config.json", {"chat_template": "{% if x %}" * 1000})
    ),
    "no such file or folder": lambda _: startup_error("nothing/is/here"),
    "16 bits with `--kernels torch` on a CPU": lambda made: startup_error(made(), dtype="bfloat16", kernels="torch"),
    "an 8-bit format of the other device": lambda made: startup_error(made(), quantization="fp8"),
    "a context above the model's limit": lambda made: startup_error(made(), max_model_len=600),
    "an adapter of another model": lambda made: adapter_error(
        made(),
        tensors={"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(8, 128)},
    ),
    "an adapter that is more than LoRA": lambda made: adapter_error(made(), use_dora=True),
    "a cache too small for one request": lambda made: startup_error(made(), kv_cache_memory_bytes=1000),
    "a cache too large for the machine": lambda made: startup_error(made(), kv_cache_memory_bytes=1 << 50),
    "a token budget below the number of slots": lambda made: startup_error(
        made(), max_num_seqs=600, max_num_batched_tokens=32
    ),
}


def pattern(line: str) -> re.Pattern[str]:
    """Matches a line of the page, with any sizes: they depend on the machine and on the version of the format."""
    sizes = r"\d[\d.]*(?= GiB| bytes|:)"
    return re.compile(r"[\d.]+".join(map(re.escape, re.split(sizes, line))))


LINES = [cells[1].strip("`") for cells in rows("Start-up errors")[1:]]


def test_every_line_of_the_page_has_a_case() -> None:
    assert len(LINES) == len(REFUSED)


@pytest.mark.parametrize("what", REFUSED)
def test_the_line_is_one_that_the_page_shows(what: str, changed: Callable[..., Path]) -> None:
    said = REFUSED[what](changed)
    assert "\n" not in said
    assert [line for line in LINES if pattern(line).search(said)], said
