"""Mixtures of experts on a GPU: the list of tokens by expert, values against fp64, and bits in any batch."""

import pytest
import torch

from kernels.gates import ClampedGate
from kernels.gpu.expert_rows import expert_rows
from kernels.gpu.ops import GpuOps
from kernels.gpu.targets import TARGETS
from kernels.interface import Routing
from kernels.microscaled_weights import MicroscaledWeights
from kernels.reference.ops import ReferenceOps
from tests.support.engine.weights import quantized_in_blocks
from tests.support.kernels.batches import assert_close, assert_same_bits, normal
from tests.support.kernels.mixtures import assert_lists_every_pair, exact_mixture

NUM_EXPERTS, HIDDEN, INNER = 7, 48, 40
ROUTINGS = [
    Routing(top_k=2, normalizes=True, gate="silu_and_mul"),
    Routing(top_k=3, normalizes=False, gate="gelu_and_mul"),
    Routing(top_k=1, normalizes=False, gate="silu_and_mul"),
    Routing(top_k=NUM_EXPERTS, normalizes=True, gate="silu_and_mul"),
]


@pytest.mark.parametrize("num_tokens", [0, 5, 700])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("block_m", [16, 64])
def test_every_pair_is_in_one_tile_of_its_expert(device, seed, num_tokens, routing, block_m):
    logits = normal(num_tokens, NUM_EXPERTS, seed=seed)
    logits[:, 3] -= 4  # an expert that few tokens choose
    rows = expert_rows(logits.to(device), routing, block_m)
    probabilities, chosen = logits.softmax(dim=1).topk(routing.top_k)
    chosen, order = chosen.sort(dim=1)
    weights = probabilities.gather(1, order)
    if routing.normalizes:
        weights /= weights.sum(dim=1, keepdim=True)
    torch.testing.assert_close(rows.weights.cpu(), weights, rtol=1e-5, atol=1e-6)
    assert_lists_every_pair(rows, chosen.flatten(), NUM_EXPERTS, block_m)


def test_equal_logits_choose_the_first_experts_and_nan_spoils_its_token_only(device):
    logits = torch.zeros(3, NUM_EXPERTS)
    logits[1, 5] = torch.nan
    logits[2] = torch.nan
    rows = expert_rows(logits.to(device), ROUTINGS[0], 16)
    assert rows.tiles.cpu()[:, 0].tolist()[:2] == [0, 1]
    assert rows.pairs.cpu().tolist() == [0, 2, 4, 1, 3, 5]
    assert rows.weights.isnan().any(dim=1).tolist() == [False, True, True]
    assert rows.weights[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("num_experts", [1, 300])
def test_any_number_of_experts(device, seed, num_experts):
    logits = normal(90, num_experts, seed=seed)
    rows = expert_rows(logits.to(device), Routing(1, normalizes=True, gate="silu_and_mul"), 16)
    assert rows.pairs.cpu().tolist() == logits.argmax(dim=1).argsort(stable=True).tolist()
    assert rows.weights.eq(1).all()


def make_weights(seed, dtype, hidden=HIDDEN, inner=INNER, num_experts=NUM_EXPERTS):
    router = normal(num_experts, hidden, seed=seed).to(dtype)
    gate_up = [(normal(2 * inner, hidden, seed=seed + 10 + i) * hidden**-0.5).to(dtype) for i in range(num_experts)]
    down = [(normal(hidden, inner, seed=seed + 900 + i) * inner**-0.5).to(dtype) for i in range(num_experts)]
    return router, gate_up, down


@pytest.fixture
def make_ops(device, target):
    return lambda target=target, **options: GpuOps(device, target, num_processors=132, **options)


def pack(ops, device, router, gate_up, down, routing):
    packed = [[ops.pack_linear(matrix.to(device), None) for matrix in matrices] for matrices in (gate_up, down)]
    return ops.pack_experts(router.to(device), *packed, routing)


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "routing"),
    [
        *((torch.float32, number, routing) for number in (1, 70) for routing in ROUTINGS),
        (torch.bfloat16, 33, ROUTINGS[0]),
        (torch.float16, 33, ROUTINGS[1]),
    ],
)
def test_values_are_those_of_fp64(make_ops, device, seed, dtype, num_tokens, routing):
    ops, (router, gate_up, down) = make_ops(), make_weights(seed, dtype)
    x = normal(num_tokens, HIDDEN, seed=seed + 5).to(device, dtype)
    experts = pack(ops, device, router, gate_up, down, routing)
    logits = ops.linear(x, experts.router).cpu()
    out = ops.mix_experts(x, experts)
    assert out.dtype is dtype
    expected, allowed = exact_mixture(x.cpu(), logits, gate_up, down, routing, dtype)
    assert ((out.cpu().double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("limit", [0.5, 7.0])
def test_experts_with_biases_and_a_clamped_gate(make_ops, device, seed, limit):
    """The smaller limit is reached by many values, the larger one by few."""
    router, gate_up, down = make_weights(seed, torch.float32)
    first, second = normal(NUM_EXPERTS, 2 * INNER, seed=seed + 1), normal(NUM_EXPERTS, HIDDEN, seed=seed + 2)
    router_bias, x = normal(NUM_EXPERTS, seed=seed + 3), normal(33, HIDDEN, seed=seed + 5)
    routing = Routing(top_k=2, normalizes=True, gate=ClampedGate(1.702, limit))

    def mixture(ops, device, dtype):
        layers = [
            [ops.pack_linear(m.to(device, dtype), b.to(device, dtype)) for m, b in zip(matrices, biases, strict=True)]
            for matrices, biases in ((gate_up, first), (down, second))
        ]
        experts = ops.pack_experts(router.to(device, dtype), *layers, routing, router_bias.to(device, dtype))
        return ops.mix_experts(x.to(device, dtype), experts).cpu().double()

    out, expected = mixture(make_ops(), device, torch.float32), mixture(ReferenceOps(), "cpu", torch.float64)
    assert (out - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 90])
def test_experts_in_mxfp4_are_multiplied_from_their_codes(make_ops, device, seed, dtype, num_tokens):
    """All codes; the reference computes with the same values and the rounded inputs in fp64."""
    ops, generator = make_ops(), torch.Generator().manual_seed(seed)
    hidden, inner, number = 128, 96, 3  # an odd number of groups too
    routing = Routing(top_k=2, normalizes=True, gate=ClampedGate(1.702, 7.0))

    def weights(num_out, num_in):
        codes = torch.randint(0, 256, (num_out, num_in // 2), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(119, 123, (num_out, num_in // 32), generator=generator, dtype=torch.uint8)
        return MicroscaledWeights(codes, exponents)

    layers = [[weights(*shape) for _ in range(number)] for shape in ((2 * inner, hidden), (hidden, inner))]
    biases = [normal(size, seed=seed + i).to(dtype) for i, size in enumerate((2 * inner, hidden))]
    router = torch.eye(number, hidden, dtype=dtype)  # logits are inputs: no rounding changes which experts are chosen
    x = normal(num_tokens, hidden, seed=seed + 5).to(dtype)

    def mixture(ops, device, dtype):
        packed = [
            [
                ops.pack_microscaled(
                    MicroscaledWeights(*(part.to(device) for part in one)), bias.to(device, dtype), dtype
                )
                for one in expert_layers
            ]
            for expert_layers, bias in zip(layers, biases, strict=True)
        ]
        experts = ops.pack_experts(router.to(device, dtype), *packed, routing)
        return experts, ops.mix_experts(x.to(device, dtype), experts).cpu().double()

    experts, out = mixture(ops, device, dtype)
    assert experts.gate_up.weight.dtype is experts.gate_up.scales.dtype is torch.uint8
    _, expected = mixture(ReferenceOps(), "cpu", torch.float64)
    error = (out - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype is torch.float32 else 0.02)


@pytest.mark.usefixtures("sums_in_order")
def test_experts_in_mxfp4_have_the_same_bits_in_any_batch(make_ops, device, seed):
    ops, generator = make_ops(batch_invariant=True), torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (2, 64, 32), generator=generator, dtype=torch.uint8).to(device)
    one = MicroscaledWeights(codes[0], torch.full((64, 2), 120, dtype=torch.uint8, device=device))
    other = MicroscaledWeights(codes[1], torch.full((64, 2), 121, dtype=torch.uint8, device=device))
    wide = MicroscaledWeights(torch.cat((codes[0], codes[1])), torch.full((128, 2), 120, dtype=torch.uint8).to(device))
    gate_up = [ops.pack_microscaled(wide, None, torch.float32) for _ in range(2)]
    down = [ops.pack_microscaled(weights, None, torch.float32) for weights in (one, other)]
    experts = ops.pack_experts(normal(2, 64, seed=seed).to(device), gate_up, down, ROUTINGS[2])
    x = normal(150, 64, seed=seed + 5).to(device)
    whole = ops.mix_experts(x, experts)
    for rows in (slice(149, 150), slice(40, 49)):
        assert_same_bits(ops.mix_experts(x[rows], experts), whole[rows])


@pytest.mark.parametrize("hidden", [300, 256])
def test_inputs_and_outputs_beyond_a_tile(make_ops, device, seed, hidden):
    weights = make_weights(seed, torch.float32, hidden=hidden, inner=136, num_experts=2)
    ops, routing = make_ops(), Routing(1, normalizes=True, gate="silu_and_mul")
    experts = pack(ops, device, *weights, routing)
    x = normal(150, hidden, seed=seed + 5).to(device)
    expected, allowed = exact_mixture(x.cpu(), ops.linear(x, experts.router).cpu(), *weights[1:], routing)
    assert ((ops.mix_experts(x, experts).cpu().double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("form", ["channels", "blocks"])
@pytest.mark.parametrize("has_float8", [True, False])
def test_8_bit_experts_are_within_their_rounding_of_their_values(make_ops, device, target, seed, form, has_float8):
    """Of weights: the same values; of inputs: 3 bits of mantissa, twice."""
    if device.type == "cuda" and (target.fp8_dtype is not None) != has_float8:
        pytest.skip("the other kind of GPU")
    if not has_float8 and form == "channels":
        pytest.skip("refused: there is no such product")
    chosen = target if device.type == "cuda" or has_float8 else TARGETS["sm_80"]
    float8 = {"quantize_inputs": has_float8, "input_group_size": 128 if form == "blocks" else None}
    ops, routing = make_ops(chosen, **float8), ROUTINGS[0]
    router, gate_up, down = make_weights(seed, torch.float32, hidden=256, inner=128, num_experts=4)
    packed, values = [[], []], [[], []]
    for place, matrices in enumerate((gate_up, down)):
        for matrix in matrices:
            if form == "blocks":
                codes, scales = quantized_in_blocks(matrix)
                value = codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            else:
                scales = matrix.abs().amax(dim=1) / 448
                codes = (matrix / scales[:, None]).to(torch.float8_e4m3fn)
                value = codes.float() * scales[:, None]
            packed[place].append(ops.pack_quantized(codes.to(device), scales.to(device), None, torch.float32))
            values[place].append(value)
    experts = ops.pack_experts(router.to(device), *packed, routing)
    assert experts.down.weight.itemsize == 1
    x = normal(40, 256, seed=seed + 5).to(device)
    out = ops.mix_experts(x, experts).cpu().double()
    expected, _ = exact_mixture(x.cpu(), ops.linear(x, experts.router).cpu(), *values, routing)
    error = (out - expected).norm() / expected.norm()
    assert error < (0.06 if has_float8 else 1e-5)


@pytest.mark.usefixtures("sums_in_order")
def test_a_token_has_the_same_bits_in_any_batch(make_ops, device, seed):
    ops, weights = make_ops(batch_invariant=True), make_weights(seed, torch.float32)
    experts = pack(ops, device, *weights, ROUTINGS[0])
    x = normal(150, HIDDEN, seed=seed + 5).to(device)
    whole = ops.mix_experts(x, experts)
    for rows in (slice(149, 150), slice(40, 49), slice(1, 150)):
        assert_same_bits(ops.mix_experts(x[rows], experts), whole[rows])


def test_no_tokens_give_no_rows(make_ops, device):
    experts = pack(make_ops(), device, *make_weights(0, torch.float32), ROUTINGS[0])
    assert make_ops().mix_experts(torch.empty(0, HIDDEN, device=device), experts).shape == (0, HIDDEN)


def test_nan_stays_in_its_token(make_ops, device, seed):
    ops = make_ops()
    experts = pack(ops, device, *make_weights(seed, torch.float32), ROUTINGS[0])
    x = normal(20, HIDDEN, seed=seed + 5).to(device)
    right = ops.mix_experts(x, experts)
    x[7, 3] = torch.nan
    out = ops.mix_experts(x, experts)
    assert out[7].isnan().all()
    others = torch.arange(20) != 7
    assert_close(out.cpu()[others], right.cpu()[others])
