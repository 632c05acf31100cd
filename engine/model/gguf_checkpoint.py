"""A checkpoint in llama.cpp's format: one GGUF file, or the files of a split.

Its metadata become the fields of config.json that the families read; errors about them name the file.
"""

import re
import struct
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.model.checkpoint_file import exists, open_regular
from engine.model.config_fields import ConfigFields
from engine.model.gguf_file import QUANTIZED_TYPES, GgufHeader, read_gguf_header
from engine.model.gguf_tokenizer import check_tokenizer, end_token_ids, tokenizer_files
from engine.model.gguf_weights import GgufWeights
from engine.model.tensor_entry import TensorEntry

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""general.architecture -> the entry of `architectures` in config.json."""

_ROTATED_IN_PAIRS = {"llama": ("attn_q", "attn_k")}
"""Projections of which files have the rows of each head in another order: llama.cpp rotates neighbours."""

_DTYPES = {"F32": "float32", "F16": "float16"}  # of quantised weights, the range of bfloat16 holds all scales

_HEAD = "output.weight"
_FREQUENCIES = "rope_freqs.weight"
_EMBEDDING = "token_embd.weight"
_MODEL_NAMES = {
    _EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    _HEAD: "lm_head.weight",
    _FREQUENCIES: None,
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d{1,9})\.(\w+)\.(weight|bias)")
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_SPLITS = 1000
_MAX_HEAD_DIM = 8192


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return path.suffix == ".gguf" and not path.is_dir()


class GgufCheckpoint:
    """A file, whose header is read when it is first needed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _header(self) -> GgufHeader:
        return read_gguf_header(self.path)

    @cached_property
    def _fields(self) -> "_Metadata":
        return _Metadata(self._header.metadata)

    def config(self) -> ConfigFields:
        """Returns the metadata as fields of config.json.

        Raises: CheckpointError: the file cannot be read, its architecture is not supported, or a value is malformed.
        """
        fields = self._fields
        tensors = {name: file for file in self.weights_files() for name in self.tensors(file)}
        head_dim = fields.head_dim
        values: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[fields.architecture]],
            "num_hidden_layers": fields.integer("block_count"),
            "hidden_size": fields.integer("embedding_length"),
            "intermediate_size": fields.integer("feed_forward_length"),
            "num_attention_heads": fields.num_heads,
            "num_key_value_heads": fields.num_kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": fields.integer("context_length"),
            "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
            "rope_theta": fields.number("rope.freq_base", 10000.0),
            "vocab_size": self._vocab_size(tensors),
            "tie_word_embeddings": _HEAD not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "dtype": _DTYPES.get(self.tensors(tensors[_EMBEDDING])[_EMBEDDING].dtype, "bfloat16"),
            "eos_token_id": end_token_ids(self._header),
            "rope_scaling": fields.rope_scaling,
        }
        if _FREQUENCIES in tensors:
            factors = self._numbers(tensors[_FREQUENCIES], _FREQUENCIES, head_dim // 2)
            values["rope_scaling"] = {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "attention_factor": 1.0,
            }
        stored = GgufWeights.of(self._kinds(tensors))
        if stored.kinds:
            values["quantization_config"] = stored
        return ConfigFields(str(self.path), values)

    def generation_config(self) -> ConfigFields | None:
        """Returns None: end tokens are in `config`."""
        return None

    def description(self) -> bytes:
        """Returns the header of the file."""
        return self._header.raw

    def require_tokenizer(self) -> None:
        """Checks that the tokenizer is supported.

        Raises: CheckpointError: it is not.
        """
        check_tokenizer(self._header)

    def tokenizer_files(self) -> dict[str, bytes]:
        """Returns the files that a Hugging Face tokenizer has.

        Raises: CheckpointError: see `engine.model.gguf_tokenizer.tokenizer_files`.
        """
        return tokenizer_files(self._header)

    def weights_files(self) -> list[Path]:
        """Returns the file, or all files of a split.

        Raises: CheckpointError: the file is not the first of a split, or another one is missing.
        """
        fields = self._header.metadata
        count = fields.integer("split.count", 1, minimum=0, maximum=_MAX_SPLITS)
        if count <= 1:
            return [self.path]
        number = fields.integer("split.no", minimum=0)
        named = _SPLIT.fullmatch(self.path.name)
        if named is None or int(named[3]) != count or int(named[2]) != number + 1:
            raise fields.error(
                "split.count", f"is {count} and split.no {number}: expected a name like NAME-00001-of-{count:05d}.gguf"
            )
        files = [self.path.with_name(f"{named[1]}-{index:05d}-of-{count:05d}.gguf") for index in range(1, count + 1)]
        if number != 0:
            raise fields.error("split.no", f"is {number}: pass the first file, {files[0].name}")
        for file in files:
            if not exists(file):
                raise CheckpointError(f"{file}: missing, the split has {count} files")
        return files

    def tensors(self, file: Path) -> dict[str, TensorEntry]:
        """Returns the tensors of a file.

        Raises: CheckpointError: see `read_gguf_header`.
        """
        return self._header.tensors if file == self.path else read_gguf_header(file).tensors

    def decoder_names(self) -> Callable[[str], str | None]:
        """Returns the names of the decoder; others are unchanged."""
        return _decoder_name

    def num_rotated_heads(self, name: str) -> int | None:
        """Returns the number of heads in the rows of a tensor whose order llama.cpp changes; None: it does not.

        Raises: CheckpointError: the architecture is not supported, or a value is malformed.
        """
        found = _LAYER.fullmatch(name)
        if found is None or found[2] not in _ROTATED_IN_PAIRS.get(self._fields.architecture, ()):
            return None
        return self._fields.num_heads if found[2] == "attn_q" else self._fields.num_kv_heads

    def _vocab_size(self, tensors: dict[str, Path]) -> int:
        if _EMBEDDING not in tensors:
            raise CheckpointError(f"{self.path}: tensor {_EMBEDDING} is missing")
        return self.tensors(tensors[_EMBEDDING])[_EMBEDDING].shape[0]

    def _kinds(self, tensors: dict[str, Path]) -> dict[str, str]:
        """Returns the types of matrices in blocks by the names of their layers in the decoder."""
        kinds = {}
        for file in dict.fromkeys(tensors.values()):
            for stored, entry in self.tensors(file).items():
                name = _decoder_name(stored)
                if name is not None and len(entry.shape) == 2 and entry.dtype in QUANTIZED_TYPES:
                    kinds[name.removesuffix(".weight")] = entry.dtype
        return kinds

    def _numbers(self, file: Path, name: str, count: int) -> list[float]:
        """Returns the values of a small tensor."""
        entry = self.tensors(file)[name]
        if entry.dtype != "F32" or entry.shape != (count,):
            raise CheckpointError(
                f"{file}: tensor {name} is {entry.dtype} of shape {list(entry.shape)}, expected F32 of [{count}]"
            )
        with open_regular(file) as reader:
            reader.seek(entry.start)
            return list(struct.unpack(f"<{count}f", reader.read(4 * count)))


class _Metadata:
    """The values of an architecture, whose keys begin with its name."""

    def __init__(self, fields: ConfigFields) -> None:
        self._fields = fields
        architecture = fields.raw("general.architecture")
        if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
            raise fields.error(
                "general.architecture",
                f"is {architecture!r}, supported in GGUF are {', '.join(_ARCHITECTURES)}; serve the original "
                "checkpoint in safetensors",
            )
        self.architecture = architecture
        for name in ("attention.sliding_window", "expert_count"):
            if fields.raw(self._key(name), 0) != 0:
                raise fields.error(self._key(name), f"is {fields.raw(self._key(name))!r}, supported in GGUF is 0")

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def integer(self, name: str, *default: int) -> int:
        return self._fields.integer(self._key(name), *default)

    def number(self, name: str, *default: float) -> float:
        return self._fields.number(self._key(name), *default)

    @property
    def num_heads(self) -> int:
        return self.integer("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        return self.integer("attention.head_count_kv", self.num_heads)

    @property
    def head_dim(self) -> int:
        """Size of a head: all of it is rotated, and values have the same."""
        head_dim = self.integer("attention.key_length", max(1, self.integer("embedding_length") // self.num_heads))
        for name in ("attention.value_length", "rope.dimension_count"):
            if (size := self.integer(name, head_dim)) != head_dim:
                raise self._fields.error(self._key(name), f"is {size}, heads have {head_dim} dimensions: not supported")
        if head_dim > _MAX_HEAD_DIM:
            raise self._fields.error(
                self._key("attention.key_length"), f"is {head_dim}, the maximum is {_MAX_HEAD_DIM}"
            )
        return head_dim

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """The rotation of contexts longer than in pre-training, as config.json has it."""
        kind = self._fields.raw(self._key("rope.scaling.type"), "none")
        if kind == "none":
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": self.number("rope.scaling.factor")}
        if kind == "yarn":
            return {
                "rope_type": "yarn",
                "factor": self.number("rope.scaling.factor"),
                "original_max_position_embeddings": self.integer("rope.scaling.original_context_length"),
            }
        raise self._fields.error(
            self._key("rope.scaling.type"), f"is {kind!r}, supported in GGUF are none, linear, yarn"
        )


def _decoder_name(name: str) -> str | None:
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in _LAYER_NAMES:
        return name
    return f"model.layers.{found[1]}.{_LAYER_NAMES[found[2]]}.{found[3]}"
