"""A checkpoint in llama.cpp's format: one GGUF file, or the files of a split.

Its metadata become the fields of config.json that the families read; errors about them name the file.
"""

import math
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.model.checkpoint_file import exists, open_regular
from engine.model.config_fields import ConfigFields
from engine.model.gguf_architecture import GgufArchitecture
from engine.model.gguf_architectures import gguf_architecture
from engine.model.gguf_file import LOADED_TYPES, REQUANTIZED_TYPES, GgufHeader, read_gguf_header
from engine.model.gguf_metadata import GgufMetadata
from engine.model.gguf_stacks import split_stacks
from engine.model.gguf_tensor_layout import TensorLayout
from engine.model.gguf_tokenizer import check_tokenizer, end_token_ids, tokenizer_files
from engine.model.gguf_weights import GgufWeights
from engine.model.tensor_entry import TensorEntry

_DTYPES = {"F32": "float32", "F16": "float16"}  # of quantised weights, the range of bfloat16 holds all scales

_HEAD = "output.weight"
_FREQUENCIES = "rope_freqs.weight"
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_EMBEDDING = "token_embd.weight"
_MODEL_NAMES = {
    _EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    _HEAD: "lm_head.weight",
    "output.bias": "lm_head.bias",
    _FREQUENCIES: None,
    _SHORT_FACTORS: None,
    _LONG_FACTORS: None,
}
_FIELDS_OF_TENSORS = {
    **dict.fromkeys(("attention_bias", "use_bias", "use_qkv_bias"), "blk.0.attn_q.bias"),
    "mlp_bias": "blk.0.ffn_up.bias",
    "mamba_rms_norm": "blk.0.ssm_norm.weight",
    "use_qk_norm": "blk.0.attn_q_norm.weight",
    "qk_layernorm": "blk.0.attn_q_norm.0.weight",
}
"""Fields of config.json that say whether there is a tensor."""
_LAYER = re.compile(r"blk\.(\d{1,9})\.((?:shortconv\.)?\w+)(?:\.(\d{1,4}))?(?:\.(weight|bias|scale))?")
_OF_LAYER = re.compile(r"blk\.(\d{1,9})\..+")
_NORM = re.compile(r"(output|\w+\.\d+\.\w+)_norm\.weight")
_STATE_NORM, _DECAY, _CONVOLUTIONS = "ssm_norm", "ssm_a", ("ssm_conv1d", "shortconv.conv")  # of layers with state
_OF_HEADS = ("ssm_a", "ssm_d", "ssm_norm")
_NOT_ROTATED = 1e29
_SHARED_GATE = "ffn_gate_inp_shexp"
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_SPLITS = 1000


def _module(name: str) -> str:
    """Returns the module of a layer that a tensor is of; "": of none."""
    found = _LAYER.fullmatch(name)
    return "" if found is None else found[2]


def _with_all_dimensions(name: str, entry: TensorEntry) -> TensorEntry:
    """Returns a tensor as the decoder has it.

    llama.cpp leaves out the one channel per group of a convolution, and the one row of the gate of a shared expert.
    What a layer with state has per head, or per group of heads, has two dimensions there.
    """
    match _module(name), entry.shape:
        case _, (channels, width) if _module(name) in _CONVOLUTIONS:
            return replace(entry, shape=(channels, 1, width))
        case _, (columns,) if _module(name) == _SHARED_GATE:
            return replace(entry, shape=(1, columns))
        case module, (heads, size) if module in _OF_HEADS:
            return replace(entry, shape=(heads * size,))
    return entry


def _stack_size(module: str, metadata: GgufMetadata) -> int:
    """Returns the number of members of a stack."""
    match module:
        case "attn_q_norm":
            return metadata.num_heads
        case "attn_k_norm":
            return metadata.num_kv_heads
        case "altup_proj" | "altup_unembd_proj":
            return metadata.integer("altup.num_inputs") - 1
    return metadata.num_experts


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
    def _model(self) -> tuple[GgufArchitecture, GgufMetadata]:
        return gguf_architecture(self._header)

    @cached_property
    def _tensors(self) -> dict[str, TensorEntry]:
        return self._split(self._header)

    def _split(self, header: GgufHeader) -> dict[str, TensorEntry]:
        """Returns the tensors of a file as the decoder has them."""
        architecture, metadata = self._model
        tensors = split_stacks(header, {name: _stack_size(name, metadata) for name in architecture.stacks})
        return {name: _with_all_dimensions(name, entry) for name, entry in tensors.items()}

    def config(self) -> ConfigFields:
        """Returns the metadata as fields of config.json.

        Raises: CheckpointError: the file cannot be read, its architecture is not supported, or a value is malformed.
        """
        architecture, metadata = self._model
        own_fields = architecture.read_fields(metadata)
        tensors = {name: file for file in self.weights_files() for name in self.tensors(file)}
        head_dim, rotated_dim = metadata.head_dim, metadata.rotated_dim
        if rotated_dim != head_dim and not (architecture.rotates_parts and rotated_dim < head_dim):
            raise metadata.error(
                "rope.dimension_count", f"is {rotated_dim}, heads have {head_dim} dimensions: not supported"
            )
        values: dict[str, Any] = {
            "architectures": [architecture.architecture],
            "num_hidden_layers": metadata.num_layers,
            "hidden_size": metadata.integer("embedding_length"),
            "intermediate_size": metadata.intermediate_size,
            "num_attention_heads": metadata.num_heads,
            "num_key_value_heads": own_fields.get("num_key_value_heads") or metadata.num_kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": metadata.integer("context_length"),
            "rms_norm_eps": metadata.norm_epsilon,
            "rope_theta": metadata.number("rope.freq_base", 10000.0),
            "partial_rotary_factor": metadata.partial_rotary_factor,
            **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), self._vocab_size(tensors)),
            "tie_word_embeddings": _HEAD not in tensors,
            **{field: name in tensors for field, name in _FIELDS_OF_TENSORS.items()},
            "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
            "dtype": _DTYPES.get(self.tensors(tensors[_EMBEDDING])[_EMBEDDING].dtype, "bfloat16"),
            "eos_token_id": end_token_ids(self._header),
            "rope_scaling": None if "rope_parameters" in own_fields else self._rope_scaling(tensors),
            **own_fields,
        }
        if "rope_parameters" in own_fields and values["rope_parameters"]["full_attention"]["rope_type"] != "default":
            values["rope_parameters"]["full_attention"]["partial_rotary_factor"] = self._rotated_part(tensors)
        kinds = self._kinds(tensors)
        stored = GgufWeights.of(kinds)
        if architecture.model_type is not None:
            values["model_type"] = architecture.model_type
            stored = GgufWeights(kinds)
        if stored.kinds:
            values["quantization_config"] = stored
        return ConfigFields(str(self.path), values)

    def _rope_scaling(self, tensors: dict[str, Path]) -> dict[str, Any] | None:
        """Returns the scaling of the rotation, which is in tensors or in metadata."""
        _, metadata = self._model
        count = metadata.rotated_dim // 2
        if _FREQUENCIES in tensors:
            factors = self._numbers(tensors[_FREQUENCIES], _FREQUENCIES, count)
            return {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "attention_factor": 1.0,
            }
        if _SHORT_FACTORS not in tensors and _LONG_FACTORS not in tensors:
            return metadata.rope_scaling()
        scaling: dict[str, Any] = {"rope_type": "longrope"}
        for field, name in (("short_factor", _SHORT_FACTORS), ("long_factor", _LONG_FACTORS)):
            if name not in tensors:
                raise CheckpointError(f"{self.path}: tensor {name} is missing")
            scaling[field] = self._numbers(tensors[name], name, count)
        scaling["original_max_position_embeddings"] = metadata.integer("rope.scaling.original_context_length")
        if "rope.scaling.attn_factor" in metadata:
            scaling["attention_factor"] = metadata.number("rope.scaling.attn_factor")
        return scaling

    def _rotated_part(self, tensors: dict[str, Path]) -> float:
        """Returns the part of a head that layers without a window rotate: other frequencies are divided by 1e30."""
        if _FREQUENCIES not in tensors:
            raise CheckpointError(f"{self.path}: tensor {_FREQUENCIES} is missing")
        _, metadata = self._model
        divisors = self._numbers(tensors[_FREQUENCIES], _FREQUENCIES, metadata.rotated_dim // 2)
        num_rotated = divisors.count(1.0)
        if min(divisors[num_rotated:], default=math.inf) < _NOT_ROTATED:
            raise CheckpointError(
                f"{self.path}: tensor {_FREQUENCIES} is {divisors[:3]} to {divisors[-3:]}, expected 1 and then 1e30"
            )
        return num_rotated / len(divisors)

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

    def named_end_token_id(self) -> int | None:
        """Returns None: config has all end tokens, which are the tokenizer's."""
        return None

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

        Raises: CheckpointError: see `read_gguf_header` and `split_stacks`.
        """
        return self._tensors if file == self.path else self._split(read_gguf_header(file))

    def decoder_names(self) -> Callable[[str], str | None]:
        """Returns the names of the decoder; others are unchanged."""
        return self._decoder_name

    def layout(self, name: str) -> TensorLayout:
        """Returns how a tensor in the file differs from the decoder's.

        Raises: CheckpointError: the architecture is not supported, or a value is malformed.
        """
        architecture, metadata = self._model
        module = _module(name)
        heads = {"attn_q": metadata.num_heads, "attn_k": metadata.num_kv_heads} if architecture.rotates_pairs else {}
        return TensorLayout(
            num_rotated_heads=heads.get(module),
            offset=architecture.norm_offset if _NORM.fullmatch(name) and module != _STATE_NORM else 0.0,
            is_negative_exp=module == _DECAY,
        )

    def _decoder_name(self, name: str) -> str | None:
        architecture, metadata = self._model
        if name in architecture.model_names:
            return architecture.model_names[name]
        if name in _MODEL_NAMES:
            return _MODEL_NAMES[name]
        layer = _OF_LAYER.fullmatch(name)
        if layer is not None and int(layer[1]) >= metadata.num_layers and metadata.num_predicting_layers:
            return None  # it predicts the tokens behind the next one
        found = _LAYER.fullmatch(name)
        if found is None or (rest := architecture.layer_name(found[2], found[3], found[4])) is None:
            return name
        return f"model.layers.{found[1]}.{rest}"

    def _vocab_size(self, tensors: dict[str, Path]) -> int:
        if _EMBEDDING not in tensors:
            raise CheckpointError(f"{self.path}: tensor {_EMBEDDING} is missing")
        return self.tensors(tensors[_EMBEDDING])[_EMBEDDING].shape[0]

    def _kinds(self, tensors: dict[str, Path]) -> dict[str, str]:
        """Returns the types in which matrices in blocks are loaded, by the names of their layers in the decoder."""
        kinds = {}
        for file in dict.fromkeys(tensors.values()):
            for stored, entry in self.tensors(file).items():
                name = self._decoder_name(stored)
                if name is None or entry.dtype not in LOADED_TYPES:
                    continue
                if entry.dtype in REQUANTIZED_TYPES and find_spec("gguf") is None:
                    raise CheckpointError(
                        f"{file}: tensor {stored} is {entry.dtype}, which requires the package gguf: install "
                        "'chairlift[gguf]'"
                    )
                if len(entry.shape) == 2:
                    kinds[name.removesuffix(".weight")] = LOADED_TYPES[entry.dtype].name
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
