"""State that layers keep of each request besides keys and values: linear attention, Mamba, short convolutions.

transformers computes such a layer for whole sequences, and keeps its state in a `Cache`. Here its `forward` is
replaced: the tokens of a step are divided into requests, each with its own state, and those with one token are computed
together. A state cannot go back to an earlier token: prefixes are reused where a copy of it has been kept.
"""

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers.cache_utils import Cache, DummyLayer, LinearAttentionLayer

from engine.errors import CheckpointError
from kernels.metadata import Span, StateCopy

_CACHE_ARGUMENT = "cache"
_NUM_STATES = 8  # most states of one kind in one layer
_NUM_CHECKED, _TOLERANCE = 6, 1e-4  # tokens of the check, and the part of a result that rounding may change
_FP32_BYTES = 4
_UNUSED: Any = DummyLayer()  # type: ignore[no-untyped-call]  # of a cache: holds nothing

OnRows: TypeAlias = Callable[[Sequence[int] | None], None]
"""Called with the tokens of the step that are computed next; None: all."""

_log = logging.getLogger(__name__)


class StatefulLayer(NamedTuple):
    """A layer with state, as the probe has found it.

    Attributes:
        name: of the module.
        shapes: of the states of one request.
    """

    name: str
    shapes: tuple[torch.Size, ...]

    @property
    def num_bytes(self) -> int:
        """Most memory of the state of one request; it may be in 16 bits."""
        return sum(shape.numel() for shape in self.shapes) * _FP32_BYTES


class StateProbe:
    """Finds the layers with state while a model computes a few tokens."""

    def __init__(self, model: Any) -> None:
        """Replaces `forward` of all layers that take a cache; the model is for probing only."""
        self._states: dict[str, LinearAttentionLayer] = {}
        self._attends: set[str] = set()
        self._computed: list[str] = []
        for name, module in model.named_modules():
            if _takes_cache(module):
                module.forward = self._observed(name, module)

    def note_attention(self) -> None:
        """Notes that the layer that is being computed attends."""
        self._attends.update(self._computed[-1:])

    def layers(self) -> tuple[StatefulLayer, ...]:
        """Returns the layers with state.

        Raises: CheckpointError: one of them attends too, in the same module.
        """
        found = []
        for name, layer in self._states.items():
            states = _states_of(layer)
            if states and name in self._attends:
                raise CheckpointError(f"{name} both attends and keeps state that is no KV cache")
            if states:
                found.append(StatefulLayer(name, tuple(state.shape[1:] for state in states.values())))
        return tuple(found)

    def _observed(self, name: str, module: Any) -> Callable[..., Any]:
        call = _WithCache(module)
        self._states[name] = _new_state()
        cache = _cache(module, self._states[name], _ProbedCache)

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._computed.append(name)
            try:
                return call(cache, *args, **kwargs)
            finally:
                self._computed.pop()

        return forward


class RequestStates:
    """The states of all requests in all layers.

    `begin` sets the rows of the step that is computed next. After a first step, `check` and `allocate` make it ready.

    Attributes:
        groups: the rows of the step, as layers compute them.
        on_rows: see `OnRows`.
        continues_by_one: whether layers continue a request by one token only.
        uncalled: linear layers within these layers that have not been called: their weights are used in other ways.
    """

    def __init__(self, model: Any, layers: Sequence[StatefulLayer], on_rows: OnRows = lambda _: None) -> None:
        """Replaces `forward` of the layers.

        Args:
            model: with values.
            layers: result of the probe.
            on_rows: is called before a layer computes some tokens of the step, and after all.
        """
        self.on_rows = on_rows
        modules = [model.get_submodule(layer.name) for layer in layers]
        linear = [part for module in modules for part in module.modules() if isinstance(part, torch.nn.Linear)]
        self._layers = [_Layer(module, self) for module in modules]
        self.continues_by_one = False
        self.groups: tuple[_Group, ...] = ()
        self.uncalled: set[Any] = set(linear)
        self._hooks = [part.register_forward_hook(self._note_call) for part in linear]

    def begin(self, spans: Sequence[Span], device: torch.device) -> None:
        """Sets the rows of a step."""
        together = [span for span in spans if span.num_tokens == 1 and not span.is_first]
        groups = [
            _Group(
                slice(part.first, part.end),
                slice(part.slot, part.slot + 1),
                is_first=part.is_first,
                places=range(part.first, part.end),
            )
            for span in spans
            if span.num_tokens > 1 or span.is_first
            for part in self._parts(span)
        ]
        if together:
            tokens_and_slots = torch.tensor([[span.first for span in together], [span.slot for span in together]])
            if device.type == "cuda":  # from pinned memory, for which the host does not wait
                tokens_and_slots = tokens_and_slots.pin_memory().to(device, non_blocking=True)
            tokens, slots = tokens_and_slots
            groups.append(_Group(tokens, slots, is_first=False, places=tuple(span.first for span in together)))
        self.groups = tuple(groups)

    def _parts(self, span: Span) -> Iterable[Span]:
        """Returns what a layer can compute at once."""
        if span.is_first or not self.continues_by_one:
            return (span,)
        return (span._replace(first=token, end=token + 1) for token in range(span.first, span.end))

    def _note_call(self, module: Any, *_: Any) -> None:
        self.uncalled.discard(module)

    def check(self) -> None:
        """Finds out, in fp32, whether layers continue a request by several tokens at once, or one by one.

        Raises: CheckpointError: they do neither.
        """
        for hook in self._hooks:
            hook.remove()
        kinds = {type(layer.module): layer for layer in self._layers}
        self.continues_by_one = not all(layer.continues_by_many() for layer in kinds.values())
        if self.continues_by_one:
            _log.info(
                "Some layers compute the tokens of a prompt one by one, except in its first chunk; "
                "--max-num-batched-tokens of the longest prompt's length avoids chunks"
            )

    def allocate(self, num_slots: int, device: torch.device) -> None:
        """Allocates the states of `num_slots` requests, with the shapes and dtypes of the steps so far.

        The memory is not touched: on a host, a slot that is never used takes none.
        """
        for layer in self._layers:
            layer.allocate(num_slots, device)

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copies states from slots to others."""
        for layer in self._layers:
            layer.copy(copies)


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that a layer computes together: one of any number of tokens, or some of one token.

    Attributes:
        tokens: of the batch.
        slots: of their states.
        is_first: whether they have no state yet.
        places: the tokens, known on the host.
    """

    tokens: slice | torch.Tensor
    slots: slice | torch.Tensor
    is_first: bool
    places: Sequence[int] = ()

    def take(self, batch: torch.Tensor) -> torch.Tensor:
        """[1, T, ...] -> [rows, tokens of a row, ...]"""
        return batch[:, self.tokens] if isinstance(self.tokens, slice) else batch[0, self.tokens].unsqueeze(1)

    def put(self, batch: torch.Tensor, rows: torch.Tensor) -> None:
        """Reverses `take`."""
        if isinstance(self.tokens, slice):
            batch[:, self.tokens] = rows
        else:
            batch[0, self.tokens] = rows.squeeze(1)


class _Layer:
    """Computes a layer group by group, in place of its `forward`."""

    def __init__(self, module: Any, states: RequestStates) -> None:
        self.module = module
        self._states = states
        self._call = _WithCache(module)
        self._pools: dict[tuple[str, int], torch.Tensor] = {}
        self._arguments: tuple[Any, torch.Size] | None = None  # of the first step, and its shape
        module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[1, T, ...] -> [1, T, ...], or a tuple of such tensors."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        batch_shape = tensors[0].shape[:2]
        if self._arguments is None:
            self._arguments = (args, kwargs), batch_shape
        joined: tuple[torch.Tensor, ...] = ()
        is_tuple = False
        for group in self._states.groups:
            state = self._state(group)
            own_args, own_kwargs = _map((args, kwargs), batch_shape, group.take)
            self._states.on_rows(group.places)
            rows = self._call(_cache(self.module, state), *own_args, **own_kwargs)
            self._keep(group, state)
            is_tuple = isinstance(rows, tuple)
            parts = rows if is_tuple else (rows,)
            joined = joined or tuple(part.new_zeros(*batch_shape, *part.shape[2:]) for part in parts)
            for whole, part in zip(joined, parts, strict=True):
                group.put(whole, part)
        self._states.on_rows(None)
        return joined if is_tuple else joined[0]

    def allocate(self, num_slots: int, device: torch.device) -> None:
        """See `RequestStates.allocate`."""
        self._pools = {
            key: torch.empty(num_slots, *pool.shape[1:], dtype=pool.dtype, device=device)
            for key, pool in self._pools.items()
        }

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """See `RequestStates.copy`."""
        for pool in self._pools.values():
            for source, target in copies:
                pool[target] = pool[source]

    @torch.inference_mode()
    def continues_by_many(self) -> bool:
        """Whether a copy of the layer continues a request by several tokens at once.

        Raises: CheckpointError: nor does it one by one.
        """
        assert self._arguments is not None, "before the first step"
        module = self._copy_in_fp32()
        generator = torch.Generator().manual_seed(0)

        def drawn(tensor: torch.Tensor) -> torch.Tensor:
            shape = (1, _NUM_CHECKED, *tensor.shape[2:])
            if not tensor.is_floating_point():
                return torch.zeros(shape, dtype=tensor.dtype)
            return torch.randn(shape, generator=generator)

        arguments, batch_shape = self._arguments
        arguments, batch_shape = _map(arguments, batch_shape, drawn), torch.Size((1, _NUM_CHECKED))
        call = _WithCache(module)

        def last_two(*chunks: int) -> torch.Tensor:
            """Result of the last two tokens of a request in chunks."""
            cache, first, rows = _cache(module, _new_state()), 0, []
            for num_tokens in chunks:
                group = _Group(slice(first, first + num_tokens), slice(0, 1), is_first=first == 0)
                args, kwargs = _map(arguments, batch_shape, group.take)
                result = call(cache, *args, **kwargs)
                parts = result if isinstance(result, tuple) else (result,)
                rows.append(torch.cat([part.flatten(2) for part in parts], dim=-1))
                first += num_tokens
            return torch.cat(rows, dim=1)[:, -2:]

        whole = last_two(_NUM_CHECKED)

        def is_equal(other: torch.Tensor) -> bool:
            return bool((whole - other).abs().max() <= _TOLERANCE * whole.abs().max())

        half = _NUM_CHECKED // 2
        if not is_equal(last_two(half, *[1] * half)):
            raise CheckpointError(f"{type(module).__name__} does not continue a request from the state that it keeps")
        return is_equal(last_two(half, half))

    def _copy_in_fp32(self) -> Any:
        """Returns a copy of the module with its own `forward`."""
        del self.module.forward
        try:
            return copy.deepcopy(self.module).float()
        finally:
            self.module.forward = self.forward

    def _state(self, group: _Group) -> LinearAttentionLayer:
        """Returns the states of a group as transformers has them."""
        layer = _new_state()
        if group.is_first:
            return layer
        for (kind, index), pool in self._pools.items():
            state = pool[group.slots]
            getattr(layer, f"{kind}_states")[index] = state
            getattr(layer, f"is_{kind}_states_initialized")[index] = True
            layer.has_previous_state[index] = True
            if kind == "conv":
                layer.conv_kernel_size[index] = state.shape[-1]
        return layer

    def _keep(self, group: _Group, layer: LinearAttentionLayer) -> None:
        for key, state in _states_of(layer).items():
            if key not in self._pools:  # before `allocate`: of the last request only
                self._pools[key] = state.new_empty(1, *state.shape[1:])
            self._pools[key][group.slots] = state


class _WithCache:
    """Calls the `forward` that a module has now with a cache of ours."""

    def __init__(self, module: Any) -> None:
        self._forward = module.forward
        self._signature = inspect.signature(module.forward)

    def __call__(self, cache: Cache, /, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        bound.arguments[_CACHE_ARGUMENT] = cache
        return self._forward(*bound.args, **bound.kwargs)


class _ProbedCache(Cache):
    """A cache whose keys and values are those of the step."""

    def update(self, key_states: Any, value_states: Any, *_args: Any, **_kwargs: Any) -> Any:
        """Returns what it gets."""
        return key_states, value_states


def _takes_cache(module: Any) -> bool:
    is_indexed = isinstance(getattr(module, "layer_idx", None), int)
    return is_indexed and _CACHE_ARGUMENT in inspect.signature(module.forward).parameters


def _new_state() -> LinearAttentionLayer:
    return LinearAttentionLayer(number_of_states=_NUM_STATES)


def _cache(module: Any, state: LinearAttentionLayer, kind: type[Cache] = Cache) -> Cache:
    """Returns a cache with the state of one layer."""
    return kind(layers=[*[_UNUSED] * module.layer_idx, state])


def _states_of(layer: LinearAttentionLayer) -> dict[tuple[str, int], torch.Tensor]:
    """Returns the states that a layer has, by kind and index."""
    return {
        (kind, index): state
        for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
        for index, state in states.items()
        if state is not None
    }


def _map(value: Any, batch_shape: torch.Size, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns arguments with a function applied to all tensors [1, T, ...]."""
    match value:
        case torch.Tensor() if value.shape[:2] == batch_shape:
            return function(value)
        case tuple() | list():
            return type(value)(_map(part, batch_shape, function) for part in value)
        case dict():
            return {name: _map(part, batch_shape, function) for name, part in value.items()}
        case _:
            return value
