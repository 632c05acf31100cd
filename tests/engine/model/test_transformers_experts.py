"""Experts of transformers are packed only if they compute what `KernelOps` does, whatever the size of their inputs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engine.model.transformers_experts import experts_shapes


def experts(activation: str) -> Any:
    config = SimpleNamespace(
        num_experts=4,
        hidden_size=16,
        moe_intermediate_size=8,
        hidden_act=activation,
        _experts_implementation="eager",
    )
    module: Any = Qwen3MoeExperts(config)
    module.chairlift_top_k = 2
    return module


@pytest.mark.parametrize(("activation", "gate"), [("silu", "silu_and_mul"), ("gelu_pytorch_tanh", "gelu_and_mul")])
def test_gates_are_found(activation, gate):
    model = torch.nn.ModuleDict({"experts": experts(activation)})
    assert experts_shapes(model)["experts"].gate == gate


class Clamped(torch.nn.Module):
    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def forward(self, x):
        return torch.nn.functional.silu(x.clamp(max=self.limit))


@pytest.mark.parametrize("limit", [1.0, 7.0, 16.0, 100.0])
def test_a_clamped_gate_is_none_of_them(limit):
    module = experts("silu")
    module.act_fn = Clamped(limit)
    assert experts_shapes(torch.nn.ModuleDict({"experts": module})) == {}
