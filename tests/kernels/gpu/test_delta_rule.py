"""The gated delta rule on ragged batches against the reference in fp32, which has the library's results."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from kernels.delta_heads import DeltaHeads
from kernels.delta_rule import DeltaStates, DeltaWeights
from kernels.gpu.delta_rule import delta_rule
from kernels.gpu.targets import UnsupportedTargetError
from kernels.gpu.token_rows import token_rows
from kernels.metadata import AttentionMetadata
from kernels.reference.delta_rule import delta_rule as reference_delta_rule
from tests.support.kernels.batches import assert_close, assert_quantized, normal

EPS = 1e-6
NUM_SLOTS = 9
SMALL = DeltaHeads(num_key_heads=1, key_dim=16, num_value_heads=2, value_dim=16, conv_width=4)
SIZES = [
    SMALL,
    DeltaHeads(2, 16, 2, 16, 4),
    DeltaHeads(2, 32, 6, 16, 3),
    DeltaHeads(1, 16, 1, 64, 2),
    DeltaHeads(1, 128, 3, 32, 8),
]


class Row(NamedTuple):
    """Tokens of this step, and tokens before."""

    num_tokens: int
    num_computed: int = 0


ROWS = (Row(1, 7), Row(5), Row(1), Row(9, 2), Row(3, 40), Row(2))


def make_weights(heads, seed):
    return DeltaWeights(
        heads,
        conv=normal(heads.conv_width, heads.num_channels, seed=seed + 1),
        decay=torch.exp(normal(heads.num_value_heads, seed=seed + 2) - 2),  # of every state some remains for long
        dt_bias=normal(heads.num_value_heads, seed=seed + 3),
        norm=normal(heads.value_dim, seed=seed + 4),
        eps=EPS,
    )


def make_states(heads, seed):
    """Returns states whose slots lie apart, beside those of other layers."""
    memory = normal(NUM_SLOTS, heads.state_size + 48, seed=seed + 5)
    return DeltaStates.of(memory[:, 16:-32], heads)


def make_inputs(heads, num_tokens, seed, dtype=torch.float32):
    x = normal(num_tokens, heads.num_channels + heads.value_size, seed=seed + 7)
    return x.to(dtype), normal(num_tokens, 2 * heads.num_value_heads, seed=seed + 8).to(dtype)


def make_batch(rows, slots, num_tokens=None):
    """Describes rows; a row of no tokens at all is one token of padding."""
    lengths = torch.tensor([0, *(row.num_tokens or 1 for row in rows)])
    ends = lengths.cumsum(0).int()
    return AttentionMetadata(
        query_start_loc=ends,
        seq_lens=torch.tensor([sum(row) for row in rows], dtype=torch.int32),
        block_table=torch.zeros(len(rows), 1, dtype=torch.int32),
        slot_mapping=torch.zeros(int(ends[-1]) if num_tokens is None else num_tokens, dtype=torch.int64),
        block_size=16,
        max_query_len=int(lengths.max()),
        max_seq_len=64,
        state_slots=torch.tensor(slots, dtype=torch.int32),
    )


def moved(value, device):
    """Copies the tensors of a dataclass to a device."""
    fields = {name: getattr(value, name) for name in value.__dataclass_fields__ if not name.startswith("_")}
    tensors = {name: field.to(device, copy=True) for name, field in fields.items() if isinstance(field, torch.Tensor)}
    return replace(value, **tensors)


def run(device, x, gates, weights, states, batch, **options):
    """Returns the result and the states afterwards, on the CPU."""
    states = moved(states, device)
    out = delta_rule(x.to(device), gates.to(device), moved(weights, device), states, moved(batch, device), **options)
    return (out.cpu() if isinstance(out, torch.Tensor) else out), moved(states, "cpu")


def wanted(x, gates, weights, states, batch):
    states = moved(states, "cpu")
    return reference_delta_rule(x.float(), gates.float(), weights, states, batch), states


def assert_states_close(actual, expected, slots):
    """The states at the slots are near, all others as before."""
    for name in ("conv", "recurrent"):
        got, want = getattr(actual, name), getattr(expected, name)
        assert_close(got[slots], want[slots])
        others = [slot for slot in range(NUM_SLOTS) if slot not in slots]
        assert torch.equal(got[others], want[others])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", SIZES)
def test_ragged_batches_equal_reference(device, seed, heads, dtype):
    weights, states = make_weights(heads, seed), make_states(heads, seed)
    slots = [3, 0, 8, 5, 1, 6]
    batch = make_batch(ROWS, slots)
    x, gates = make_inputs(heads, batch.num_tokens, seed, dtype)
    out, after = run(device, x, gates, weights, states, batch)
    expected, expected_states = wanted(x, gates, weights, states, batch)
    assert out.dtype is dtype
    assert_close(out, expected)
    assert_states_close(after, expected_states, slots)


def test_more_tokens_than_a_program_takes_equal_reference(device, seed):
    heads = DeltaHeads(1, 128, 1, 32, 4)  # 8 tokens per program of the convolution
    weights, states = make_weights(heads, seed), make_states(heads, seed)
    batch = make_batch((Row(7), Row(21, 1), Row(1, 3)), [2, 4, 7])
    x, gates = make_inputs(heads, batch.num_tokens, seed)
    out, after = run(device, x, gates, weights, states, batch)
    expected, expected_states = wanted(x, gates, weights, states, batch)
    assert_close(out, expected)
    assert_states_close(after, expected_states, [2, 4, 7])


def test_inputs_may_be_columns_of_wider_rows(device, seed):
    weights, states, batch = (
        make_weights(SMALL, seed),
        make_states(SMALL, seed),
        make_batch((Row(3, 2), Row(2)), [1, 0]),
    )
    x, gates = make_inputs(SMALL, 5, seed)
    expected, expected_states = run(device, x, gates, weights, states, batch)
    both = torch.cat((normal(5, 3, seed=seed), x, gates), dim=1).to(device)
    columns = both[:, 3 : 3 + x.shape[1]], both[:, 3 + x.shape[1] :]
    on_device = moved(states, device)
    out = delta_rule(*columns, moved(weights, device), on_device, moved(batch, device))
    assert torch.equal(out.cpu(), expected)
    assert torch.equal(on_device.conv.cpu(), expected_states.conv)


def test_first_tokens_do_not_read_their_slot(device, seed):
    weights, states = make_weights(SMALL, seed), make_states(SMALL, seed)
    batch = make_batch((Row(2), Row(5), Row(1, 1)), [4, 2, 0])
    x, gates = make_inputs(SMALL, 8, seed)
    expected, expected_states = wanted(x, gates, weights, states, batch)
    for tensor in (states.conv, states.recurrent):
        tensor[[4, 2]] = torch.nan
        tensor[[1, 3]] = torch.nan  # of nobody here
    out, after = run(device, x, gates, weights, states, batch)
    assert_close(out, expected)
    for slot in (4, 2, 0):
        assert_close(after.recurrent[slot], expected_states.recurrent[slot])
        assert_close(after.conv[slot], expected_states.conv[slot])
    assert after.recurrent[[1, 3]].isnan().all()
    assert after.conv[[1, 3]].isnan().all()


@pytest.mark.parametrize("heads", [SMALL, DeltaHeads(1, 32, 1, 16, 8)])
def test_chunks_have_the_bits_of_the_whole_prompt(device, seed, heads):
    """In any chunks, in another slot, and beside other rows."""
    num_tokens = 13
    weights, states = make_weights(heads, seed), make_states(heads, seed)
    x, gates = make_inputs(heads, num_tokens, seed, torch.bfloat16)
    whole, after = run(device, x, gates, weights, states, make_batch((Row(num_tokens),), [2]))
    other_x, other_gates = make_inputs(heads, 4, seed + 20, torch.bfloat16)
    for chunks in ([1] * num_tokens, [4, 8, 1], [2, 1, 7, 3]):
        end, parts, current = 0, [], states
        for length in chunks:
            rows = Row(1), Row(length, end), Row(3, 5)
            row_x, row_gates = (
                torch.cat((other[:1], own[end : end + length], other[1:]))
                for own, other in ((x, other_x), (gates, other_gates))
            )
            out, current = run(device, row_x, row_gates, weights, current, make_batch(rows, [0, 7, 3]))
            parts.append(out[1 : 1 + length])
            end += length
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(current.recurrent[7], after.recurrent[2])
        assert torch.equal(current.conv[7], after.conv[2])


def test_padding_is_zero_and_changes_no_state(device, seed):
    """A row of sequence length 0 between others, and tokens behind the last row, whatever they hold."""
    weights, states = make_weights(SMALL, seed), make_states(SMALL, seed)
    rows, slots = (Row(1, 3), Row(0), Row(2), Row(0)), [1, 5, 3, 6]
    batch = make_batch(rows, slots, num_tokens=8)  # the rows have 5
    x, gates = make_inputs(SMALL, 8, seed)
    padding = torch.tensor([1, 4, 5, 6, 7])
    expected, expected_states = wanted(x, gates, weights, states, batch)
    x[padding], gates[padding] = torch.nan, torch.nan
    out, after = run(device, x, gates, weights, states, batch)
    assert_close(out, expected)
    assert not out[padding].any()
    assert_states_close(after, expected_states, [1, 3])
    nothing = make_batch((Row(0), Row(0)), [5, 6])
    out, after = run(device, x[:2], gates[:2], weights, states, nothing)
    assert not out.any()
    assert torch.equal(after.recurrent, states.recurrent)
    assert torch.equal(after.conv, states.conv)


def test_nan_stays_in_its_row_and_in_its_later_tokens(device, seed):
    weights, states, batch = make_weights(SMALL, seed), make_states(SMALL, seed), make_batch(ROWS, [3, 0, 8, 5, 1, 6])
    x, gates = make_inputs(SMALL, batch.num_tokens, seed)
    clean, clean_states = run(device, x, gates, weights, states, batch)
    x[9, SMALL.key_size + 2] = torch.nan  # a key in the fourth row, whose first token is 7
    out, after = run(device, x, gates, weights, states, batch)
    hit = out.isnan().any(dim=1).nonzero().flatten().tolist()
    assert hit == list(range(9, 16))
    kept = [token for token in range(len(out)) if token not in hit]
    assert torch.equal(out[kept], clean[kept])
    assert after.recurrent[5].isnan().any()
    others = [slot for slot in range(NUM_SLOTS) if slot != 5]
    assert torch.equal(after.recurrent[others], clean_states.recurrent[others])
    assert torch.equal(after.conv[others], clean_states.conv[others])


@pytest.mark.parametrize("group_size", [None, 16])
def test_quantized_results_are_rounded_once(device, seed, float8, group_size):
    weights, states, slots = make_weights(SMALL, seed), make_states(SMALL, seed), [3, 0, 8]
    batch = make_batch((Row(1, 7), Row(5), Row(0)), slots)
    x, gates = make_inputs(SMALL, 7, seed, torch.bfloat16)
    rows, after = run(device, x, gates, weights, states, batch, quantize=float8, group_size=group_size)
    expected, expected_states = wanted(x, gates, weights, states, batch)
    assert rows.values.dtype is float8
    assert rows.group_size == (group_size or SMALL.value_size)
    got = rows.dequantized(torch.float32).cpu()
    assert_quantized(got.view(7, -1, rows.group_size), expected.view(7, -1, rows.group_size), float8)
    assert not got[6].any()
    assert_states_close(after, expected_states, [3, 0])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's, where a GPU has infinity
def test_decays_of_very_large_and_small_gates(device):
    """Without keys, a token multiplies the state by its decay."""
    values = torch.tensor([-1e4, -90.0, -40.0, -20.0, -12.0, -3.0, 0.0, 5.0, 20.0, 1e4])
    heads = DeltaHeads(1, 16, len(values), 16, 2)
    scale = torch.tensor([1.0, 1e30, 1e15, 3e8, 1e4, 4.0, 1.0, 0.1, 0.01, 1e-4])
    weights = replace(make_weights(heads, 0), conv=torch.zeros(2, heads.num_channels), decay=scale)
    weights = replace(weights, dt_bias=torch.zeros(len(values)))
    states = make_states(heads, 0)
    x, gates = make_inputs(heads, 1, 0)
    gates[0, len(values) :] = values
    _, after = run(device, x, gates, weights, states, make_batch((Row(1, 1),), [2]))
    decay = torch.exp(-scale.double() * torch.log1p(values.double().clamp(max=700).exp()))
    decay[-1] = torch.exp(torch.tensor(-1.0, dtype=torch.float64))
    torch.testing.assert_close(
        after.recurrent[2], (states.recurrent[2] * decay[:, None, None]).float(), atol=0, rtol=2e-6
    )


def test_results_go_to_given_memory(device, seed):
    weights, states, batch = make_weights(SMALL, seed), make_states(SMALL, seed), make_batch((Row(3),), [1])
    x, gates = make_inputs(SMALL, 3, seed)
    out = torch.full((3, SMALL.value_size), torch.nan, device=device)
    expected, _ = run(device, x, gates, weights, states, batch)
    run(device, x, gates, weights, states, batch, out=out)
    assert torch.equal(out.cpu(), expected)
    with pytest.raises(ValueError, match=r"out is \[2, 32\] torch\.float32, the result is \[3, 32\] torch\.float32"):
        run(device, x, gates, weights, states, batch, out=out[:2])


def test_empty_batch_gives_no_rows(device):
    x, gates = make_inputs(SMALL, 0, 0)
    out, _ = run(device, x, gates, make_weights(SMALL, 0), make_states(SMALL, 0), make_batch((), []))
    assert out.shape == (0, SMALL.value_size)


def test_each_token_has_the_number_of_its_row(device, seed):
    """More rows than the kernel reads at once; rows without tokens, and of padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (300,), generator=generator)
    seq_lens = torch.randint(0, 2, (300,), generator=generator) * (lengths + 5)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    num_tokens = int(starts[-1]) + 70
    batch = replace(
        make_batch((), []),
        query_start_loc=starts.int().to(device),
        seq_lens=seq_lens.int().to(device),
    )
    expected = torch.full((num_tokens,), -1)
    for row in range(300):
        if seq_lens[row]:
            expected[starts[row] : starts[row + 1]] = row
    rows = token_rows(batch, num_tokens)
    assert rows.tolist() == expected.tolist()
    assert token_rows(batch, num_tokens) is rows


def test_errors_name_what_is_wrong(device):
    def run_with(heads=SMALL, dtype=torch.float32, gates_dtype=torch.float32, conv_dtype=torch.float32):
        x, gates = make_inputs(heads, 1, 0)
        weights, states = make_weights(heads, 0), make_states(heads, 0)
        weights = replace(weights, conv=weights.conv.to(conv_dtype))
        run(device, x.to(dtype), gates.to(gates_dtype), weights, states, make_batch((Row(1),), [0]))

    with pytest.raises(UnsupportedTargetError, match="key_dim is 24 and value_dim 16; GPU operations take powers"):
        run_with(DeltaHeads(1, 24, 1, 16, 4))
    with pytest.raises(ValueError, match="key_dim is 16 and value_dim 512"):
        run_with(DeltaHeads(1, 16, 1, 512, 4))
    with pytest.raises(ValueError, match="conv_width is 9; GPU operations take 2 to 8"):
        run_with(DeltaHeads(1, 16, 1, 16, 9))
    with pytest.raises(ValueError, match="3 value heads are not a multiple of 2 key heads"):
        run_with(DeltaHeads(2, 16, 3, 16, 4))
    with pytest.raises(ValueError, match=r"x is torch\.float16, gates are torch\.float32"):
        run_with(dtype=torch.float16)
    with pytest.raises(ValueError, match=r"x is torch\.float64, GPU operations take"):
        run_with(dtype=torch.float64, gates_dtype=torch.float64)
    with pytest.raises(ValueError, match=r"conv is torch\.bfloat16"):
        run_with(conv_dtype=torch.bfloat16)
