"""Mixtures of experts on a CPU against fp64, and alone against batched."""

import pytest
import torch

from kernels.cpu.ops import CpuOps
from kernels.families import cpu_ops
from kernels.gates import ClampedGate
from kernels.grouped_weights import GroupedWeights
from kernels.interface import Routing
from kernels.reference.ops import ReferenceOps
from tests.support.kernels.batches import normal

NUM_EXPERTS, HIDDEN, INNER = 7, 48, 40


def _weights(dtype=torch.float32):
    router = normal(NUM_EXPERTS, HIDDEN, seed=1).to(dtype)
    gate_up = (normal(NUM_EXPERTS, 2 * INNER, HIDDEN, seed=2) * HIDDEN**-0.5).to(dtype)
    down = (normal(NUM_EXPERTS, HIDDEN, INNER, seed=3) * INNER**-0.5).to(dtype)
    return router, gate_up, down


def _biases(dtype=torch.float32):
    """Of the router, and of both layers of the experts."""
    sizes = (NUM_EXPERTS,), (NUM_EXPERTS, 2 * INNER), (NUM_EXPERTS, HIDDEN)
    return [normal(*size, seed=10 + place).to(dtype) for place, size in enumerate(sizes)]


def _expected(x, router, gate_up, down, routing, biases=None):
    """Every token by itself, in fp64."""
    rows = []
    router_bias, first_bias, second_bias = (bias.double() for bias in biases) if biases else 3 * [torch.zeros(99, 1)]
    for token in x.double():
        probabilities = (router.double() @ token + router_bias[: len(router)].flatten()).softmax(dim=0)
        weights, chosen = probabilities.topk(routing.top_k)
        if routing.normalizes:
            weights = weights / weights.sum()
        row = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up = (gate_up[expert].double() @ token + first_bias[expert]).chunk(2)
            if isinstance(routing.gate, ClampedGate):
                alpha, limit = routing.gate
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
                gate = gate * torch.sigmoid(alpha * gate)
            else:
                gate = torch.nn.functional.silu(gate) if routing.gate == "silu_and_mul" else _gelu(gate)
            row += weight * (down[expert].double() @ (gate * up) + second_bias[expert])
        rows.append(row)
    return torch.stack(rows)


def _gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


def _packed(ops, router, gate_up, down, routing, biases=None):
    router_bias, *of_layers = biases or (None, [None] * NUM_EXPERTS, [None] * NUM_EXPERTS)
    packed = [
        [ops.pack_linear(matrix, bias) for matrix, bias in zip(matrices, layer_biases, strict=False)]
        for matrices, layer_biases in zip((gate_up, down), of_layers, strict=True)
    ]
    return ops.pack_experts(router, *packed, routing, router_bias)


@pytest.fixture(scope="module", params=[1, 2])
def ops(request):
    return CpuOps(num_threads=request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 2, 13, 130])
@pytest.mark.parametrize(
    "routing",
    [
        Routing(top_k=2, normalizes=True, gate="silu_and_mul"),
        Routing(top_k=3, normalizes=False, gate="gelu_and_mul"),
        Routing(top_k=1, normalizes=False, gate="silu_and_mul"),
        Routing(top_k=NUM_EXPERTS, normalizes=True, gate="silu_and_mul"),
    ],
)
def test_values_are_those_of_fp64(ops, dtype, num_tokens, routing):
    x, weights = normal(num_tokens, HIDDEN, seed=4), _weights(dtype)
    expected = _expected(x, *weights, routing)
    torch.testing.assert_close(
        ops.mix_experts(x, _packed(ops, *weights, routing)).double(), expected, rtol=1e-5, atol=1e-5
    )
    reference = ReferenceOps()
    torch.testing.assert_close(
        reference.mix_experts(x, _packed(reference, *weights, routing)).double(), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 13])
@pytest.mark.parametrize("limit", [0.5, 7.0])
def test_experts_with_biases_and_a_clamped_gate(ops, dtype, num_tokens, limit):
    """The smaller limit is reached by many values, the larger one by none."""
    x, weights, biases = normal(num_tokens, HIDDEN, seed=4), _weights(dtype), _biases(dtype)
    routing = Routing(top_k=2, normalizes=True, gate=ClampedGate(1.702, limit))
    expected = _expected(x, *weights, routing, biases)
    for made in (ops, ReferenceOps()):
        out = made.mix_experts(x, _packed(made, *weights, routing, biases)).double()
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_clamped_gate_keeps_nan(ops):
    x, weights = normal(3, HIDDEN, seed=4), _weights()
    x[1, 5] = torch.nan
    routing = Routing(top_k=2, normalizes=True, gate=ClampedGate(1.702, 0.5))
    out = ops.mix_experts(x, _packed(ops, *weights, routing))
    assert out.isnan().all(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(quantization):
    ops = CpuOps(num_threads=2, quantization=quantization)
    routing = Routing(top_k=2, normalizes=True, gate="silu_and_mul")
    experts = _packed(ops, *_weights(), routing)
    x = normal(70, HIDDEN, seed=5)
    together = ops.mix_experts(x, experts)
    for order in (torch.arange(70).flip(0), torch.arange(9), torch.tensor([3]), torch.tensor([60])):
        assert torch.equal(ops.mix_experts(x[order], experts), together[order])


def test_one_expert_may_have_all_tokens_and_others_none(ops):
    routing = Routing(top_k=1, normalizes=True, gate="silu_and_mul")
    router, gate_up, down = _weights()
    x = normal(120, HIDDEN, seed=6).abs()
    router = torch.zeros_like(router)
    router[4] = 1.0
    expected = _expected(x, router, gate_up, down, routing)
    actual = ops.mix_experts(x, _packed(ops, router, gate_up, down, routing))
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_equal_probabilities_choose_the_first_experts(ops):
    routing = Routing(top_k=3, normalizes=True, gate="silu_and_mul")
    router, gate_up, down = _weights()
    x = normal(5, HIDDEN, seed=7)
    experts = _packed(ops, torch.zeros_like(router), gate_up, down, routing)
    of_three = _packed(ops, torch.zeros(3, HIDDEN), gate_up[:3], down[:3], routing)
    assert torch.equal(ops.mix_experts(x, experts), ops.mix_experts(x, of_three))


def test_a_token_of_nan_is_nan_and_changes_no_other(ops):
    routing = Routing(top_k=2, normalizes=True, gate="silu_and_mul")
    experts = _packed(ops, *_weights(), routing)
    x = normal(20, HIDDEN, seed=8)
    expected = ops.mix_experts(x, experts)
    x[11] = float("nan")
    actual = ops.mix_experts(x, experts)
    assert actual[11].isnan().all()
    others = torch.arange(20) != 11
    assert torch.equal(actual[others], expected[others])


def test_the_router_stays_exact_beside_layers_of_8_bits():
    """A small error of the router would choose another expert."""
    ops = CpuOps(quantization="int8")
    routing = Routing(top_k=1, normalizes=False, gate="silu_and_mul")
    router = torch.zeros(2, HIDDEN)
    router[:, 0] = torch.tensor([100.0, 100.0])
    router[1, 1] = 0.25  # an int8 scale of 100 / 127 rounds it to zero
    _, gate_up, down = _weights()
    x = normal(4, HIDDEN, seed=9)
    x[:, :2] = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, -1.0], [0.0, -1.0]])
    both = ops.mix_experts(x, _packed(ops, router, gate_up[:2], down[:2], routing))
    alone = [_packed(ops, router[i : i + 1], gate_up[i : i + 1], down[i : i + 1], routing) for i in (0, 1)]
    chosen = torch.tensor([0.25, 0.25, -0.25, -0.25]).sigmoid()
    for token, expert in enumerate((1, 1, 0, 0)):
        weight = chosen[token] if expert else 1 - chosen[token]
        expected = weight * ops.mix_experts(x[token : token + 1], alone[expert])[0]
        torch.testing.assert_close(both[token], expected)


def test_layers_with_inputs_in_another_order_are_multiplied_in_groups(ops):
    """Checkpoints of GPTQ with desc_act have an order of inputs for each matrix."""
    routing = Routing(top_k=2, normalizes=True, gate="silu_and_mul")
    generator = torch.Generator().manual_seed(10)

    def grouped(num_out, num_in):
        values = torch.randint(0, 16, (num_out, num_in), generator=generator, dtype=torch.uint8)
        scales = torch.rand(num_out, num_in // 8, generator=generator) * 0.05
        order = torch.randperm(num_in, generator=generator)
        return GroupedWeights(values, scales, -8 * scales, 4, input_order=order)

    layers = [[grouped(2 * INNER, HIDDEN) for _ in range(3)], [grouped(HIDDEN, INNER) for _ in range(3)]]
    gate_up, down = (torch.stack([layer.dequantized(torch.float32) for layer in kind]) for kind in layers)
    router = _weights()[0][:3]
    packed = [[ops.pack_grouped(layer, None, torch.float32) for layer in kind] for kind in layers]
    experts = ops.pack_experts(router, *packed, routing)
    for num_tokens in (1, 30):
        x = normal(num_tokens, HIDDEN, seed=11)
        expected = _expected(x, router, gate_up, down, routing)
        torch.testing.assert_close(ops.mix_experts(x, experts).double(), expected, rtol=1e-4, atol=1e-4)


def test_inputs_in_int8_give_a_token_the_same_bits_among_others():
    """Layers are in groups, whose scales of inputs lie beside those of other experts' rows."""
    ops, routing = cpu_ops(quantization="int8"), Routing(top_k=2, normalizes=True, gate="silu_and_mul")
    generator = torch.Generator().manual_seed(10)

    def grouped(num_out, num_in):
        values = torch.randint(0, 16, (num_out, num_in), generator=generator, dtype=torch.uint8)
        scales = torch.rand(num_out, num_in // 8, generator=generator) * 0.05
        return GroupedWeights(values, scales, -8 * scales, 4)

    layers = [[grouped(2 * INNER, HIDDEN) for _ in range(3)], [grouped(HIDDEN, INNER) for _ in range(3)]]
    gate_up, down = (torch.stack([layer.dequantized(torch.float32) for layer in kind]) for kind in layers)
    router, x = _weights()[0][:3], normal(30, HIDDEN, seed=11)
    experts = ops.pack_experts(
        router, *([ops.pack_grouped(layer, None, torch.float32) for layer in kind] for kind in layers), routing
    )
    found, expected = ops.mix_experts(x, experts), _expected(x, router, gate_up, down, routing)
    for token in range(30):
        assert torch.equal(ops.mix_experts(x[token : token + 1], experts)[0], found[token])
    assert (found - expected).square().mean().sqrt() < 0.05 * expected.square().mean().sqrt()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"top_k": 8}, "top_k is 8, there are 7 experts"),
        ({"top_k": 0}, "top_k is 0, there are 7 experts"),
    ],
)
def test_a_bad_number_of_experts_is_refused(ops, change, reason):
    routing = Routing(top_k=2, normalizes=True, gate="silu_and_mul")._replace(**change)
    with pytest.raises(ValueError, match=reason):
        _packed(ops, *_weights(), routing)


def test_layers_of_different_formats_are_refused(ops):
    routing = Routing(top_k=2, normalizes=True, gate="silu_and_mul")
    router, gate_up, down = _weights()
    layers = [ops.pack_linear(matrix, None) for matrix in gate_up]
    layers[3] = ops.pack_linear(gate_up[3].bfloat16(), None)
    with pytest.raises(ValueError, match="layers of experts differ"):
        ops.pack_experts(router, layers, [ops.pack_linear(matrix, None) for matrix in down], routing)
    with pytest.raises(ValueError, match="the router has 7 rows, there are 6 and 7 layers"):
        ops.pack_experts(router, layers[:6], [ops.pack_linear(matrix, None) for matrix in down], routing)
