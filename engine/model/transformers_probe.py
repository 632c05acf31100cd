"""Finds out whether a model of transformers can run over the paged KV cache, and with which heads.

The model is built on meta tensors, without memory, and computes two tokens with a recorder in place of attention. It
can be served if each layer attends once and causally, in ways that paged attention has, and nothing else mixes tokens.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from engine.errors import CheckpointError
from engine.model.checkpoint import open_checkpoint, stored_dtype
from engine.model.end_tokens import end_token_ids
from engine.model.fp8 import Fp8Weights
from engine.model.gguf_joint import halves_of
from engine.model.gguf_weights import GgufWeights
from engine.model.implementation import CACHED_LAYERS, STATEFUL_LAYERS
from engine.model.linear import Kept
from engine.model.model_shape import LayerShape, ModelShape
from engine.model.quantization_config import QuantizedWeights, read_quantization_config
from engine.model.stored_experts import DOWN, GATE_UP, ExpertsShape, names_of_first
from engine.model.tensor_entry import TensorEntry
from engine.model.text_part import transformers_fields
from engine.model.transformers_adapters import LinearProbe
from engine.model.transformers_config import causal_class, first_line, read_config, refusal
from engine.model.transformers_experts import PROBED_EXPERTS, experts_shapes
from engine.model.transformers_latents import keep_latents, means_of_values, queries_of_latents
from engine.model.transformers_states import StatefulLayer, StateProbe
from engine.model.transformers_weights import LinearShape, linear_layer
from engine.model.weights import exact_dtype
from kernels.dtypes import dtype_name

ATTENTION = "chairlift"
"""Name under which layers find `Attend` in transformers' attention interface; it has no masks for this name."""

Attend = Callable[["AttentionCall"], torch.Tensor]
"""Attention of one layer -> [1, T, num_heads, size of a value head]."""

_HEAD_MULTIPLE = 16  # of the GPU's attention; keys and values are padded with zeros
_KNOWN_OPTIONS = {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids"}


class AttentionCall(NamedTuple):
    """What a layer passes to the attention interface.

    Attributes:
        layer_index: layer of the model.
        query: [1, num_heads, T, head size].
        key, value: [1, num_kv_heads, T, head size], each with a size of its own.
        scale: softmax scale; some layers pass a tensor of one element.
        sliding_window: tokens that a token sees, itself included; None: all before it.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None: they are unchanged.
        sinks: [num_heads], a score of each head that takes part in the softmax and has no value; None: none.
    """

    layer_index: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float | torch.Tensor
    sliding_window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None
    has_latents: bool = False


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """A model that transformers computes.

    Attributes:
        path: folder of the checkpoint.
        name: its architecture.
        shape: of the model; a head is the larger of a key and a value, rounded up. Latents may be stored once.
        attention_layers: layers that attend, in the order of the shape's.
        stateful_layers: layers with state besides keys and values.
        linear_layers: linear layers by their names, an output head only in the blocks of a GGUF file.
        tied_head: name of an embedding in such blocks that is the output head too, and sizes of the head.
        adaptable_layers: those that adapters can change, see `LinearProbe`.
        experts: modules of experts that `KernelOps` computes, by their names.
        quantized: how the checkpoint quantises linear layers, and which; None: it does not.
        num_parameters: all parameters; an output head that shares the embedding counts too, because it is packed.
        hidden_size, intermediate_size: widths of the layers.
        sliding_windows: of the layers that attend; None: no window.
        soft_caps: the different limits of attention scores; None: no limit.
        unrecordable: why a step cannot be recorded as a CUDA graph; None: it can.
        original_positions: positions up to which a longrope rotation uses its short factors; None: another rotation.
        has_latents: whether layers attend over latents, see `keep_latents`.
    """

    path: Path
    name: str
    shape: ModelShape
    attention_layers: tuple[int, ...]
    stateful_layers: tuple[StatefulLayer, ...]
    linear_layers: Mapping[str, LinearShape]
    tied_head: tuple[str, LinearShape] | None
    adaptable_layers: frozenset[str]
    experts: Mapping[str, ExpertsShape]
    quantized: QuantizedWeights | None
    num_parameters: int
    hidden_size: int
    intermediate_size: int
    sliding_windows: tuple[int | None, ...]
    soft_caps: tuple[float | None, ...]
    unrecordable: str | None
    original_positions: int | None
    has_latents: bool

    @classmethod
    def from_dir(
        cls, path: Path, *, may_keep_latents: bool = True, may_share_latents: bool = False
    ) -> "TransformersConfig":
        """Probes the model of a checkpoint folder that `choose_implementation` has let pass; reads no weights.

        Args:
            path: the folder.
            may_keep_latents: whether layers that can do so attend over latents.
            may_share_latents: whether the cache may have such values as part of the keys, see `LayerShape.value_dim`.
        Raises: CheckpointError: the model cannot be served; says why.
        """
        config = read_config(path)
        text = config.get_text_config()
        recorder = _Recorder(
            getattr(text, "layer_types", None), _common_window(text), may_share_latents=may_share_latents
        )
        try:
            with torch.device("meta"), _without_checks_of_values():
                model = build(config, experts=PROBED_EXPERTS)
                plain = keep_latents(model) if may_keep_latents else ()
                states, linear = StateProbe(model), LinearProbe(model)

                def attend(call: AttentionCall) -> torch.Tensor:
                    states.note_attention()
                    return recorder.attend(call)

                set_attend(model, attend)
                # Logits of one token: layers behind all others get fewer rows than the step has tokens.
                logits = forward(model, torch.zeros(2, dtype=torch.int64), torch.arange(2), torch.arange(1))
                stateful = states.layers()
                _check_modules(model, stateful)
            experts = experts_shapes(model)
        except CheckpointError as error:
            raise refusal(path, str(error)) from error
        except Exception as error:  # of any code of transformers
            raise refusal(path, f"transformers cannot compute it without values: {first_line(error)}") from error
        num_layers = text.num_hidden_layers
        if stateful and not recorder.layers:
            raise refusal(path, "no layer attends, and without a KV cache requests cannot be scheduled")
        if not stateful and len(recorder.layers) != num_layers:
            raise refusal(
                path,
                f"{len(recorder.layers)} of {num_layers} layers go through the attention interface of transformers: "
                "the others keep state that is no KV cache, or have their own attention",
            )
        calls = [recorder.layers[index] for index in sorted(recorder.layers)]
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        is_tied = head is not None and head.weight is embedding.weight
        quantized = read_quantization_config(transformers_fields(open_checkpoint(path).config()))
        in_blocks = quantized.kinds if isinstance(quantized, GgufWeights) else {}
        names = {module: name for name, module in model.named_modules()}
        linear_layers = {
            name: LinearShape(module.out_features, module.in_features, module.bias is not None)
            for module, name in names.items()
            if type(module) is torch.nn.Linear
            and module not in plain
            and (module is not head or (name in in_blocks and not is_tied))
        }
        tied_head = None
        if is_tied and names[embedding] in in_blocks and head.bias is None:
            tied_head = names[embedding], LinearShape(head.out_features, head.in_features, has_bias=False)
        return cls(
            path=path,
            name=type(model).__name__,
            shape=ModelShape(
                vocab_size=logits.shape[-1],
                layers=tuple(call.shape for call in calls),
                max_position_embeddings=_positions(path, text),
                end_token_ids=_end_token_ids(path, text, logits.shape[-1]),
                checkpoint_dtype=dtype_name(config.dtype) if config.dtype else stored_dtype(open_checkpoint(path)),
                state_bytes=sum(layer.num_bytes for layer in stateful),
            ),
            attention_layers=tuple(sorted(recorder.layers)),
            stateful_layers=stateful,
            linear_layers=linear_layers,
            tied_head=tied_head,
            adaptable_layers=linear.adaptable(2),
            experts=experts,
            quantized=quantized,
            num_parameters=sum(part.numel() for part in model.parameters()) + (head.weight.numel() if is_tied else 0),
            hidden_size=text.hidden_size,
            intermediate_size=_intermediate_size(text),
            sliding_windows=tuple(call.sliding_window for call in calls),
            soft_caps=tuple(dict.fromkeys(call.soft_cap for call in calls)),
            unrecordable="its layers keep state of each request" if stateful else _unrecordable(model, calls),
            original_positions=_original_positions(text),
            has_latents=bool(plain),
        )

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """Returns rows and columns of the linear layers that adapters can change, by their names."""
        return {name: shape[:2] for name, shape in self.linear_layers.items() if name in self.adaptable_layers}

    def exact_dtype(self) -> str:
        """Returns the name of the dtype that holds the matrices of layers, experts and vocabulary without rounding.

        It is float32 for 8-bit floats, which a CPU converts.

        Raises: CheckpointError: a file cannot be read.
        """
        if isinstance(self.quantized, Fp8Weights):
            return "float32"
        layers = {f"{name}.weight" for name in self.linear_layers}

        def counts(name: str, tensor: TensorEntry) -> bool:
            is_of_experts = ".experts." in name and name.endswith((".weight", GATE_UP, DOWN))  # no scales of integers
            return name in layers or is_of_experts or tensor.shape[:1] == (self.shape.vocab_size,)

        return dtype_name(exact_dtype(self.path, counts))

    def packed_bytes(
        self, dtype: torch.dtype, model_dtype: torch.dtype, *, is_quantized: bool, kept: Kept, is_compact: bool = False
    ) -> int:
        """Returns the bytes of the packed linear layers and experts, and of all other parameters.

        Args:
            dtype: dtype of matrices of linear layers that are not in 8 bits or fewer.
            model_dtype: dtype of other parameters.
            is_quantized: whether linear layers that are not kept are quantised to 8 bits as they load.
            kept: kinds of quantised weights that stay as they are.
            is_compact: see `Linear.packed_bytes`.
        """
        num_others, num_bytes = self.num_parameters, 0
        heads = [] if self.tied_head is None else [self.tied_head]
        layers = [(name, shape, 1) for name, shape in (*self.linear_layers.items(), *heads)]
        for name, experts in self.experts.items():
            gate, down = (experts.inner, experts.hidden), (experts.hidden, experts.inner)
            up_name, down_name = names_of_first(name, self.quantized)
            layers.append((up_name, LinearShape(*gate, has_bias=False), 2 * experts.num_experts))
            layers.append((down_name, LinearShape(*down, has_bias=False), experts.num_experts))
        in_blocks = self.quantized.kinds if isinstance(self.quantized, GgufWeights) else {}
        for name, shape, times in layers:
            halves = halves_of(name, in_blocks)
            layer = linear_layer(name, shape, self.quantized, dtype, torch.device("meta"), halves=halves)
            of_layer = layer.packed_bytes(is_quantized_on_load=is_quantized, kept=kept, is_compact=is_compact)
            num_bytes += times * of_layer
            num_others -= times * shape.num_rows * (shape.num_columns + shape.has_bias)
        return num_bytes + num_others * model_dtype.itemsize


def build(config: Any, *, experts: str) -> Any:
    """Builds a model with attention by `Attend`, on the current device, with random weights."""
    return (
        causal_class(config)._from_config(config, attn_implementation=ATTENTION, experts_implementation=experts).eval()
    )


def set_attend(model: Any, attend: Attend) -> None:
    """Sets what computes the attention of all layers of a model."""
    for module in model.modules():
        module.chairlift_attend = attend
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _ignore  # reads values of the device at every step


@torch.inference_mode()
def forward(model: Any, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
    """Computes [T] tokens as one row, which the attention divides -> logits [S, vocab_size] at `logits_indices`."""
    out = model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=logits_indices)
    logits: torch.Tensor = out.logits[0]
    return logits


@contextlib.contextmanager
def _without_checks_of_values() -> Iterator[None]:
    """Has distributions, of which Gemma 3n computes a constant, take tensors without values."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)


def _ignore(*_arguments: Any) -> None:
    """Does nothing."""


class _LayerCall(NamedTuple):
    """What the recorder keeps of a call."""

    shape: LayerShape
    sliding_window: int | None
    soft_cap: float | None
    has_tensor_scale: bool


class _Recorder:
    """Records the attention of each layer, and refuses what paged attention does not have."""

    def __init__(
        self, layer_types: list[str] | None, common_window: int | None, *, may_share_latents: bool = False
    ) -> None:
        """Takes the type of each layer; or, of a model without types, the window that masks of all layers have."""
        self.layers: dict[int, _LayerCall] = {}
        self._layer_types = layer_types
        self._common_window = common_window
        self._may_share_latents = may_share_latents

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Returns a result of the right shape."""
        index = call.layer_index
        if index in self.layers:
            raise CheckpointError(f"layer {index} attends more than once")
        (_, num_heads, num_tokens, key_dim), num_kv_heads = call.query.shape, call.key.shape[1]
        if call.value.shape[1] != num_kv_heads or num_heads % num_kv_heads or call.key.shape[3] != key_dim:
            raise CheckpointError(
                f"layer {index} has queries {list(call.query.shape)}, keys {list(call.key.shape)} and values "
                f"{list(call.value.shape)}, which do not form groups of heads"
            )
        kind = None if self._layer_types is None else self._layer_types[index]
        if kind is not None and kind not in (*CACHED_LAYERS, *STATEFUL_LAYERS):
            raise CheckpointError(f"layer {index} is of type {kind}, whose state is no KV cache")
        if kind is not None and (kind in ("sliding_attention", "hybrid_sliding")) != (call.sliding_window is not None):
            raise CheckpointError(
                f"layer {index} is of type {kind} and its attention gets sliding_window {call.sliding_window}: its "
                "window is in a mask only, which paged attention does not have"
            )
        if self._common_window is not None and call.sliding_window is None:
            raise CheckpointError(
                f"sliding_window is {self._common_window} and layer {index} has it in a mask only, which paged "
                f"attention does not have: set max_position_embeddings in config.json to {self._common_window} or less"
            )
        value_dim: int = call.value.shape[3]
        head_dim = -(-max(key_dim, value_dim) // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
        shape = LayerShape(num_heads, num_kv_heads, head_dim)
        if call.has_latents and self._may_share_latents and value_dim % _HEAD_MULTIPLE == 0:
            shape = shape._replace(value_dim=value_dim)
        self.layers[index] = _LayerCall(shape, call.sliding_window, call.soft_cap, isinstance(call.scale, torch.Tensor))
        return call.value.new_empty(1, num_tokens, num_heads, value_dim)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention that layers of transformers call.

    Raises: CheckpointError: an option that changes the result and is not known.
    """
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise CheckpointError(f"{type(module).__name__} attends and has no layer_idx")
    if attention_mask is not None:
        raise CheckpointError(f"layer {index} has a mask of its own, which paged attention does not have")
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        raise CheckpointError(f"layer {index} is not causal")
    if unknown := sorted(
        name for name, option in options.items() if name not in _KNOWN_OPTIONS and isinstance(option, torch.Tensor)
    ):
        raise CheckpointError(f"the attention of layer {index} takes {', '.join(unknown)}, which paged attention lacks")
    scale = options.get("scaling")
    keeps_latents = getattr(module, "chairlift_keeps_latents", False)
    call = AttentionCall(
        layer_index=index,
        query=queries_of_latents(module, query) if keeps_latents else query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        sliding_window=options.get("sliding_window"),
        soft_cap=options.get("softcap"),
        sinks=options.get("s_aux"),
        has_latents=keeps_latents,
    )
    out = module.chairlift_attend(call)
    return means_of_values(module, out) if keeps_latents else out, None


transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # a refusal is one line, ours
transformers.AttentionInterface.register(ATTENTION, _attention)


def _check_modules(model: Any, stateful: Sequence[StatefulLayer]) -> None:
    own = tuple(f"{layer.name}." for layer in stateful)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv1d) and not name.startswith(own):
            raise CheckpointError(f"{name} is a convolution over tokens, whose state is no KV cache")


def _unrecordable(model: Any, calls: Sequence[_LayerCall]) -> str | None:
    """Returns what makes a step depend on values that the host must know."""
    if any(hasattr(module, "is_concatenated") for module in model.modules()):  # of transformers' experts
        return "its layers choose experts by values"
    if any(call.has_tensor_scale for call in calls):
        return "its attention scale is a tensor"
    if len({call.shape for call in calls}) > 1:
        return "its layers have different heads"
    return None


def _positions(path: Path, text: Any) -> int:
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        raise refusal(path, f"max_position_embeddings is {positions!r}, expected a number of tokens")
    return positions


def _intermediate_size(text: Any) -> int:
    """Returns the width of the widest feed-forward network; Gemma 3n has one for each layer."""
    size = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return int(max(size) if isinstance(size, list) else size)


def _common_window(text: Any) -> int | None:
    """Returns the window of a model without types of layers; None: it has types, or no position is beyond a window."""
    if getattr(text, "layer_types", None) is not None:
        return None
    window, positions = (getattr(text, name, None) for name in ("sliding_window", "max_position_embeddings"))
    return window if isinstance(window, int) and isinstance(positions, int) and window < positions else None


def _original_positions(text: Any) -> int | None:
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return int(rope["original_max_position_embeddings"])


def _end_token_ids(path: Path, text: Any, vocab_size: int) -> frozenset[int]:
    checkpoint = open_checkpoint(path)
    stated = checkpoint.config()
    return end_token_ids(checkpoint, stated, stated.with_defaults({"eos_token_id": text.eos_token_id}), vocab_size)
