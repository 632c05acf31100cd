"""The values of a GGUF file that describe its model: keys that begin with the name of the architecture."""

import math
from typing import Any

from engine.errors import CheckpointError
from engine.model.gguf_file import GgufArray, GgufHeader

_MAX_HEAD_DIM = 8192
_MAX_LAYERS = 1024


class GgufMetadata:
    """Typed access to these values by the rest of their keys; errors name the file and the key."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self._header, self._fields, self._architecture = header, header.metadata, architecture

    def _key(self, name: str) -> str:
        return f"{self._architecture}.{name}"

    def __contains__(self, name: str) -> bool:
        return self._key(name) in self._fields

    def error(self, name: str, problem: str) -> CheckpointError:
        """Returns the error for an invalid value."""
        return self._fields.error(self._key(name), problem)

    def raw(self, name: str, *default: Any) -> Any:
        """Returns the unchecked value."""
        return self._fields.raw(self._key(name), *default)

    def integer(self, name: str, *default: int, minimum: int = 1) -> int:
        """Returns an integer, at least `minimum`."""
        return self._fields.integer(self._key(name), *default, minimum=minimum)

    def number(self, name: str, *default: float) -> float:
        """Returns a finite number > 0."""
        return self._fields.number(self._key(name), *default)

    def flag(self, name: str, default: bool) -> bool:
        """Returns a boolean."""
        return self._fields.flag(self._key(name), default)

    def refuse_others(self, name: str, supported: Any) -> None:
        """Raises CheckpointError if a value is there and is not the supported one."""
        if (value := self.raw(name, supported)) != supported:
            raise self.error(name, f"is {value!r}, supported in GGUF is {supported!r}")

    @property
    def num_layers(self) -> int:
        """Number of layers, without those that predict tokens behind the next one."""
        number = self.integer("block_count")
        if self.num_predicting_layers >= number:
            raise self.error("nextn_predict_layers", f"is {self.num_predicting_layers}, there are {number} layers")
        return number - self.num_predicting_layers

    @property
    def num_predicting_layers(self) -> int:
        """Number of layers behind the others that predict tokens behind the next one; they are not served."""
        return self.integer("nextn_predict_layers", 0, minimum=0)

    @property
    def norm_epsilon(self) -> float:
        """What norms add to a variance or a mean square."""
        of_means, of_squares = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
        return self.number(of_means if of_means in self and of_squares not in self else of_squares)

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.integer("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads, the same in all layers that have them."""
        name = "attention.head_count_kv"
        if not self.is_list(name):
            return self.integer(name, self.num_heads)
        counts = {*(heads := self.kv_heads_by_layer())} - {0}
        if len(counts) != 1:
            raise self.error(name, f"is {heads[:9]}, supported in GGUF is one number besides 0")
        return counts.pop()

    def kv_heads_by_layer(self) -> list[int]:
        """Returns the number of key and value heads of each layer; 0: it keeps a state instead."""
        name = "attention.head_count_kv"
        heads = self.integers_by_layer(name)
        if not all(0 <= count <= self.num_heads for count in heads):
            raise self.error(name, f"is {heads[:9]}, expected 0 to {self.num_heads} for each layer")
        return heads

    def is_list(self, name: str) -> bool:
        """Whether a value is an array."""
        return isinstance(self.raw(name, None), GgufArray)

    def integers_by_layer(self, name: str) -> list[int]:
        """Returns an integer, 0 or more, for each layer."""
        number, values = self._num_listed_layers(), self._header.integers(self._key(name))
        listed = values[:number]  # without those of layers that predict tokens behind the next one
        if len(values) not in (number, number + self.num_predicting_layers) or min(listed) < 0:
            raise self.error(name, f"is {values[:9]}, expected an integer >= 0 for each of {number} layers")
        return listed

    def numbers_by_layer(self, name: str) -> list[float]:
        """Returns a number for each layer, which may be infinite."""
        number, values = self._num_listed_layers(), self._header.numbers(self._key(name))
        if len(values) != number or any(math.isnan(value) for value in values):
            raise self.error(name, f"is {values[:9]}, expected a number for each of {number} layers")
        return values

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer; 0: there are none."""
        return self.integer("expert_count", 0, minimum=0)

    @property
    def intermediate_size(self) -> int:
        """Intermediate units of a feed-forward network that all tokens use: without dense layers, the shared expert.

        Of layers of several sizes, that of the first one that has a network.
        """
        name, shared = "feed_forward_length", "expert_shared_feed_forward_length"
        if self.is_list(name):
            sizes = [size for size in self.integers_by_layer(name) if size]
            return sizes[0] if sizes else 1
        return self.integer(name if name in self or shared not in self else shared)

    @property
    def head_dim(self) -> int:
        """Size of keys, queries and values of a head; of latent attention, of the part that is rotated."""
        if "attention.kv_lora_rank" in self:
            return self.integer("rope.dimension_count")
        head_dim = self.integer("attention.key_length", max(1, self.integer("embedding_length") // self.num_heads))
        if (size := self.integer("attention.value_length", head_dim)) != head_dim:
            raise self.error("attention.value_length", f"is {size}, heads have {head_dim} dimensions: not supported")
        if head_dim > _MAX_HEAD_DIM:
            raise self.error("attention.key_length", f"is {head_dim}, the maximum is {_MAX_HEAD_DIM}")
        return head_dim

    @property
    def rotated_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return self.integer("rope.dimension_count", self.head_dim)

    @property
    def partial_rotary_factor(self) -> float:
        """The part of a head that is rotated: what times its size is, rounded down, `rotated_dim`."""
        factor = self.rotated_dim / self.head_dim
        return factor if int(self.head_dim * factor) == self.rotated_dim else math.nextafter(factor, 1.0)

    @property
    def sliding_window(self) -> int | None:
        """Number of tokens of a window; None: 0 or absent."""
        return self.integer("attention.sliding_window", 0, minimum=0) or None

    def layer_types(self, period: int) -> list[str]:
        """Returns `layer_types` of config.json: by default all layers but every `period`-th have the window."""
        number, name = self._num_listed_layers(), "attention.sliding_window_pattern"
        if self.is_list(name):
            have_windows = self._header.flags(self._key(name))
            if len(have_windows) != number:
                raise self.error(name, f"has {len(have_windows)} entries, {self._key('block_count')} is {number}")
        else:
            period = self.integer(name, period)
            have_windows = [(layer + 1) % period != 0 for layer in range(number)]
        return ["sliding_attention" if has_window else "full_attention" for has_window in have_windows]

    def attending_layers(self, period: int) -> list[bool]:
        """Returns whether each layer attends, of a model with layers that keep a state instead."""
        number, name = self._num_listed_layers(), "attention.recurrent_layers"
        if name not in self:
            period = self.integer("full_attention_interval", period)
            return [(layer + 1) % period == 0 for layer in range(number)]
        are_recurrent = self._header.flags(self._key(name))
        if len(are_recurrent) not in (number, number + self.num_predicting_layers):
            raise self.error(name, f"has {len(are_recurrent)} entries, expected one for each of {number} layers")
        return [not is_recurrent for is_recurrent in are_recurrent[:number]]

    def _num_listed_layers(self) -> int:
        """Returns the number of layers of a list of them, which a hostile file must not make too long."""
        if (number := self.num_layers) > _MAX_LAYERS:
            raise self.error("block_count", f"is {number}, the maximum is {_MAX_LAYERS}")
        return number

    def rope_scaling(self) -> dict[str, Any] | None:
        """Returns the rotation of contexts longer than in pre-training, as config.json has it; None: unscaled.

        A factor without a type is linear, as in llama.cpp, and so is the factor under its name in files of 2023.
        """
        factor_name = next((name for name in ("rope.scaling.factor", "rope.scale_linear") if name in self), None)
        kind = self.raw("rope.scaling.type", "none" if factor_name is None else "linear")
        if kind == "none":
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": self.number(factor_name or "rope.scaling.factor")}
        if kind != "yarn":
            raise self.error("rope.scaling.type", f"is {kind!r}, supported in GGUF are none, linear, yarn, longrope")
        factor = self.number("rope.scaling.factor")
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.integer("rope.scaling.original_context_length"),
            "beta_fast": self.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self.number("rope.scaling.yarn_beta_slow", 1.0),
        }
        if "rope.scaling.yarn_log_multiplier" in self:
            scaling |= {"mscale": 1.0, "mscale_all_dim": self.number("rope.scaling.yarn_log_multiplier")}
        if "rope.scaling.attn_factor" in self:  # of the usual one
            usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
            scaling["attention_factor"] = self.number("rope.scaling.attn_factor") * usual
        return scaling
