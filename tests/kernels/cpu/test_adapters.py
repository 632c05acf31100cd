"""Adapters of linear layers on CPUs against fp64; a row has the same bits among any others."""

import pytest
import torch

from kernels.cpu.instruction import SCRATCH_BYTES
from kernels.cpu.tile import MAX_ROWS
from kernels.families import cpu_ops, reference_ops
from kernels.interface import LowRank, pack_adapters
from kernels.metadata import AdaptedTokens
from tests.support.kernels.batches import assert_same_bits, normal

# Inputs, outputs: around vectors and groups; more than a tile of MAX_ROWS rows fits into scratch memory.
SHAPES = [(1, 1), (7, 31), (64, 33), (130, 100), (129, 2062), (SCRATCH_BYTES // 4 // 3, 5)]
RANKS = (1, 8, 40, 3)
UNCHANGED = 2  # this adapter leaves the layer as it is


def make_changes(num_in, num_out):
    """Makes adapters of one change, and one of several in different rows, which leaves some as they are."""

    def change(rank, first_row, last_row):
        rows = last_row - first_row
        a, b = normal(rank, num_in, seed=rank), normal(rows, rank, seed=100 + rank)
        return LowRank(a * num_in**-0.5, b, first_row)

    adapters = [[change(rank, 0, num_out)] for rank in RANKS]
    third = num_out // 3
    adapters.append([change(2, 0, third), change(33, num_out - third, num_out)] if third else [change(2, 0, 1)])
    adapters.insert(UNCHANGED, [])
    return adapters


def dense(changes, num_in, num_out):
    """Returns what an adapter adds to the weights, and the same of all magnitudes, in fp64."""
    total, magnitudes = torch.zeros(2, num_out, num_in, dtype=torch.float64)
    for a, b, first_row in changes:
        rows = slice(first_row, first_row + len(b))
        total[rows] += b.double() @ a.double()
        magnitudes[rows] += b.double().abs() @ a.double().abs()
    return total, magnitudes


def tokens_of(adapter_of_row):
    """Returns the description of a batch, given the adapter of each row; -1: none."""
    adapters = torch.tensor(adapter_of_row)
    order = torch.argsort(adapters, stable=True)
    indices = order[adapters[order] >= 0]
    return AdaptedTokens(indices, adapters[indices])


def batches():
    generator = torch.Generator().manual_seed(5)
    yield [-1]
    yield [0]
    yield [-1, 3, -1]
    for num_rows in (MAX_ROWS, 5 * MAX_ROWS + 3):
        yield torch.randint(-1, len(RANKS) + 2, (num_rows,), generator=generator).tolist()
        yield [1] * num_rows


@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_products_are_those_of_fp64_and_rows_without_adapters_keep_their_bits(num_in, num_out, num_threads):
    """A sum of n terms is off by less than n u times the sum of magnitudes (Higham, section 3.1), u = 2^-24."""
    ops, changes = cpu_ops(num_threads=num_threads), make_changes(num_in, num_out)
    packed = pack_adapters(ops, changes)
    for adapter_of_row in batches():
        x, start = normal(len(adapter_of_row), num_in, seed=1), normal(len(adapter_of_row), num_out, seed=2)
        y = start.clone()
        ops.add_adapters(y, x, packed, tokens_of(adapter_of_row))
        for row, adapter in enumerate(adapter_of_row):
            if adapter < 0 or not changes[adapter]:
                assert_same_bits(y[row], start[row])
                continue
            total, magnitudes = dense(changes[adapter], num_in, num_out)
            want = start[row].double() + total @ x[row].double()
            bound = start[row].double().abs() + magnitudes @ x[row].double().abs()
            assert ((y[row] - want).abs() <= 2 * (num_in + max(RANKS) + 1) * 2**-24 * bound).all()
            changed = magnitudes.sum(dim=1) > 0
            assert_same_bits(y[row][~changed], start[row][~changed])


@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_a_row_has_the_same_bits_alone_and_among_others(num_in, num_out):
    ops = cpu_ops(num_threads=2)
    packed = pack_adapters(ops, make_changes(num_in, num_out))
    for adapter_of_row in batches():
        x, start = normal(len(adapter_of_row), num_in, seed=1), normal(len(adapter_of_row), num_out, seed=2)
        together = start.clone()
        ops.add_adapters(together, x, packed, tokens_of(adapter_of_row))
        for row, adapter in enumerate(adapter_of_row):
            alone = start[row : row + 1].clone()
            ops.add_adapters(alone, x[row : row + 1], packed, tokens_of([adapter]))
            assert_same_bits(together[row], alone[0])


def test_the_reference_adds_the_same():
    num_in, num_out = 130, 100
    changes, adapter_of_row = make_changes(num_in, num_out), [3, -1, 0, 2, 0, 5]
    x, start = normal(6, num_in, seed=1), normal(6, num_out, seed=2)
    results = []
    for ops in (cpu_ops(), reference_ops()):
        results.append(start.clone())
        ops.add_adapters(results[-1], x, pack_adapters(ops, changes), tokens_of(adapter_of_row))
    torch.testing.assert_close(*results, rtol=0, atol=2 * (num_in + max(RANKS)) * 2**-24 * 100)


def test_shapes_that_disagree_are_refused():
    ops = cpu_ops()
    a, b = torch.ones(8, 64), torch.ones(33, 8)
    with pytest.raises(ValueError, match=r"A has shape \[8, 63\], B .* reserved are ranks up to 8, 64 columns"):
        pack_adapters(ops, [[LowRank(a, b)], [LowRank(a[:, :63], b)]])
    with pytest.raises(ValueError, match=r"A has shape \[8, 64\], B \[33, 7\]: their ranks differ"):
        pack_adapters(ops, [[LowRank(a, b[:, :7])]])
    packed = pack_adapters(ops, [[LowRank(a, b, 2)]])
    for x, y in ((torch.ones(1, 63), torch.ones(1, 35)), (torch.ones(1, 64), torch.ones(1, 34))):
        with pytest.raises(ValueError, match="the adapters take 64 and change 35"):
            ops.add_adapters(y, x, packed, tokens_of([0]))


def rows_of(num_out):
    """Returns the rows that `make_changes` changes together, each once."""
    third = num_out // 3
    spans = [(0, num_out), *([(0, third), (num_out - third, num_out)] if third else [(0, 1)])]
    return list(dict.fromkeys(spans))


@pytest.mark.parametrize(("num_in", "num_out"), SHAPES[:-1])
def test_adapters_written_one_by_one_give_the_bits_of_those_packed_together(num_in, num_out):
    ops, changes = cpu_ops(num_threads=2), make_changes(num_in, num_out)
    packed = pack_adapters(ops, changes)
    reserved = ops.reserve_adapters(len(changes), max(RANKS), num_in, rows_of(num_out))
    for adapter_of_row in batches():
        x, start = normal(len(adapter_of_row), num_in, seed=1), normal(len(adapter_of_row), num_out, seed=2)
        for index, change in enumerate(changes):
            ops.set_adapter(reserved, index, change)
        expected, y = start.clone(), start.clone()
        ops.add_adapters(expected, x, packed, tokens_of(adapter_of_row))
        ops.add_adapters(y, x, reserved, tokens_of(adapter_of_row))
        assert_same_bits(y, expected)
        for index in range(len(changes)):
            ops.set_adapter(reserved, index, [])
        y = start.clone()
        ops.add_adapters(y, x, reserved, tokens_of(adapter_of_row))
        assert_same_bits(y, start)


@pytest.mark.parametrize("make_ops", [cpu_ops, reference_ops])
def test_replacing_an_adapter_changes_its_rows_only(make_ops):
    ops, num_in, num_out, adapter_of_row = make_ops(), 64, 48, [0, 1, -1, 1]
    reserved = ops.reserve_adapters(2, 8, num_in, [(0, num_out)])
    x = normal(4, num_in, seed=1)

    def added():
        y = torch.zeros(4, num_out)
        ops.add_adapters(y, x, reserved, tokens_of(adapter_of_row))
        return y

    first = LowRank(normal(8, num_in, seed=3), normal(num_out, 8, seed=4))
    second = LowRank(normal(3, num_in, seed=5), normal(num_out, 3, seed=6))
    ops.set_adapter(reserved, 0, [first])
    ops.set_adapter(reserved, 1, [first])
    before = added()
    ops.set_adapter(reserved, 1, [second])
    after = added()
    assert_same_bits(after[[0, 2]], before[[0, 2]])
    expected = x[[1, 3]].double() @ (second.b.double() @ second.a.double()).T
    torch.testing.assert_close(after[[1, 3]].double(), expected, rtol=0, atol=2 * (num_in + 3) * 2**-24 * 300)


def test_adapters_that_were_not_reserved_are_refused_and_change_nothing():
    ops = cpu_ops()
    reserved = ops.reserve_adapters(1, 4, 64, [(0, 16), (16, 48)])
    a, b, x = torch.ones(4, 64), torch.ones(16, 4), torch.ones(1, 64)
    for change in (
        LowRank(torch.ones(5, 64), torch.ones(16, 5)),
        LowRank(torch.ones(4, 63), b),
        LowRank(a, b, 1),
        LowRank(a, torch.ones(48, 4)),
    ):
        ops.set_adapter(reserved, 0, [LowRank(a, b)])
        with pytest.raises(ValueError, match="reserved are ranks up to 4, 64 columns"):
            ops.set_adapter(reserved, 0, [change])
        y = torch.zeros(1, 48)
        ops.add_adapters(y, x, reserved, tokens_of([0]))
        assert not y.any()
