"""Experts in integers on a GPU: values against fp64 for all bits and groups, orders of inputs, bits in any batch."""

import functools

import pytest
import torch

from kernels.gpu.launch import BoundKernel
from kernels.gpu.ops import GpuOps
from kernels.gpu.targets import TARGETS
from kernels.grouped_weights import GroupedWeights
from kernels.interface import Routing
from tests.support.kernels.batches import assert_same_bits, normal
from tests.support.kernels.mixtures import exact_mixture

NUM_EXPERTS, HIDDEN, INNER = 5, 256, 128
ROUTING = Routing(top_k=2, normalizes=True, gate="silu_and_mul")

# Of a gate far below zero, whose factor is then 0 as it should be.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


def make_layer(seed, num_out, num_in, num_bits, group_size, *, shuffled=False):
    """Groups of very different scales; returns them, their values in fp64 and the magnitudes of their two terms."""
    generator = torch.Generator().manual_seed(seed)
    size = group_size or num_in
    values = torch.randint(0, 2**num_bits, (num_out, num_in), generator=generator, dtype=torch.uint8)
    scales = normal(num_out, num_in // size, seed=seed + 1).exp() * (2 * num_in**-0.5 / 2**num_bits)
    offsets = -scales * torch.rand(scales.shape, generator=generator) * 2**num_bits
    order = torch.randperm(num_in, generator=generator) if shuffled else None
    middle = 128 if num_bits == 8 else 0  # kernels multiply signed integers of 8 bits
    factors, terms = (numbers.double().repeat_interleave(size, 1) for numbers in (scales, offsets))
    exact = values.double() * factors + terms
    magnitudes = (values.double() - middle).abs() * factors + (terms + middle * factors).abs()
    if order is not None:
        exact, magnitudes = exact[:, order.argsort()], magnitudes[:, order.argsort()]
    return GroupedWeights(values, scales, offsets, num_bits, order), exact, magnitudes


@functools.cache
def make_weights(seed, num_bits, group_size, hidden=HIDDEN, inner=INNER, shuffled=()):
    """Returns gate_up and down of each expert: `shuffled` names those whose inputs have another order."""
    return [
        [
            make_layer(
                seed + 100 * expert + place, num_out, num_in, num_bits, group_size, shuffled=(place, expert) in shuffled
            )
            for expert in range(NUM_EXPERTS)
        ]
        for place, (num_out, num_in) in enumerate(((2 * inner, hidden), (hidden, inner)))
    ]


def make_rows(seed, num_tokens, hidden=HIDDEN):
    """Returns a router of the first inputs, and tokens: none chooses the last expert, only one that before it."""
    x = normal(num_tokens, hidden, seed=seed)
    x[:, NUM_EXPERTS - 2 : NUM_EXPERTS] = torch.tensor([-9.0, -10.0])
    x[0, NUM_EXPERTS - 2] = 9.0
    return torch.eye(NUM_EXPERTS, hidden), x


def pack(ops, device, router, layers, dtype, biases=(None, None)):
    packed = [
        [
            ops.pack_grouped(
                weights._replace(
                    values=weights.values.to(device),
                    scales=weights.scales.to(device),
                    offsets=weights.offsets.to(device),
                    input_order=None if weights.input_order is None else weights.input_order.to(device),
                ),
                None if bias is None else bias.to(device, dtype),
                dtype,
            )
            for weights, _, _ in experts
        ]
        for experts, bias in zip(layers, biases, strict=True)
    ]
    return ops.pack_experts(router.to(device, dtype), *packed, ROUTING)


def assert_exact(ops, device, seed, layers, num_tokens, dtype, hidden=HIDDEN):
    router, x = make_rows(seed + 5, num_tokens, hidden)
    x = x.to(device, dtype)
    experts = pack(ops, device, router, layers, dtype)
    out = ops.mix_experts(x, experts)
    assert out.dtype is dtype
    (gate_up, down), terms = ([[one[part] for one in experts_of] for experts_of in layers] for part in (1, 2))
    logits = ops.linear(x, experts.router).cpu()
    expected, allowed = exact_mixture(x.cpu(), logits, gate_up, down, ROUTING, dtype, terms=terms)
    assert ((out.cpu().double() - expected).abs() <= allowed).all()
    return experts


@pytest.fixture
def make_ops(device, target):
    return lambda target=target, **options: GpuOps(device, target, num_processors=132, **options)


@pytest.mark.parametrize(
    ("dtype", "num_bits", "group_size", "num_tokens"),
    [
        (torch.float32, 4, 32, 70),
        (torch.float16, 4, 128, 33),
        (torch.bfloat16, 4, 64, 1),
        (torch.bfloat16, 4, 16, 20),
        (torch.bfloat16, 4, None, 20),
        (torch.float32, 8, 128, 1),
        (torch.float16, 8, 64, 33),
        (torch.bfloat16, 8, 32, 150),
        (torch.bfloat16, 8, 16, 20),
        (torch.float16, 8, None, 20),
    ],
)
def test_values_are_those_of_fp64(make_ops, device, seed, dtype, num_bits, group_size, num_tokens):
    """Experts with no token, one, and many."""
    layers = make_weights(seed, num_bits, group_size)
    experts = assert_exact(make_ops(), device, seed, layers, num_tokens, dtype)
    for layer in (experts.gate_up, experts.down):
        assert layer.weight.nbytes == NUM_EXPERTS * layer.weight.shape[1] * layer.num_in * num_bits // 8


@pytest.mark.parametrize("num_bits", [4, 8])
def test_each_expert_has_its_own_order_of_inputs(make_ops, device, seed, num_bits):
    layers = make_weights(seed, num_bits, 32, shuffled=frozenset({(0, 1), (0, 2), (1, 0)}))
    assert_exact(make_ops(), device, seed, layers, 20, torch.float32)


@pytest.mark.parametrize("name", ["sm_75", "gfx942"])
def test_tiles_of_other_targets(make_ops, device, seed, name):
    if device.type == "cuda":
        pytest.skip("the tiles of another GPU")
    assert_exact(make_ops(TARGETS[name]), device, seed, make_weights(seed, 4, 32), 40, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_without_a_product_are_dequantized_beside_others(make_ops, device, seed, dtype):
    """48 inputs in groups of 16 are no whole steps; tiles of fp32 differ from those of integers."""
    layers = make_weights(seed, 4, 16, inner=48)
    ops = make_ops()
    router, x = make_rows(seed, 20)
    experts = pack(ops, device, router, layers, dtype)
    assert experts.gate_up.groups is not None
    assert experts.down.groups is None
    x = x.to(device, dtype)
    out = ops.mix_experts(x, experts).cpu().double()
    rounded = [[exact.to(dtype) for _, exact, _ in layers[1]], [terms for _, _, terms in layers[1]]]
    terms = [terms for _, _, terms in layers[0]], rounded[1]
    gate_up = [exact for _, exact, _ in layers[0]]
    logits = ops.linear(x, experts.router).cpu()
    expected, allowed = exact_mixture(x.cpu(), logits, gate_up, rounded[0], ROUTING, dtype, terms=terms)
    assert ((out - expected).abs() <= allowed).all()


def test_biases(make_ops, device, seed):
    ops, layers = make_ops(), make_weights(seed, 4, 32)
    router, x = make_rows(seed, 9)
    biases = normal(2 * INNER, seed=seed + 1), normal(HIDDEN, seed=seed + 2)
    x = x.to(device)
    out = ops.mix_experts(x, pack(ops, device, router, layers, torch.float32, biases)).cpu()
    without_last = ops.mix_experts(x, pack(ops, device, router, layers, torch.float32, (biases[0], None))).cpu()
    torch.testing.assert_close(out, without_last + biases[1], rtol=1e-5, atol=1e-5)
    without = ops.mix_experts(x, pack(ops, device, router, layers, torch.float32)).cpu()
    assert not torch.allclose(without, without_last, rtol=1e-2)


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.usefixtures("sums_in_order")
def test_a_token_has_the_same_bits_in_any_batch(make_ops, device, seed, num_bits):
    ops = make_ops(batch_invariant=True)
    router, x = make_rows(seed, 150)
    experts = pack(ops, device, router, make_weights(seed, num_bits, 32), torch.float32)
    x = x.to(device)
    whole = ops.mix_experts(x, experts)
    for rows in (slice(149, 150), slice(40, 49), slice(0, 60)):
        assert_same_bits(ops.mix_experts(x[rows], experts), whole[rows])


def test_nan_stays_in_its_token_and_other_tokens_keep_their_bits(make_ops, device, seed):
    ops = make_ops(batch_invariant=True)
    router, x = make_rows(seed, 20)
    experts = pack(ops, device, router, make_weights(seed, 4, 32), torch.bfloat16)
    x = x.to(device, torch.bfloat16)
    right = ops.mix_experts(x, experts)
    x[7, 30] = torch.nan
    out = ops.mix_experts(x, experts)
    assert out[7].isnan().all()
    others = torch.arange(20) != 7
    assert_same_bits(out.cpu()[others].float(), right.cpu()[others].float())


def test_the_sizes_of_launches_do_not_depend_on_the_router(make_ops, device, seed, monkeypatch):
    """So a recorded step adapts to the tokens of each replay."""
    ops = make_ops()
    router, x = make_rows(seed, 33)
    experts = pack(ops, device, router, make_weights(seed, 4, 32), torch.float32)
    grids = []
    call = BoundKernel.__call__
    monkeypatch.setattr(
        BoundKernel, "__call__", lambda self, grid, *args: (grids.append(grid), call(self, grid, *args))[1]
    )
    other = x.clone()
    other[:, :NUM_EXPERTS] = torch.arange(NUM_EXPERTS, 0, -1)
    for rows in (x, other):
        grids.append("step")
        ops.mix_experts(rows.to(device), experts)
    first = grids[1 : grids.index("step", 1)]
    assert first
    assert grids == ["step", *first, "step", *first]
