"""Mixtures of experts of transformers (arXiv:2101.03961, section 2), of which `KernelOps` computes the experts.

The model's own code chooses experts and their weights, in whatever way, and calls its module of experts through an
interface of transformers. There the packed experts compute, if they have the form that `KernelOps` knows.
"""

import copy
from typing import Any

import torch
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.errors import CheckpointError
from engine.model.stored_experts import DOWN, GATE_UP, ExpertsShape, PackedLayers
from kernels.gates import Gate
from kernels.interface import ExpertChoice, Experts, KernelOps, Routing

EXPERTS = "chairlift"
"""Name under which modules of experts find `_mix` in transformers' interface."""

PROBED_EXPERTS = "chairlift-probe"
"""The same for a model without values."""

_SCALES = (1.0, 30.0, 1000.0)
_MAX_EXPERTS = 65536  # of a module; more would take memory before a file tells how many there are
_GATES: dict[Gate, Any] = {
    "silu_and_mul": functional.silu,
    "gelu_and_mul": lambda x: functional.gelu(x, approximate="tanh"),
}


class PackedMixture:
    """The packed experts of one module."""

    def __init__(self, ops: KernelOps, shape: ExpertsShape, layers: PackedLayers) -> None:
        """Takes the packed layers of each expert.

        Raises: ValueError: a format that the operations do not multiply by experts.
        """
        self._ops = ops
        routing = Routing(shape.top_k, normalizes=False, gate=shape.gate)
        self._experts: Experts = ops.pack_experts(None, layers.gate_up, layers.down, routing)

    def __call__(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Computes the experts of each token.

        Args:
            hidden: [T, hidden].
            experts: [T, top_k], their numbers.
            weights: [T, top_k], factors of their results.
        """
        choice = ExpertChoice(experts.long().contiguous(), weights.float().contiguous())
        return self._ops.mix_chosen_experts(hidden.contiguous(), self._experts, choice)


def set_experts(module: Any, mixture: PackedMixture) -> None:
    """Has packed experts compute a module, and frees its own; their dtype and shape stay visible."""
    for name in (GATE_UP, DOWN):
        weight = getattr(module, name)
        delattr(module, name)
        setattr(module, name, torch.empty_like(weight, device="meta"))
    module.chairlift_experts = mixture


def experts_shapes(model: Any) -> dict[str, ExpertsShape]:
    """Returns the modules of experts that `KernelOps` can compute, by name, of a probed model.

    Raises: CheckpointError: a module has too many.
    """
    shapes = {}
    for name, module in model.named_modules():
        top_k = getattr(module, "chairlift_top_k", None)
        if top_k is None or not {GATE_UP, DOWN} <= module._parameters.keys():
            continue
        num_experts, hidden, inner = module.down_proj.shape
        if num_experts > _MAX_EXPERTS:
            raise CheckpointError(f"{name} has {num_experts} experts, at most {_MAX_EXPERTS} are supported")
        if (gate := _gate_of(module)) is not None:
            shapes[name] = ExpertsShape(num_experts, top_k, hidden, inner, gate)
    return shapes


def _gate_of(module: Any) -> Gate | None:
    """Returns the gate with which a module of experts computes what `KernelOps` does; None: it computes something else.

    Its own code finds out, with weights of few inputs and outputs, and with inputs up to those that any clamp changes.
    """
    if not hasattr(module.forward, "__wrapped__"):
        return None
    return next((gate for gate in _GATES if all(_has_gate(module, gate, scale) for scale in _SCALES)), None)


def _has_gate(module: Any, gate: Gate, scale: float) -> bool:
    """Whether a module computes experts with a gate, by inputs of a standard deviation."""
    num_experts, hidden, inner = len(module.down_proj), 6, 4
    generator = torch.Generator().manual_seed(0)
    gate_up, down, x, weights = (
        torch.randn(shape, generator=generator)
        for shape in ((num_experts, 2 * inner, hidden), (num_experts, hidden, inner), (3, hidden), (3, 1))
    )
    x *= scale
    experts = torch.tensor([[0], [num_experts - 1], [0]])
    small = copy.copy(module)
    small._parameters = {GATE_UP: torch.nn.Parameter(gate_up), DOWN: torch.nn.Parameter(down)}
    try:
        result = type(module).forward.__wrapped__(small, x, experts, weights)
    except Exception:  # of any code of transformers
        return False
    gates, ups = (gate_up[experts[:, 0]] @ x[:, :, None]).squeeze(2).chunk(2, dim=1)
    wanted = weights * (down[experts[:, 0]] @ (_GATES[gate](gates) * ups)[:, :, None]).squeeze(2)
    return result.shape == wanted.shape and torch.allclose(result, wanted, rtol=1e-5, atol=1e-5 * scale**2)


def _mix(module: Any, hidden: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
    """Computes experts as they are packed, or else as transformers does one after the other."""
    mixture: PackedMixture | None = getattr(module, "chairlift_experts", None)
    if mixture is not None:
        return mixture(hidden, *routing)
    result: torch.Tensor = type(module).forward.__wrapped__(module, hidden, *routing)
    return result


def _probe(module: Any, hidden: torch.Tensor, experts: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """Notes how many experts a token has; of the result only the shape is known."""
    module.chairlift_top_k = experts.shape[-1]
    return torch.empty_like(hidden)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _mix)
ALL_EXPERTS_FUNCTIONS.register(PROBED_EXPERTS, _probe)
