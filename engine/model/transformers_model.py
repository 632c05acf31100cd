"""A causal language model of transformers over the paged KV cache, in ragged batches of the runner.

transformers computes everything but attention, linear layers and experts. It gets the tokens of a step as one row; the
attention of `KernelOps` divides them into requests. Linear layers and experts are packed for `KernelOps`.
"""

import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import CheckpointError
from engine.model.gguf_checkpoint import is_gguf
from engine.model.linear_adapters import AdaptableModel, LinearAdapters
from engine.model.transformers_adapters import StepAdapters
from engine.model.transformers_config import causal_class, first_line, read_config, refusal
from engine.model.transformers_experts import EXPERTS
from engine.model.transformers_latents import keep_latents
from engine.model.transformers_packing import pack_model
from engine.model.transformers_probe import (
    ATTENTION,
    AttentionCall,
    TransformersConfig,
    build,
    forward,
    set_attend,
)
from engine.model.transformers_states import RequestStates
from engine.model.transformers_weights import TransformersWeights
from engine.model.weights import Progress
from kernels.interface import KernelOps, KVCache
from kernels.metadata import AttentionMetadata, Span, StateCopy, StepInputs

_log = logging.getLogger(__name__)


class TransformersModel(AdaptableModel):
    """Implements `engine.runner.model_runner.StepModel`. One thread may run its steps."""

    mixes_torch = True

    def __init__(
        self,
        config: TransformersConfig,
        ops: KernelOps,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        weights_dtype: torch.dtype | None = None,
        is_dummy: bool = False,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """Loads parameters to the host, and moves them to the device; reads and packs linear layers and experts.

        So there is one copy of the weights, and one layer twice.

        Args:
            config: result of the probe.
            ops: operations of attention, linear layers and experts.
            dtype: dtype of activations, and of parameters that are not packed.
            device: device of the steps.
            max_model_len: longest request, which decides the factors of a longrope rotation.
            weights_dtype: dtype of packed matrices that the checkpoint does not quantise; None: `dtype`.
            is_dummy: random weights from `seed` instead of the checkpoint's.
            progress: called after each module.
        Raises: CheckpointError: the weights are not those of the model, or a token depends on others except by
            attention.
        """
        self.dtype = dtype
        self._ops = ops
        self._has_state = bool(config.stateful_layers)
        self._layers = config.shape.layers
        self._cache_of = {layer: place for place, layer in enumerate(config.attention_layers)}
        # Keys have been rotated by transformers: position 0 of these tables, an angle of zero, for all.
        half = max(layer.head_dim for layer in self._layers) // 2
        self._cos, self._sin = torch.ones(1, half, device=device), torch.zeros(1, half, device=device)
        self._adapters = StepAdapters(config.projection_shapes())
        self._kv_caches: Sequence[KVCache] = ()
        self._metadata: AttentionMetadata | None = None
        self._positions = torch.empty(0)
        weights_dtype = weights_dtype or dtype
        stored = (
            None
            if is_dummy
            else TransformersWeights(
                config.path,
                config.linear_layers,
                config.experts,
                config.quantized,
                tied_head=config.tied_head,
                dtype=weights_dtype,
                model_dtype=dtype,
                device=device,
            )
        )
        self._model = _random(config, dtype, seed) if stored is None else _loaded(config, dtype, stored)
        _fix_longrope(config, self._model, max_model_len)
        plain = keep_latents(self._model) if config.has_latents else ()
        self._states = RequestStates(self._model, config.stateful_layers, self._adapters.select)
        with contextlib.nullcontext() if stored is None else stored.stand_in(self._model):
            _check_tokens_are_separate(config, self._model, self._states)
            try:
                self._states.check()
            except Exception as error:  # of any code of transformers, or that a layer does not continue
                raise refusal(config.path, first_line(error)) from error
        pack_model(
            self._model,
            ops,
            stored,
            config.experts,
            {*self._states.uncalled, *plain},
            self._adapters,
            dtype=weights_dtype,
            device=device,
            progress=progress,
        )
        self._device = device
        set_attend(self._model, self._attend)

    def allocate_states(self, num_slots: int) -> None:
        """See `StepModel`."""
        self._states.allocate(num_slots, self._device)

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """See `StepModel`."""
        self._states.copy(copies)

    @property
    def resumes_states(self) -> bool:
        """See `StepModel`."""
        return not self._states.continues_by_one

    def adaptable(self) -> Iterable[LinearAdapters]:
        """See `AdaptableModel`."""
        return self._adapters.layers.values()

    @torch.inference_mode()
    def step(self, inputs: StepInputs, kv_caches: Sequence[KVCache]) -> torch.Tensor:
        """Computes a ragged batch; returns logits [S, vocab_size] fp32 of the tokens in `logits_indices`."""
        self._kv_caches, self._metadata = kv_caches, inputs.metadata
        self._positions = torch.zeros_like(inputs.metadata.slot_mapping)
        self._adapters.begin(inputs.metadata.num_tokens, inputs.adapted)
        if self._has_state:
            # Without rows, where kernels are only compiled: one request of all tokens.
            spans = inputs.spans or (Span(slot=0, first=0, end=inputs.metadata.num_tokens, is_first=True),)
            self._states.begin(spans, inputs.input_ids.device)
        logits = forward(self._model, inputs.input_ids, inputs.positions, inputs.logits_indices)
        return logits.float().contiguous() if inputs.logits is None else inputs.logits.copy_(logits)

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        """Writes keys and values of the step to the cache, and attends to those of its requests."""
        assert self._metadata is not None, "a layer attends outside of a step"
        place = self._cache_of[call.layer_index]
        layer, kv_cache = self._layers[place], self._kv_caches[place]
        metadata = self._metadata.of_group(layer.group)
        head_dim, value_dim = layer.head_dim, layer.value_dim
        num_heads, num_tokens = call.query.shape[1:3]
        stored = (call.key, call.value) if value_dim is None else (call.key,)
        qkv = torch.cat(
            [functional.pad(part[0].transpose(0, 1), (0, head_dim - part.shape[3])) for part in (call.query, *stored)],
            dim=1,
        ).flatten(1)
        half = head_dim // 2
        queries = self._ops.rotate_and_store(
            qkv,
            self._positions,
            self._cos[:, :half].contiguous(),
            self._sin[:, :half].contiguous(),
            kv_cache,
            metadata.slot_mapping,
        )
        options: dict[str, Any] = {} if call.sinks is None else {"sinks": call.sinks}
        out = self._ops.paged_attention(
            queries,
            kv_cache,
            metadata,
            scale=float(call.scale),
            sliding_window=call.sliding_window,
            soft_cap=call.soft_cap,
            **options,
        )
        return out.view(1, num_tokens, num_heads, value_dim or head_dim)[..., : call.value.shape[3]].contiguous()


def _loaded(config: TransformersConfig, dtype: torch.dtype, stored: TransformersWeights) -> Any:
    """Returns the model with the weights of the checkpoint, on the host, but for linear layers that stay in the files.

    Raises: CheckpointError: a file is broken, or the weights are not those of the model.
    """
    try:
        values = read_config(config.path)
        model, info = causal_class(values).from_pretrained(
            None,
            config=values,
            state_dict=stored.state_dict(),
            dtype=dtype,
            attn_implementation=ATTENTION,
            experts_implementation=EXPERTS,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # and refused below, by their names
        )
        if wrong := sorted(info["mismatched_keys"]):
            name, stored_shape, shape = wrong[0]
            raise CheckpointError(
                f"tensor {name} has shape {list(stored_shape)}, config.json requires {list(shape)}; "
                f"{len(wrong)} tensors have another shape"
            )
        for kind in ("missing_keys", "unexpected_keys"):
            if names := sorted(map(str, info[kind])):
                problem = f"{len(names)} tensors are {kind.removesuffix('_keys')}, the first is {names[0]}"
                if kind != "unexpected_keys" or is_gguf(config.path):  # whose names are of no other programs
                    raise CheckpointError(problem)
                _log.warning("%s: %s; transformers does not use them", config.path, problem)
        stored.check_stand_ins(model)
    except Exception as error:  # of any code of transformers, from files that are not trusted
        raise refusal(config.path, first_line(error)) from error
    return model.eval()


def _random(config: TransformersConfig, dtype: torch.dtype, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(read_config(config.path), experts=EXPERTS).to(dtype)


def _fix_longrope(config: TransformersConfig, model: Any, max_model_len: int) -> None:
    """Sets the factors of longrope by the longest request, for transformers chooses them by the longest of a batch."""
    if config.original_positions is None:
        return
    is_long = max_model_len > config.original_positions
    for module in model.modules():
        if getattr(module, "rope_type", None) != "longrope":
            continue
        factors, _ = ROPE_INIT_FUNCTIONS["longrope"](
            module.config, torch.device("cpu"), seq_len=config.original_positions + is_long
        )
        module.original_inv_freq = module.long_inv_freq = factors
        module.inv_freq.copy_(factors)
    _log.info(
        "Rotation longrope uses its %s factors for all requests: --max-model-len %d is %s the %d original positions",
        "long" if is_long else "short",
        max_model_len,
        "more than" if is_long else "within",
        config.original_positions,
    )


def _check_tokens_are_separate(config: TransformersConfig, model: Any, states: RequestStates) -> None:
    """Checks that without attention a token's logits depend on itself and its position alone.

    Raises: CheckpointError: they depend on another token, so the model has state besides keys and values; or on the
        token's place in the step, so the model counts positions itself. Or they depend on the batch.
    """
    set_attend(model, _attend_to_itself)
    states.begin([Span(slot=0, first=token, end=token + 1, is_first=True) for token in range(2)], torch.device("cpu"))
    furthest = config.shape.max_position_embeddings - 1
    first, another = (min(token, config.shape.vocab_size - 1) for token in (3, 7))
    checked = first, min(1, furthest)

    def logits(*tokens: tuple[int, int]) -> torch.Tensor:
        """Logits of the checked one of two tokens, given by their ids and positions."""
        ids, positions = torch.tensor(tokens).unbind(1)
        return forward(model, ids, positions, torch.tensor([tokens.index(checked)])).float()

    try:
        expected = logits((0, 0), checked)
        others = {
            "another token of the batch": logits((another, furthest), checked),
            "its place in the batch": logits(checked, (0, 0)),
        }
    except Exception as error:  # of any code of transformers
        raise refusal(config.path, f"transformers cannot compute it: {first_line(error)}") from error
    if not expected.isfinite().all():
        raise refusal(config.path, "the logits of a token are not finite: a tensor holds NaN or too large numbers")
    for what, result in others.items():
        change = (expected - result).abs().max()
        if not change <= 16 * torch.finfo(model.dtype).eps * expected.abs().max():
            raise refusal(
                config.path,
                f"without attention the logits of a token change by {float(change):.3g} with {what}: the model keeps "
                "state that is no KV cache, counts positions itself, or depends on the batch",
            )


def _attend_to_itself(call: AttentionCall) -> torch.Tensor:
    """Attention whose result depends on a token's own query and value."""
    groups = call.query.shape[1] // call.value.shape[1]
    values = call.value.repeat_interleave(groups, dim=1)
    return (values * torch.tanh(call.query.mean(dim=-1, keepdim=True))).transpose(1, 2).contiguous()
