"""Mixtures of experts that the caller chooses, on a CPU: values against fp64, bits in any batch, bad choices."""

from dataclasses import replace

import pytest
import torch

from kernels.cpu.ops import CpuOps
from kernels.gates import ClampedGate
from kernels.grouped_weights import GroupedWeights
from kernels.interface import ExpertChoice, Routing
from kernels.microscaled_weights import MicroscaledWeights
from kernels.reference.ops import ReferenceOps
from tests.support.kernels.batches import assert_same_bits, make_step_buffers, normal
from tests.support.kernels.mixtures import exact_chosen_mixture, random_choice

NUM_EXPERTS, HIDDEN, INNER = 7, 64, 96
SHAPES = (2 * INNER, HIDDEN), (HIDDEN, INNER)


def routing_of(top_k, gate="silu_and_mul"):
    return Routing(top_k, normalizes=True, gate=gate)  # which has no effect


def stored(dtype):
    """Makes a layer of weights in a dtype; returns how it is packed, and its values."""

    def make(seed, num_out, num_in):
        weight = (normal(num_out, num_in, seed=seed) * num_in**-0.5).to(dtype)
        return (lambda ops: ops.pack_linear(weight, None)), weight

    return make


def grouped(num_bits):
    def make(seed, num_out, num_in):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(0, 2**num_bits, (num_out, num_in), generator=generator, dtype=torch.uint8)
        scales = (0.5 + torch.rand(num_out, num_in // 32, generator=generator)) * 4 * num_in**-0.5 / 2**num_bits
        weights = GroupedWeights(values, scales, -(2 ** (num_bits - 1)) * scales, num_bits)
        return (lambda ops: ops.pack_grouped(weights, None, torch.float32)), weights.dequantized(torch.float32)

    return make


def microscaled(seed, num_out, num_in):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (num_out, num_in // 2), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(122, 125, (num_out, num_in // 32), generator=generator, dtype=torch.uint8)
    weights = MicroscaledWeights(codes, exponents)
    return (lambda ops: ops.pack_microscaled(weights, None, torch.float32)), weights.dequantized(torch.float32)


FORMS = {
    "float32": stored(torch.float32),
    "bfloat16": stored(torch.bfloat16),
    "4 bits": grouped(4),
    "8 bits": grouped(8),
    "MXFP4": microscaled,
}


def make_experts(ops, form, top_k, gate="silu_and_mul"):
    """Returns packed experts without a router, and the values of both layers of each."""
    layers = [
        [FORMS[form](100 * place + expert, *shape) for expert in range(NUM_EXPERTS)]
        for place, shape in enumerate(SHAPES)
    ]
    packed = [[pack(ops) for pack, _ in kind] for kind in layers]
    return ops.pack_experts(None, *packed, routing_of(top_k, gate)), [[values for _, values in kind] for kind in layers]


@pytest.fixture(scope="module", params=[1, 2])
def ops(request):
    return CpuOps(num_threads=request.param)


def assert_exact(ops, form, num_tokens, top_k, gate="silu_and_mul"):
    experts, values = make_experts(ops, form, top_k, gate)
    x, choice = normal(num_tokens, HIDDEN, seed=5), random_choice(6, num_tokens, top_k, NUM_EXPERTS)
    given = ExpertChoice(*(tensor.clone() for tensor in choice))
    out = ops.mix_chosen_experts(x, experts, given)
    assert torch.equal(given.experts, choice.experts)
    assert torch.equal(given.weights, choice.weights)
    expected, _ = exact_chosen_mixture(x, choice, *values, routing_of(top_k, gate))
    assert ((out - expected).norm(dim=1) <= 1e-5 * expected.norm(dim=1)).all()


@pytest.mark.parametrize("num_tokens", [1, 2, 13, 300])
@pytest.mark.parametrize("top_k", [1, 3, NUM_EXPERTS])
def test_values_are_those_of_fp64(ops, num_tokens, top_k):
    """One expert has no token, unless all are chosen."""
    assert_exact(ops, "float32", num_tokens, top_k)
    assert_exact(ReferenceOps(), "float32", num_tokens, top_k, "gelu_and_mul")


@pytest.mark.parametrize("form", [form for form in FORMS if form != "float32"])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_all_formats_of_weights(ops, form, num_tokens):
    assert_exact(ops, form, num_tokens, 3, "gelu_and_mul")


@pytest.mark.parametrize("form", ["float32", "4 bits"])
def test_values_of_8_bits(form):
    """Inputs too are rounded to 8 bits, in both layers: some hundredths in all."""
    ops = CpuOps(quantization="int8")
    experts, values = make_experts(ops, form, 3)
    x, choice = normal(40, HIDDEN, seed=5), random_choice(6, 40, 3, NUM_EXPERTS)
    expected, _ = exact_chosen_mixture(x, choice, *values, routing_of(3))
    error = (ops.mix_chosen_experts(x, experts, choice) - expected).square().mean().sqrt()
    assert 1e-4 < error / expected.square().mean().sqrt() < 0.05


def test_a_clamped_gate_and_biases(ops):
    x, choice = normal(13, HIDDEN, seed=5), random_choice(6, 13, 2, NUM_EXPERTS)

    def mixture(ops):
        layers = [
            [
                ops.pack_linear(
                    normal(*shape, seed=100 * place + expert) * shape[1] ** -0.5, normal(shape[0], seed=expert)
                )
                for expert in range(NUM_EXPERTS)
            ]
            for place, shape in enumerate(SHAPES)
        ]
        experts = ops.pack_experts(None, *layers, routing_of(2, ClampedGate(1.702, 0.5)))
        return ops.mix_chosen_experts(x, experts, choice)

    torch.testing.assert_close(mixture(ops), mixture(ReferenceOps()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(form, quantization):
    ops = CpuOps(num_threads=2, quantization=quantization)
    experts, _ = make_experts(ops, form, 3)
    x, choice = normal(300, HIDDEN, seed=5), random_choice(6, 300, 3, NUM_EXPERTS)
    together = ops.mix_chosen_experts(x, experts, choice)
    orders = torch.arange(300).flip(0), torch.arange(9), *torch.tensor([3, 60, 171, 299]).split(1)
    for order in orders:
        part = ExpertChoice(choice.experts[order], choice.weights[order])
        assert_same_bits(ops.mix_chosen_experts(x[order], experts, part), together[order])


@pytest.mark.parametrize("make_ops", [CpuOps, ReferenceOps])
def test_experts_are_added_in_the_order_of_the_choice(make_ops):
    """2^30 y + y rounds to 2^30 y: whether the last term is lost tells the order. All experts are equal."""
    ops = make_ops()
    layers = [[ops.pack_linear(normal(*shape, seed=place) * shape[1] ** -0.5, None)] * NUM_EXPERTS
              for place, shape in enumerate(SHAPES)]  # fmt: skip
    experts, x = ops.pack_experts(None, *layers, routing_of(3)), normal(1, HIDDEN, seed=5)
    one = ops.pack_experts(None, layers[0][:1], layers[1][:1], routing_of(1))
    alone = ops.mix_chosen_experts(x, one, ExpertChoice(torch.tensor([[0]]), torch.tensor([[1.0]])))
    numbers = torch.tensor([[5, 2, 0], [0, 2, 5], [5, 2, 0], [2, 0, 5]])
    large = 2.0**30
    weights = torch.tensor([[large, -large, 1], [large, -large, 1], [large, 1, -large], [1, large, -large]])
    choices = [ExpertChoice(*row) for row in zip(numbers.split(1), weights.split(1), strict=True)]
    out = torch.cat([ops.mix_chosen_experts(x, experts, choice) for choice in choices])
    assert_same_bits(out[:2], alone.expand(2, -1))
    assert out[2:].eq(0).all()


@pytest.mark.parametrize("make_ops", [CpuOps, ReferenceOps])
@pytest.mark.parametrize("number", [-1, NUM_EXPERTS, 2**40, -(2**62)])
def test_a_number_of_no_expert_makes_its_token_nan_and_changes_no_other(make_ops, number):
    ops = make_ops()
    experts, _ = make_experts(ops, "float32", 3)
    x, choice = normal(20, HIDDEN, seed=5), random_choice(6, 20, 3, NUM_EXPERTS)
    right = ops.mix_chosen_experts(x, experts, choice)
    choice.experts[11, 1], choice.weights[11, 1] = number, 0
    out = ops.mix_chosen_experts(x, experts, choice)
    assert out[11].isnan().all()
    others = torch.arange(20) != 11
    torch.testing.assert_close(out[others], right[others], **({"rtol": 0, "atol": 0} if ops.name == "cpu" else {}))


def test_nan_in_a_token_or_a_weight_stays_there(ops):
    experts, _ = make_experts(ops, "float32", 2)
    x, choice = normal(20, HIDDEN, seed=5), random_choice(6, 20, 2, NUM_EXPERTS)
    right = ops.mix_chosen_experts(x, experts, choice)
    x[3, 0], choice.weights[8, 1] = torch.nan, torch.nan
    out = ops.mix_chosen_experts(x, experts, choice)
    is_nan = torch.tensor([token in (3, 8) for token in range(20)])
    assert out[is_nan].isnan().all()
    assert_same_bits(out[~is_nan], right[~is_nan])


def test_no_weights_give_zeros(ops):
    experts, _ = make_experts(ops, "float32", 3)
    choice = random_choice(6, 5, 3, NUM_EXPERTS)
    out = ops.mix_chosen_experts(normal(5, HIDDEN, seed=5), experts, choice._replace(weights=torch.zeros(5, 3)))
    assert out.eq(0).all()


def test_a_recorded_step_reads_the_choice_of_each_replay(ops):
    """At any number of tokens; rows beyond them hold numbers of no expert."""
    most, table = 30, normal(11, HIDDEN, seed=7)
    experts, _ = make_experts(ops, "bfloat16", 3)
    buffers = make_step_buffers(4, most, 2)
    choice = ExpertChoice(torch.full((most, 3), 2**40), torch.full((most, 3), torch.nan))

    def mixture(inputs):
        x = ops.gather_rows(table, inputs.input_ids)
        return ops.mix_chosen_experts(ops.mix_chosen_experts(x, experts, choice), experts, choice)

    step = ops.compile_step(mixture, buffers, yields_logits=False)
    for seed, num_tokens in enumerate((30, 1, 12, 30, 2)):
        ids = torch.randint(0, 11, (num_tokens,), generator=torch.Generator().manual_seed(seed))
        part = random_choice(seed, num_tokens, 3, NUM_EXPERTS)
        choice.experts.fill_(2**40)
        for buffer, values in zip((buffers.input_ids, *choice), (ids, *part), strict=True):
            buffer[:num_tokens] = values
        out = step(replace(buffers, input_ids=buffers.input_ids[:num_tokens]))
        once = ops.mix_chosen_experts(table[ids], experts, part)
        assert_same_bits(out, ops.mix_chosen_experts(once, experts, part))


def test_a_router_does_not_matter_to_the_caller_s_choice(ops):
    without, values = make_experts(ops, "float32", 3)
    packed = [[ops.pack_linear(matrix, None) for matrix in matrices] for matrices in values]
    experts = ops.pack_experts(normal(NUM_EXPERTS, HIDDEN, seed=8), *packed, routing_of(3))
    x, choice = normal(20, HIDDEN, seed=5), random_choice(6, 20, 3, NUM_EXPERTS)
    assert_same_bits(ops.mix_chosen_experts(x, experts, choice), ops.mix_chosen_experts(x, without, choice))


@pytest.mark.parametrize("make_ops", [CpuOps, ReferenceOps])
def test_bad_choices_are_refused(make_ops):
    ops = make_ops()
    experts, _ = make_experts(ops, "float32", 3)
    x, (numbers, weights) = normal(4, HIDDEN, seed=5), random_choice(6, 4, 3, NUM_EXPERTS)
    expected = r"expected \[4, 3\] torch"
    for bad, reason in [
        (
            ExpertChoice(numbers[:3], weights),
            rf"experts of the choice are \[3, 3\] torch.int64 on cpu, {expected}",
        ),
        (ExpertChoice(numbers, weights[:, :2]), r"weights of the choice are \[4, 2\] torch.float32"),
        (ExpertChoice(numbers.int(), weights), rf"torch.int32 on cpu, {expected}.int64 on cpu"),
        (ExpertChoice(numbers, weights.bfloat16()), rf"torch.bfloat16 on cpu, {expected}.float32 on cpu"),
        (ExpertChoice(numbers, weights.t().contiguous().t()), r"weights of the choice have strides \(1, 4\)"),
    ]:
        with pytest.raises(ValueError, match=reason):
            ops.mix_chosen_experts(x, experts, bad)
    with pytest.raises(ValueError, match="the experts have no router"):
        ops.mix_experts(x, experts)


def test_bad_numbers_of_layers_are_refused(ops):
    layers = [[ops.pack_linear(normal(*shape, seed=1), None)] * NUM_EXPERTS for shape in SHAPES]
    with pytest.raises(ValueError, match="there are 7 and 6 layers"):
        ops.pack_experts(None, layers[0], layers[1][:6], routing_of(3))
    with pytest.raises(ValueError, match="top_k is 8, there are 7 experts"):
        ops.pack_experts(None, *layers, routing_of(8))
