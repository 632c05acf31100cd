"""Adapters on a GPU: values against fp64, bits of tokens without one, places that are written again, recorded steps."""

from types import SimpleNamespace

import pytest
import torch

from kernels.gpu import adapters as module
from kernels.gpu.adapters import add_adapters, reserve_adapters, set_adapter
from kernels.gpu.targets import TARGETS
from kernels.interface import LowRank, pack_adapters
from kernels.metadata import AdaptedTokens
from tests.support.kernels.batches import assert_same_bits, normal
from tests.support.kernels.graphs import FakeGraphs

FEW, MANY = 1, 4096
"""Multiprocessors: for one program, or for the most parts of the inputs."""
NUM_IN, PARTS, NUM_OUT = 1100, ((0, 200), (200, 264), (300, 333)), 350
RANKS = ((8, 8, 8), (0, 40, 3), (), (130, 0, 1), (1, 16, 17))
"""Ranks of the changes of each part, by adapter; 0 or none: it does not change the part."""


def make_changes(seed, ranks, num_in=NUM_IN, parts=PARTS):
    return [
        LowRank(
            normal(rank, num_in, seed=seed + 10 * place) * num_in**-0.5,
            normal(last - first, rank, seed=seed + 10 * place + 1) * rank**-0.5,
            first,
        )
        for place, ((first, last), rank) in enumerate(zip(parts, ranks, strict=False))
        if rank
    ]


def pack(adapters, dtype, device, target):
    """Returns adapters in the room that they need."""
    reserve = lambda *sizes: reserve_adapters(*sizes, dtype, device, target)  # noqa: E731
    return pack_adapters(SimpleNamespace(reserve_adapters=reserve, set_adapter=set_adapter), adapters)


def tokens_of(adapter_of_token, device, num_padded=0):
    """Returns the tokens with an adapter, sorted by it; -1: none."""
    adapters = torch.tensor(adapter_of_token)
    order = torch.argsort(adapters, stable=True)
    indices = order[adapters[order] >= 0]
    padding = torch.zeros(num_padded, dtype=torch.int64)
    return AdaptedTokens(
        torch.cat((indices, padding)).to(device), torch.cat((adapters[indices], padding - 1)).to(device)
    )


def adapters_of(num_tokens, seed):
    """Adapters of many tokens, of one, of none, and tokens without."""
    choices = torch.randint(0, 2 * len(RANKS), (num_tokens,), generator=torch.Generator().manual_seed(seed))
    return [(-1, 0, 0, 3, 3, 3, 4, 1, -1, 2)[choice] for choice in choices.tolist()]


def exact(y, x, changes_of, adapter_of_token, dtype):
    """Returns results in fp64, and the bound of the error.

    A x has a rounding of fp32 for each input and each part, then one of dtype; B (A x) one for each term; the sum with
    y one of fp32 and one of dtype. Matrices are rounded to dtype already.
    """
    last, rounding = 2.0**-24, torch.finfo(dtype).eps if dtype is not torch.float32 else 2.0**-24
    expected, allowed = y.double().clone(), torch.zeros(y.shape, dtype=torch.float64)
    for token, adapter in enumerate(adapter_of_token):
        for a, b, first in changes_of[adapter] if adapter >= 0 else ():
            a, b, row = a.to(dtype).double(), b.to(dtype).double(), x[token].double()
            rows = slice(first, first + len(b))
            hidden, magnitude = a @ row, a.abs() @ row.abs()
            error = (len(row) + 16) * last * magnitude + rounding * hidden.abs()
            expected[token, rows] += b @ hidden
            allowed[token, rows] = b.abs() @ (error + (len(a) + 16) * last * (hidden.abs() + error))
    is_adapted = (torch.tensor(adapter_of_token) >= 0)[:, None]
    return expected, allowed + is_adapted * (rounding + last) * (expected.abs() + allowed)


@pytest.fixture
def device_options(target):
    return lambda **options: {"target": target, "num_processors": FEW, "batch_invariant": False, **options}


def on_device(device, dtype, *tensors):
    return [tensor.to(device, dtype) for tensor in tensors]


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "num_processors", "batch_invariant"),
    [
        (torch.float32, 1, FEW, False),
        (torch.float32, 60, MANY, False),
        (torch.float16, 40, MANY, False),
        (torch.bfloat16, 40, FEW, False),
        (torch.bfloat16, 200, FEW, False),
        (torch.bfloat16, 40, FEW, True),
    ],
)
def test_values_are_those_of_fp64_and_other_tokens_keep_their_bits(
    device, target, seed, device_options, dtype, num_tokens, num_processors, batch_invariant
):
    changes = [make_changes(seed + 100 * index, ranks) for index, ranks in enumerate(RANKS)]
    packed = pack(changes, dtype, device, target)
    adapter_of_token = adapters_of(num_tokens, seed) if num_tokens > 1 else [3]
    x, y = on_device(
        device, dtype, normal(num_tokens, NUM_IN, seed=seed + 5), normal(num_tokens, NUM_OUT, seed=seed + 6)
    )
    out = y.clone()
    options = device_options(num_processors=num_processors, batch_invariant=batch_invariant)
    add_adapters(out, x, packed, tokens_of(adapter_of_token, device), **options)
    expected, allowed = exact(y.cpu(), x.cpu(), changes, adapter_of_token, dtype)
    assert ((out.cpu().double() - expected).abs() <= allowed).all()
    assert (out != y).any() == any(adapter not in (-1, 2) for adapter in adapter_of_token)


@pytest.mark.parametrize("name", ["sm_75", "gfx942"])
def test_tiles_of_other_targets(device, seed, device_options, name):
    if device.type == "cuda":
        pytest.skip("the tiles of another GPU")
    changes = [make_changes(seed, (20, 5, 64))]
    packed = pack(changes, torch.float16, device, TARGETS[name])
    x, y = on_device(device, torch.float16, normal(70, NUM_IN, seed=seed + 5), normal(70, NUM_OUT, seed=seed + 6))
    out = y.clone()
    add_adapters(out, x, packed, tokens_of([0] * 70, device), **device_options(target=TARGETS[name]))
    expected, allowed = exact(y.cpu(), x.cpu(), changes, [0] * 70, torch.float16)
    assert ((out.cpu().double() - expected).abs() <= allowed).all()


def test_the_largest_rank(device, target, seed, device_options):
    changes = [make_changes(seed, (512,), 96, ((0, 40),)), make_changes(seed + 1, (4,), 96, ((0, 40),))]
    packed = pack(changes, torch.float32, device, target)
    adapter_of_token = [0, 1, -1, 0]
    x, y = normal(4, 96, seed=seed + 5).to(device), normal(4, 40, seed=seed + 6).to(device)
    out = y.clone()
    add_adapters(out, x, packed, tokens_of(adapter_of_token, device), **device_options())
    expected, allowed = exact(y.cpu(), x.cpu(), changes, adapter_of_token, torch.float32)
    assert ((out.cpu().double() - expected).abs() <= allowed).all()
    assert torch.equal(out[2], y[2])


def test_padding_adds_nothing_and_nan_stays_in_its_token(device, target, seed, device_options):
    packed = pack([make_changes(seed, (8, 8, 8))], torch.float32, device, target)
    x, y = normal(5, NUM_IN, seed=seed + 5).to(device), normal(5, NUM_OUT, seed=seed + 6).to(device)
    right, padded, spoiled = y.clone(), y.clone(), y.clone()
    adapter_of_token = [-1, 0, 0, -1, 0]
    add_adapters(right, x, packed, tokens_of(adapter_of_token, device), **device_options())
    add_adapters(padded, x, packed, tokens_of(adapter_of_token, device, num_padded=40), **device_options())
    assert torch.equal(padded, right)
    x[1, 7] = torch.nan
    x[3] = torch.nan  # it has no adapter
    add_adapters(spoiled, x, packed, tokens_of(adapter_of_token, device), **device_options())
    assert spoiled[1, :264].isnan().all()
    others = torch.tensor([0, 2, 3, 4])
    assert_same_bits(spoiled.cpu()[others], right.cpu()[others])
    assert torch.equal(right.cpu()[:, 264:300], y.cpu()[:, 264:300])  # no part has these columns


@pytest.mark.usefixtures("sums_in_order")
def test_a_token_has_the_same_bits_in_any_batch(device, target, seed, device_options):
    """Beside any tokens and with any number of multiprocessors."""
    changes = [make_changes(seed + 100 * index, ranks) for index, ranks in enumerate(RANKS)]
    packed = pack(changes, torch.float32, device, target)
    adapter_of_token = adapters_of(70, seed)
    x, y = normal(70, NUM_IN, seed=seed + 5).to(device), normal(70, NUM_OUT, seed=seed + 6).to(device)
    whole = y.clone()
    invariant = device_options(batch_invariant=True)
    add_adapters(whole, x, packed, tokens_of(adapter_of_token, device), **invariant)
    for first, last in ((0, 1), (33, 60)):
        out = y[first:last].clone()
        options = device_options(batch_invariant=True, num_processors=MANY)
        add_adapters(out, x[first:last], packed, tokens_of(adapter_of_token[first:last], device), **options)
        assert_same_bits(out, whole[first:last])


def test_a_place_is_written_again(device, target, seed, device_options):
    """By an adapter of lower rank and in fewer parts, of which nothing else remains; other places are as before."""
    packed = reserve_adapters(3, 40, NUM_IN, PARTS, torch.float32, device, target)
    x, y = normal(6, NUM_IN, seed=seed + 5).to(device), normal(6, NUM_OUT, seed=seed + 6).to(device)
    adapter_of_token = [0, 1, 2, 0, -1, 1]

    def result(changes_of):
        out = y.clone()
        add_adapters(out, x, packed, tokens_of(adapter_of_token, device), **device_options())
        expected, allowed = exact(y.cpu(), x.cpu(), changes_of, adapter_of_token, torch.float32)
        assert ((out.cpu().double() - expected).abs() <= allowed).all()
        return out

    assert torch.equal(result([(), (), ()]), y)
    first, other = make_changes(seed, (40, 8, 17)), make_changes(seed + 50, (0, 3))
    set_adapter(packed, 0, first)
    before = result([first, (), ()])
    set_adapter(packed, 1, first)
    set_adapter(packed, 0, other)
    after = result([other, first, ()])
    assert not torch.equal(before[0], after[0])
    set_adapter(packed, 0, ())
    result([(), first, ()])


@pytest.mark.parametrize(
    ("rank", "num_in", "rows"), [(41, NUM_IN, (0, 200)), (8, NUM_IN - 1, (0, 200)), (8, NUM_IN, (0, 199))]
)
def test_what_was_not_reserved_is_refused_and_changes_nothing(device, target, seed, device_options, rank, num_in, rows):
    packed = reserve_adapters(1, 40, NUM_IN, PARTS, torch.float32, device, target)
    set_adapter(packed, 0, make_changes(seed, (8, 8, 8)))
    with pytest.raises(ValueError, match=r"A has shape .* reserved are equal ranks up to 40, 1100 columns, and rows"):
        set_adapter(packed, 0, make_changes(seed, (rank,), num_in, (rows,)))
    x, y = normal(2, NUM_IN, seed=seed).to(device), normal(2, NUM_OUT, seed=seed).to(device)
    out = y.clone()
    add_adapters(out, x, packed, tokens_of([0, 0], device), **device_options())
    assert torch.equal(out, y)


def test_changes_that_overlap_and_rows_that_do_not_fit_are_refused(device, target, device_options):
    with pytest.raises(ValueError, match=r"changes of a layer overlap: rows \[\(0, 40\), \(30, 50\)\]"):
        pack([make_changes(0, (4, 4), 8, ((0, 40), (30, 50)))], torch.float32, device, target)
    packed = pack([make_changes(0, (4,), 8, ((0, 40),))], torch.float32, device, target)
    x, y = torch.ones(2, 8, device=device), torch.ones(2, 39, device=device)
    with pytest.raises(ValueError, match=r"x has shape \[2, 8\] .* y \[2, 39\] .* take 8 and change 40"):
        add_adapters(y, x, packed, tokens_of([0, 0], device), **device_options())


@pytest.mark.parametrize("num_tokens", [1, 17, 1500])
@pytest.mark.parametrize("block_m", [16, 64])
def test_every_token_is_in_one_tile_of_its_adapter(device, seed, num_tokens, block_m):
    """Of 9 places, some of them without tokens; padding is in none."""
    generator = torch.Generator().manual_seed(seed)
    adapter_of_token = (torch.randint(-1, 9, (num_tokens,), generator=generator) // 2 * 2).tolist()
    tokens = tokens_of(adapter_of_token, device, num_padded=5)
    tiles = module._token_tiles(tokens, 9, block_m).cpu()
    assert module._token_tiles(tokens, 9, block_m).data_ptr() == tokens.derived[9, block_m].data_ptr()
    listed = []
    for adapter, first, end in tiles.tolist():
        if adapter >= 0:
            assert first < end <= first + block_m
            assert tokens.adapters[first:end].eq(adapter).all()
            listed += range(first, end)
    assert sorted(listed) == list(range(int((tokens.adapters >= 0).sum())))


def test_a_recorded_step_adapts_to_the_adapters_of_each_replay(device, target, seed, device_options, monkeypatch):
    if device.type == "cuda":
        pytest.skip("graphs of a real GPU are tested with whole engines")
    graphs = FakeGraphs()
    for name, replacement in graphs.patches().items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    packed = reserve_adapters(2, 8, NUM_IN, PARTS, torch.float32, device, target)
    x, start, y = normal(20, NUM_IN, seed=seed + 5), normal(20, NUM_OUT, seed=seed + 6), torch.empty(20, NUM_OUT)
    tokens = tokens_of([], device, num_padded=20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        add_adapters(y, x, packed, tokens, **device_options())
    changes = make_changes(seed, (8, 4)), make_changes(seed + 50, (0, 8, 8))
    for adapter_of_token in ([-1] * 20, [1, 0] * 10, [0] * 20, [-1] * 19 + [1]):
        for index in range(2):
            set_adapter(packed, index, changes[index])
        now = tokens_of(adapter_of_token, device, num_padded=adapter_of_token.count(-1))
        tokens.indices.copy_(now.indices)
        tokens.adapters.copy_(now.adapters)
        y.copy_(start)
        graph.replay()
        expected, allowed = exact(start, x, changes, adapter_of_token, torch.float32)
        assert ((y.double() - expected).abs() <= allowed).all()
        changes = changes[::-1]
