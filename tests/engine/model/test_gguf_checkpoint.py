"""A GGUF file is the model of the folder that it was converted from."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.bench.gguf_writer import Tensor, metadata_of, plain, save_gguf, tensors_of, write_gguf
from engine.errors import CheckpointError, ConfigError
from engine.model.checkpoint import open_checkpoint
from engine.model.config import ModelConfig
from engine.model.fingerprint import weights_fingerprint
from engine.model.implementation import choose_implementation
from engine.model.loader import cpu_checkpoint_dtype
from engine.model.model_folder import check_folder, local_model
from kernels.dtypes import dtype_name
from tests.support.engine.weights import check_same_tensors, loaded_tensors

NAMES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"sliding_window": 24},
    "smollm3": {"no_rope_layers": None, "num_hidden_layers": 4},
    "granite": {},
    "glm4": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "layer_types": None, "num_hidden_layers": 7},
    "olmo2": {},
    "olmo3": {},
    "mixtral": {},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},
}
"""Checkpoints of `make_checkpoint`, with what llama.cpp's format can say."""


@pytest.mark.parametrize(
    ("name", "is_tied"),
    [(name, is_tied) for name in NAMES for is_tied in (False, True) if "gemma" not in name or is_tied],
)
def test_configuration_and_weights_are_those_of_the_folder(
    make_checkpoint: Any, tmp_path: Path, name: str, is_tied: bool
) -> None:
    is_tied |= "gemma" in name  # always
    folder, path = make_checkpoint(name, tie_word_embeddings=is_tied, **NAMES[name]), tmp_path / "model.gguf"
    save_gguf(folder, path)
    assert ModelConfig.from_dir(path) == ModelConfig.from_dir(folder)
    assert choose_implementation(path, "auto") == "chairlift"
    found, expected = loaded_tensors(path), loaded_tensors(folder)
    if "gemma" in name:  # whose files have the sum that the decoder computes
        norms = [name for name in found if name.endswith("norm.weight")]
        check_same_tensors(
            {name: found.pop(name) + 1 for name in norms}, {name: expected.pop(name) + 1 for name in norms}
        )
    check_same_tensors(found, expected)


def test_biases_of_llama_are_in_the_order_of_their_rows(make_checkpoint: Any, tmp_path: Path) -> None:
    folder, path = make_checkpoint("llama", attention_bias=True, mlp_bias=True), tmp_path / "model.gguf"
    save_gguf(folder, path)
    assert ModelConfig.from_dir(path).traits == ModelConfig.from_dir(folder).traits
    check_same_tensors(loaded_tensors(path), loaded_tensors(folder))


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_16_bits_are_read_as_they_are(make_checkpoint: Any, tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    folder, path = make_checkpoint("qwen3"), tmp_path / "model.gguf"
    save_gguf(folder, path, kind)
    rounded = {
        name: tensor.to(dtype).float() if tensor.ndim == 2 else tensor
        for name, tensor in loaded_tensors(folder).items()
    }
    check_same_tensors(loaded_tensors(path), rounded)
    config = ModelConfig.from_dir(path)
    assert config.checkpoint_dtype == dtype_name(dtype)
    assert cpu_checkpoint_dtype(path, config) == "float32", "norms of the checkpoint have more bits"
    save_gguf(make_checkpoint("qwen3", dtype=dtype_name(dtype)), path, kind)
    assert cpu_checkpoint_dtype(path, config) == dtype_name(dtype)


def test_a_split_is_one_model(make_checkpoint: Any, tmp_path: Path) -> None:
    folder = make_checkpoint("llama")
    metadata, tensors = metadata_of(folder), list(tensors_of(folder).items())
    files = [tmp_path / f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for number, file in enumerate(files):
        split = {"split.no": number, "split.count": 3, "split.tensors.count": len(tensors)}
        write_gguf(file, split | (metadata if number == 0 else {}), dict(tensors[number::3]))
    check_same_tensors(loaded_tensors(files[0]), loaded_tensors(folder))
    with pytest.raises(CheckpointError, match=r"split\.no is 1: pass the first file, m-00001-of-00003\.gguf"):
        open_checkpoint(files[1]).weights_files()
    shutil.copy(files[0], tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"split\.count is 3 and split\.no 0: expected a name like NAME-00001"):
        open_checkpoint(tmp_path / "other.gguf").weights_files()
    files[2].unlink()
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003\.gguf: missing, the split has 3 files"):
        ModelConfig.from_dir(files[0])


@pytest.mark.parametrize(
    ("family", "tokens", "types", "ids", "found"),
    [
        ("llama", ("<|im_end|>", "<|eot_id|>", "a", "<|im_end|>"), (1, 3, 3, 3), {"eot": 7}, {1, 2, 3, 7}),
        # its files name two of the three end tokens of its generation_config.json, the third is behind calls of tools
        (
            "glm4",
            ("<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>"),
            (3, 3, 3, 3),
            {"eos": 0, "eot": 1},
            {0, 1, 2},
        ),
    ],
    ids=["llama", "glm4"],
)
def test_tokens_that_end_an_answer_come_from_keys_and_texts(
    make_checkpoint: Any,
    tmp_path: Path,
    family: str,
    tokens: tuple[str, ...],
    types: tuple[int, ...],
    ids: dict[str, int],
    found: set[int],
) -> None:
    folder, path = make_checkpoint(family), tmp_path / "model.gguf"
    metadata = {"tokenizer.ggml.tokens": [*tokens], "tokenizer.ggml.token_type": [*types]}
    metadata |= {f"tokenizer.ggml.{kind}_token_id": number for kind, number in ids.items()}
    write_gguf(path, metadata_of(folder) | metadata, tensors_of(folder))
    assert ModelConfig.from_dir(path).end_token_ids == found


def test_end_tokens_may_have_the_type_of_users_tokens(make_checkpoint: Any, tmp_path: Path) -> None:
    """As early converters gave them to Phi-3. Gemma has </s> of this type, as a tag of HTML."""
    folder, path = make_checkpoint("llama"), tmp_path / "model.gguf"
    tokens = {
        "tokenizer.ggml.tokens": ["<|endoftext|>", "<eos>", "<|end|>", "</s>", "<|assistant|>"],
        "tokenizer.ggml.token_type": [3, 3, 4, 4, 4],
        "tokenizer.ggml.eos_token_id": 0,
    }
    write_gguf(path, metadata_of(folder) | tokens, tensors_of(folder))
    assert ModelConfig.from_dir(path).end_token_ids == {0, 1, 2}


def test_other_metadata_or_weights_are_another_model(make_checkpoint: Any, tmp_path: Path) -> None:
    folder = make_checkpoint("llama")
    metadata, tensors = metadata_of(folder), tensors_of(folder)
    paths = [tmp_path / str(number) / "a.gguf" for number in range(4)]
    for path in paths:
        path.parent.mkdir()
    write_gguf(paths[0], metadata, tensors)
    write_gguf(paths[1], metadata, tensors)
    write_gguf(paths[2], metadata | {"general.name": "other"}, tensors)
    write_gguf(paths[3], metadata, tensors | {"output_norm.weight": plain(torch.ones(64), "F32")})
    assert weights_fingerprint(paths[0]) == weights_fingerprint(paths[1])
    assert len({weights_fingerprint(path) for path in paths}) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"general.architecture": "orion"},
            "general.architecture is 'orion', supported in GGUF are llama, mistral3, qwen2, qwen2vl, qwen3, ",
        ),
        (
            {"general.architecture": "mamba"},
            "general.architecture is 'mamba', which cannot be served: its layers keep state that is no KV cache; ser",
        ),
        ({"general.architecture": 3}, "general.architecture is 3, supported in GGUF"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": -1}, "llama.block_count is -1, expected an integer >= 1"),
        ({"llama.block_count": 2000}, "num_hidden_layers is 2000, the maximum is 1024"),
        (
            {"llama.attention.head_count_kv": [2, 1]},
            r"llama.attention.head_count_kv is \[2, 1\], supported in GGUF is one number besides 0",
        ),
        ({"llama.attention.head_count_kv": 3}, "num_attention_heads is 4, not a multiple of num_key_value_heads 3"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8, heads have 16 dimensions"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8, heads have 16 dimensions"),
        ({"llama.attention.key_length": 16384}, "llama.attention.value_length is 16, heads have 16384 dimensions"),
        ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
        ({"llama.expert_count": -1}, "llama.expert_count is -1, expected an integer >= 0"),
        ({"llama.attention.sliding_window": 8}, "llama.attention.sliding_window is 8, supported in GGUF is 0"),
        (
            {"llama.rope.scaling.type": "longrope"},
            "llama.rope.scaling.type is 'longrope', supported in GGUF are none",
        ),
        ({"llama.rope.freq_base": -1.0}, "llama.rope.freq_base is -1.0, expected a number > 0"),
        ({"split.count": 5000}, "split.count is 5000, the maximum is 1000"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5', supported are 'gpt2'"),
    ],
)
def test_metadata_that_are_not_supported_are_refused_by_name(
    make_checkpoint: Any, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder, path = make_checkpoint("llama"), tmp_path / "model.gguf"
    metadata = {key: value for key, value in (metadata_of(folder) | change).items() if value is not None}
    write_gguf(path, metadata, tensors_of(folder))
    with pytest.raises(CheckpointError, match=f"^{path}: {words}"):
        check_folder(path)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen3", {"qwen3.expert_count": 8}, "qwen3.expert_count is 8, supported in GGUF is 0"),
        ("mixtral", {"llama.expert_used_count": 5}, "num_experts_per_tok is 5, num_local_experts is 4"),
        (
            "mixtral",
            {"llama.expert_shared_feed_forward_length": 64},
            "llama.expert_shared_feed_forward_length is 64, supported in GGUF is 0",
        ),
        ("granite", {"granite.rope.scaling.finetuned": False}, "finetuned is False, supported in GGUF is True"),
        ("granite", {"granite.logit_scale": None}, "granite.logit_scale is missing"),
        (
            "glm4",
            {"glm4.rope.dimension_sections": [8, 12, 12, 0]},
            "glm4.rope.dimension_sections is an array of 4 values, supported in GGUF is 'absent'",
        ),
        ("granite", {"granite.expert_count": 8}, "granite.expert_count is 8, supported in GGUF is 0"),
        (
            "mistral",
            {"mistral3.attention.temperature_scale": 0.1},
            "mistral3.rope.scaling.type is not yarn, as attention.temperature_scale requires",
        ),
        ("phi3", {"phi3.attention.sliding_window": -1}, "sliding_window is -1, expected an integer >= 0"),
        ("phi3", {"phi3.rope.dimension_count": 32}, "rope.dimension_count is 32, heads have 16 dimensions"),
        ("phi3", {"phi3.rope.dimension_count": 15}, "partial_rotary_factor is .*, which rotates 15 of 16 dimensions"),
        (
            "olmo3",
            {"olmo2.attention.sliding_window_pattern": [True]},
            "sliding_window_pattern has 1 entries, olmo2.block_count is 2",
        ),
        (
            "olmo3",
            {"olmo2.attention.sliding_window_pattern": [1, 2]},
            "sliding_window_pattern is an array of 2 values of another type, expected booleans",
        ),
        ("olmo3", {"olmo2.attention.sliding_window_pattern": 0}, "pattern is 0, expected an integer >= 1"),
        ("gemma3", {"gemma3.block_count": 1 << 30}, "gemma3.block_count is 1073741824, the maximum is 1024"),
        (
            "qwen3_5",
            {"qwen35.attention.recurrent_layers": [True, False]},
            "recurrent_layers has 2 entries, expected one for each of 3 layers",
        ),
        (
            "qwen3_5",
            {"qwen35.attention.recurrent_layers": [True] * 3},
            "layer_types gives none of 3 layers full_attention",
        ),
        ("qwen3_5", {"qwen35.attention.recurrent_layers": True}, "recurrent_layers is True, expected an array"),
        ("qwen3_5", {"qwen35.nextn_predict_layers": 3}, "nextn_predict_layers is 3, there are 3 layers"),
        ("qwen3_5", {"qwen35.ssm.inner_size": 65}, "inner_size is 65, not a multiple of the 4 heads"),
        (
            "qwen2_moe",
            {"qwen2moe.expert_shared_feed_forward_length": None},
            "qwen2moe.expert_shared_feed_forward_length is missing",
        ),
        (
            "qwen3_5_moe",
            {"qwen35moe.expert_shared_feed_forward_length": 0},
            "expert_shared_feed_forward_length is 0, expected an integer >= 1",
        ),
        ("qwen3_next", {"qwen3next.expert_count": None}, "qwen3next.expert_count is missing"),
        ("qwen3_5", {"qwen35.ssm.time_step_rank": 0}, "time_step_rank is 0, expected an integer >= 1"),
        ("gemma2", {"gemma2.final_logit_softcapping": -1.0}, "softcapping is -1.0, expected a number > 0"),
    ],
)
def test_metadata_of_an_architecture_are_refused_by_name(
    make_checkpoint: Any, tmp_path: Path, name: str, change: dict[str, Any], words: str
) -> None:
    folder, path = make_checkpoint(name), tmp_path / "model.gguf"
    metadata = {key: value for key, value in (metadata_of(folder) | change).items() if value is not None}
    write_gguf(path, metadata, tensors_of(folder))
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_dir(path)


THREE_EXPERTS = plain(torch.zeros(3, 112, 64), "F32")


def test_experts_of_another_number_are_refused(make_checkpoint: Any, tmp_path: Path) -> None:
    folder, path = make_checkpoint("mixtral"), tmp_path / "model.gguf"
    write_gguf(path, metadata_of(folder), tensors_of(folder) | {"blk.0.ffn_up_exps.weight": THREE_EXPERTS})
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.ffn_up_exps\.weight is not part of this architecture"):
        loaded_tensors(path)
    tensors = tensors_of(folder)
    tensors["blk.0.attn_q.1.weight"] = tensors.pop("blk.0.attn_q.weight")
    write_gguf(path, metadata_of(folder), tensors)
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.attn_q\.1\.weight is not part of this architecture"):
        loaded_tensors(path)


def test_too_many_experts_are_refused(make_checkpoint: Any, tmp_path: Path) -> None:
    folder, path = make_checkpoint("mixtral"), tmp_path / "model.gguf"
    metadata = metadata_of(folder) | {"llama.expert_count": 1 << 19}
    tensors = tensors_of(folder) | {"blk.0.ffn_up_exps.weight": plain(torch.zeros(1 << 19, 1, 1), "F16")}
    write_gguf(path, metadata, tensors)
    with pytest.raises(
        CheckpointError, match=r"model\.gguf: tensor blk\.0\.ffn_up_exps\.weight: stacks have more than"
    ):
        ModelConfig.from_dir(path)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("token_embd.weight", None, "tensor token_embd.weight is missing"),
        (
            "blk.1.attn_q.weight",
            None,
            "1 of 21 tensors are missing, the first is model.layers.1.self_attn.q_proj",
        ),
        ("blk.0.attn_rot_embd.weight", plain(torch.ones(4), "F32"), "tensor blk.0.attn_rot_embd.weight is not part of"),
        ("blk.2.attn_norm.weight", plain(torch.ones(64), "F32"), "tensor blk.2.attn_norm.weight is not part of"),
        ("blk.0.ffn_up.weight", plain(torch.ones(64, 64), "F16"), r"\[64, 64\], the metadata requires \[112, 64\]"),
        ("output_norm.weight", plain(torch.full((64,), torch.nan), "F32"), "tensor output_norm.weight holds NaN"),
        (
            "rope_freqs.weight",
            plain(torch.ones(4), "F32"),
            r"is F32 of shape \[4\], expected F32 of \[8\]",
        ),
        (
            "rope_freqs.weight",
            plain(torch.zeros(8), "F32"),
            r"short_factor is \[0.0, .* expected a list of numb",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    make_checkpoint: Any, tmp_path: Path, name: str, tensor: Tensor | None, words: str
) -> None:
    folder, path = make_checkpoint("llama"), tmp_path / "model.gguf"
    tensors = {key: value for key, value in {**tensors_of(folder), name: tensor}.items() if value is not None}
    write_gguf(path, metadata_of(folder), tensors)
    with pytest.raises(CheckpointError, match=words):
        loaded_tensors(path)


def test_a_file_is_a_model_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(CheckpointError, match=r"model\.gguf: no such file or folder"):
        local_model(str(path))
    path.touch()
    assert local_model(str(path)) == path


def test_transformers_reads_no_gguf_of_a_family(make_checkpoint: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_gguf(make_checkpoint("llama"), path)
    with pytest.raises(ConfigError, match="transformers is not supported for GGUF files of LlamaForCausalLM, such as"):
        choose_implementation(path, "transformers")
