"""Mixtures of experts that the caller chooses, on a GPU: the list of tokens by expert, values, bits, replays."""

import pytest
import torch

from kernels.gpu.expert_rows import rows_of_choice
from kernels.gpu.launch import BoundKernel
from kernels.gpu.ops import GpuOps
from kernels.grouped_weights import GroupedWeights
from kernels.interface import ExpertChoice, Routing
from tests.support.kernels.batches import assert_same_bits, normal
from tests.support.kernels.mixtures import assert_lists_every_pair, exact_chosen_mixture, random_choice

NUM_EXPERTS, HIDDEN, INNER = 7, 64, 96
SHAPES = (2 * INNER, HIDDEN), (HIDDEN, INNER)

# Of a gate far below zero, whose factor is then 0 as it should be.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


def routing_of(top_k, gate="silu_and_mul"):
    return Routing(top_k, normalizes=True, gate=gate)  # which has no effect


def on(device, choice):
    return ExpertChoice(*(tensor.to(device) for tensor in choice))


@pytest.fixture
def make_ops(device, target):
    return lambda **options: GpuOps(device, target, num_processors=132, **options)


def make_experts(ops, device, seed, top_k, dtype=torch.float32):
    """Returns packed experts without a router, and the weights of both layers of each."""
    weights = [
        [(normal(*shape, seed=seed + 100 * place + i) * shape[1] ** -0.5).to(dtype) for i in range(NUM_EXPERTS)]
        for place, shape in enumerate(SHAPES)
    ]
    packed = [[ops.pack_linear(matrix.to(device), None) for matrix in matrices] for matrices in weights]
    return ops.pack_experts(None, *packed, routing_of(top_k)), weights


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 700])
@pytest.mark.parametrize("top_k", [1, 3, NUM_EXPERTS])
@pytest.mark.parametrize("block_m", [16, 64])
def test_every_pair_is_in_one_tile_of_its_expert(device, seed, num_tokens, top_k, block_m):
    choice = random_choice(seed, num_tokens, top_k, NUM_EXPERTS)
    rows = rows_of_choice(on(device, choice), NUM_EXPERTS, block_m)
    assert torch.equal(rows.weights.cpu(), choice.weights)
    assert_lists_every_pair(rows, choice.experts.flatten(), NUM_EXPERTS, block_m)


@pytest.mark.parametrize("num_experts", [1, 300])
def test_any_number_of_experts(device, seed, num_experts):
    choice = random_choice(seed, 90, 1, num_experts)
    rows = rows_of_choice(on(device, choice), num_experts, 16)
    assert rows.pairs.cpu().tolist() == choice.experts.flatten().argsort(stable=True).tolist()


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "top_k"),
    [
        *((torch.float32, number, top_k) for number in (1, 70, 300) for top_k in (1, 3, NUM_EXPERTS)),
        (torch.bfloat16, 33, 3),
        (torch.float16, 33, 3),
    ],
)
def test_values_are_those_of_fp64(make_ops, device, seed, dtype, num_tokens, top_k):
    """One expert has no token, unless all are chosen."""
    ops = make_ops()
    experts, weights = make_experts(ops, device, seed, top_k, dtype)
    x, choice = normal(num_tokens, HIDDEN, seed=seed + 5).to(dtype), random_choice(seed, num_tokens, top_k, NUM_EXPERTS)
    out = ops.mix_chosen_experts(x.to(device), experts, on(device, choice))
    assert out.dtype is dtype
    expected, allowed = exact_chosen_mixture(x, choice, *weights, routing_of(top_k), dtype)
    assert ((out.cpu().double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("num_bits", [4, 8])
def test_experts_in_integers(make_ops, device, seed, num_bits):
    ops, generator = make_ops(), torch.Generator().manual_seed(seed)

    def grouped(num_out, num_in):
        values = torch.randint(0, 2**num_bits, (num_out, num_in), generator=generator, dtype=torch.uint8)
        scales = (0.5 + torch.rand(num_out, num_in // 32, generator=generator)) * 4 * num_in**-0.5 / 2**num_bits
        return GroupedWeights(values, scales, -(2 ** (num_bits - 1)) * scales, num_bits)

    layers = [[grouped(*shape) for _ in range(NUM_EXPERTS)] for shape in SHAPES]
    packed = [
        [
            ops.pack_grouped(
                GroupedWeights(*(part.to(device) for part in layer[:3]), num_bits=num_bits), None, torch.float32
            )
            for layer in kind
        ]
        for kind in layers
    ]
    experts = ops.pack_experts(None, *packed, routing_of(3))
    assert experts.gate_up.groups is not None
    x, choice = normal(40, HIDDEN, seed=seed + 5), random_choice(seed, 40, 3, NUM_EXPERTS)
    out = ops.mix_chosen_experts(x.to(device), experts, on(device, choice)).cpu()
    values = [[layer.dequantized(torch.float32) for layer in kind] for kind in layers]
    expected, _ = exact_chosen_mixture(x, choice, *values, routing_of(3))
    assert ((out - expected).norm(dim=1) <= 1e-5 * expected.norm(dim=1)).all()


@pytest.mark.usefixtures("sums_in_order")
def test_a_token_has_the_same_bits_in_any_batch(make_ops, device, seed):
    ops = make_ops(batch_invariant=True)
    experts, _ = make_experts(ops, device, seed, 3)
    x, choice = normal(150, HIDDEN, seed=seed + 5).to(device), on(device, random_choice(seed, 150, 3, NUM_EXPERTS))
    whole = ops.mix_chosen_experts(x, experts, choice)
    for rows in (slice(149, 150), slice(40, 49), slice(1, 150)):
        part = ExpertChoice(choice.experts[rows].clone(), choice.weights[rows].clone())
        assert_same_bits(ops.mix_chosen_experts(x[rows].clone(), experts, part), whole[rows])


def test_experts_are_added_in_the_order_of_the_choice(make_ops, device):
    """2^30 y + y rounds to 2^30 y: whether the last term is lost tells the order. All experts are equal."""
    ops = make_ops()
    layers = [
        [ops.pack_linear(normal(*shape, seed=place).to(device) * shape[1] ** -0.5, None)] * NUM_EXPERTS
        for place, shape in enumerate(SHAPES)
    ]
    experts, x = ops.pack_experts(None, *layers, routing_of(3)), normal(1, HIDDEN, seed=5).to(device)
    large = 2.0**30

    def mixture(numbers, weights):
        choice = ExpertChoice(torch.tensor([numbers]), torch.tensor([weights]))
        return ops.mix_chosen_experts(x, experts, on(device, choice)).cpu()

    alone = mixture([0, 1, 2], [1.0, 0.0, 0.0])
    for numbers in ([5, 2, 0], [0, 2, 5], [2, 5, 0]):
        assert_same_bits(mixture(numbers, [large, -large, 1.0]), alone)
        assert mixture(numbers, [large, 1.0, -large]).eq(0).all()


@pytest.mark.parametrize("number", [-1, NUM_EXPERTS, 2**32, -(2**62)])
def test_a_number_of_no_expert_makes_its_token_nan_and_changes_no_other(make_ops, device, seed, number):
    ops = make_ops(batch_invariant=True)
    experts, _ = make_experts(ops, device, seed, 3)
    x, choice = normal(20, HIDDEN, seed=seed + 5).to(device), random_choice(seed, 20, 3, NUM_EXPERTS)
    right = ops.mix_chosen_experts(x, experts, on(device, choice)).cpu()
    choice.experts[11, 1], choice.weights[11, 1] = number, 0
    out = ops.mix_chosen_experts(x, experts, on(device, choice)).cpu()
    assert out[11].isnan().all()
    others = torch.arange(20) != 11
    torch.testing.assert_close(out[others], right[others])


def test_no_tokens_give_no_rows(make_ops, device):
    experts, _ = make_experts(make_ops(), device, 0, 3)
    choice = on(device, random_choice(0, 0, 3, NUM_EXPERTS))
    assert make_ops().mix_chosen_experts(torch.empty(0, HIDDEN, device=device), experts, choice).shape == (0, HIDDEN)


def test_a_recorded_step_reads_the_choice_of_each_replay(make_ops, device, seed, request):
    """Nothing waits for the choice; sizes of launches do not depend on it."""
    if device.type != "cuda":
        request.getfixturevalue("graphs")
    ops = make_ops()
    experts, weights = make_experts(ops, device, seed, 3)
    x, choice = normal(20, HIDDEN, seed=seed + 5).to(device), on(device, random_choice(seed, 20, 3, NUM_EXPERTS))
    if device.type == "cuda":  # compiles
        ops.mix_chosen_experts(x, experts, choice)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        out = ops.mix_chosen_experts(x, experts, choice)
    one_expert = ExpertChoice(torch.tensor([[4, 0, 6]]).repeat(20, 1), normal(20, 3, seed=seed))
    for now in (random_choice(seed + 1, 20, 3, NUM_EXPERTS), one_expert, random_choice(seed + 2, 20, 3, NUM_EXPERTS)):
        choice.experts.copy_(now.experts)
        choice.weights.copy_(now.weights)
        graph.replay()
        expected, allowed = exact_chosen_mixture(x.cpu(), now, *weights, routing_of(3))
        assert ((out.cpu().double() - expected).abs() <= allowed).all()


def test_the_sizes_of_launches_do_not_depend_on_the_choice(make_ops, device, seed, monkeypatch):
    """So a recorded step adapts to the tokens of each replay."""
    ops, grids = make_ops(), []
    experts, _ = make_experts(ops, device, seed, 3)
    call = BoundKernel.__call__
    monkeypatch.setattr(
        BoundKernel, "__call__", lambda self, grid, *args: (grids.append(grid), call(self, grid, *args))[1]
    )
    same = ExpertChoice(torch.tensor([[4, 0, 6]]).repeat(33, 1), normal(33, 3, seed=seed))
    for choice in (random_choice(seed, 33, 3, NUM_EXPERTS), same):
        grids.append("step")
        ops.mix_chosen_experts(normal(33, HIDDEN, seed=seed + 5).to(device), experts, on(device, choice))
    first = grids[1 : grids.index("step", 1)]
    assert first
    assert grids == ["step", *first, "step", *first]


def test_bad_choices_are_refused(make_ops, device):
    ops = make_ops()
    experts, _ = make_experts(ops, device, 0, 3)
    x, choice = normal(4, HIDDEN, seed=5).to(device), on(device, random_choice(6, 4, 3, NUM_EXPERTS))
    with pytest.raises(ValueError, match=r"experts of the choice are \[4, 3\] torch.int32 on .*, expected \[4, 3\]"):
        ops.mix_chosen_experts(x, experts, choice._replace(experts=choice.experts.int()))
    with pytest.raises(ValueError, match=r"weights of the choice are \[4, 2\] torch.float32"):
        ops.mix_chosen_experts(x, experts, choice._replace(weights=choice.weights[:, :2]))
    with pytest.raises(ValueError, match="the experts have no router"):
        ops.mix_experts(x, experts)
