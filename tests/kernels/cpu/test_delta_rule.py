"""The gated delta rule on CPUs against the reference; a request has the same bits in any batch and any chunks."""

from dataclasses import replace

import pytest
import torch

from kernels.delta_heads import DeltaHeads
from kernels.delta_rule import DeltaStates, DeltaWeights
from kernels.families import cpu_ops, reference_ops
from kernels.metadata import AttentionMetadata
from tests.support.kernels.batches import assert_close, assert_same_bits

OPS, REFERENCE = cpu_ops(), reference_ops()
CPU = torch.device("cpu")
HEADS = {
    "one head each": DeltaHeads(1, 16, 1, 16, 4),
    "four value heads of a key head, 32 columns and 16": DeltaHeads(2, 32, 8, 48, 4),
    "more channels than an item has, shortest convolution": DeltaHeads(3, 64, 3, 80, 2),
    "longest rows, long convolution": DeltaHeads(1, 256, 2, 32, 7),
}


def weights_of(heads: DeltaHeads) -> DeltaWeights:
    generator = torch.Generator().manual_seed(1)
    conv = torch.randn(heads.conv_width, heads.num_channels, generator=generator)
    decay = torch.rand(heads.num_value_heads, generator=generator) * 2
    bias = torch.randn(heads.num_value_heads, generator=generator)
    # of unit scale, though results of a head may be near zero
    return DeltaWeights(heads, conv, decay, bias, torch.rand(heads.value_dim, generator=generator) + 0.5, 0.05)


def states_of(heads: DeltaHeads, num_slots: int) -> DeltaStates:
    generator = torch.Generator().manual_seed(2)
    states = DeltaStates.zeros(heads, num_slots, CPU)
    states.conv.normal_(generator=generator)
    states.recurrent.normal_(generator=generator)
    return states


def copy_of(states: DeltaStates, heads: DeltaHeads) -> DeltaStates:
    """Returns a copy whose slots lie apart, beside the states of other layers."""
    memory = torch.full((len(states.conv), heads.state_size + 48), torch.nan)
    copied = DeltaStates.of(memory[:, 16:-32], heads)
    copied.conv.copy_(states.conv)
    copied.recurrent.copy_(states.recurrent)
    return copied


def batch(query_lens, seq_lens, slots) -> AttentionMetadata:
    query_start = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    num_tokens = int(query_start[-1])
    return AttentionMetadata(
        query_start_loc=query_start,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.zeros(len(slots), 1, dtype=torch.int32),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        block_size=16,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        state_slots=torch.tensor(slots, dtype=torch.int32),
    )


def inputs_of(heads: DeltaHeads, num_tokens: int, seed: int = 3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, heads.num_channels + heads.value_size, generator=generator)
    return x, torch.randn(num_tokens, 2 * heads.num_value_heads, generator=generator) * 3


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_it_equals_the_reference(heads, num_threads):
    """One-token rows, chunks that begin, continue and are longer than a batch of tokens, and padding."""
    ops = cpu_ops(num_threads=num_threads)
    weights, states = weights_of(heads), states_of(heads, 8)
    metadata = batch([1, 1, 7, 70, 2, 1], [9, 1, 7, 75, 3, 0], [2, 7, 0, 4, 1, 5])
    x, gates = inputs_of(heads, 82)
    ours, theirs = copy_of(states, heads), copy_of(states, heads)
    actual = ops.delta_rule(x.clone(), gates, weights, ours, metadata)
    assert_close(actual, REFERENCE.delta_rule(x, gates, weights, theirs, metadata), extra_atol=2e-5)
    assert_close(ours.recurrent, theirs.recurrent, extra_atol=1e-5)
    assert_same_bits(ours.conv, theirs.conv)
    for unused in (3, 5, 6):  # 5 is of padding
        assert_same_bits(ours.recurrent[unused], states.recurrent[unused])
        assert_same_bits(ours.conv[unused], states.conv[unused])
    assert not actual[-1].any()


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_a_request_has_the_same_bits_alone_and_in_any_chunks(heads):
    weights, length = weights_of(heads), 45
    x, gates = inputs_of(heads, length)
    other_x, other_gates = inputs_of(heads, 20, seed=4)
    whole = states_of(heads, 1)
    expected = OPS.delta_rule(x.clone(), gates, weights, whole, batch([length], [length], [0]))
    states, parts, done = states_of(heads, 3), [], 0
    for chunk in (1, 20, 2, 1, 21):
        rows = slice(done, done + chunk)
        done += chunk
        metadata = batch([20, chunk], [20, done], [0, 2])
        inputs = torch.cat((other_x, x[rows])), torch.cat((other_gates, gates[rows]))
        parts.append(OPS.delta_rule(*inputs, weights, states, metadata)[20:])
    assert_same_bits(torch.cat(parts), expected)
    assert_same_bits(states.recurrent[2], whole.recurrent[0])
    assert_same_bits(states.conv[2], whole.conv[0])


def test_a_new_request_does_not_read_what_its_slot_holds():
    heads = HEADS["one head each"]
    weights, states = weights_of(heads), states_of(heads, 1)
    x, gates = inputs_of(heads, 3)
    expected = OPS.delta_rule(x.clone(), gates, weights, DeltaStates.zeros(heads, 1, CPU), batch([3], [3], [0]))
    states.conv.fill_(torch.nan)
    states.recurrent.fill_(torch.nan)
    assert_same_bits(OPS.delta_rule(x.clone(), gates, weights, states, batch([3], [3], [0])), expected)


@pytest.mark.parametrize("where", ["x", "z", "gates", "state"])
def test_nan_stays_in_its_request(where):
    heads = DeltaHeads(1, 16, 2, 16, 4)
    weights, states = weights_of(heads), states_of(heads, 2)
    x, gates = inputs_of(heads, 2)
    metadata = batch([1, 1], [5, 5], [0, 1])
    expected = OPS.delta_rule(x.clone(), gates, weights, copy_of(states, heads), metadata)
    match where:
        case "x":
            x[1, heads.num_channels - 1] = torch.nan
        case "z":
            x[1, -1] = torch.nan
        case "gates":
            gates[1, -1] = torch.nan
        case "state":
            states.recurrent[1, -1, 3, 3] = torch.nan
    actual = OPS.delta_rule(x, gates, weights, states, metadata)
    assert_same_bits(actual[0], expected[0])
    assert actual[1].isnan().any()


@pytest.mark.parametrize("a", [-1e4, -100.0, 0.0, 100.0, 1e4])
def test_a_large_decay_rounds_to_all_or_nothing(a):
    """softplus and its exponential neither overflow nor become NaN."""
    heads = HEADS["one head each"]
    weights, states, metadata = weights_of(heads), states_of(heads, 1), batch([1], [9], [0])
    x, gates = inputs_of(heads, 1)
    gates[0, 1] = a
    expected = REFERENCE.delta_rule(x.clone(), gates, weights, copy_of(states, heads), metadata)
    assert_close(OPS.delta_rule(x, gates, weights, states, metadata), expected, extra_atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (DeltaHeads(1, 18, 1, 16, 4), "key_dim is 18, value_dim 16; expected multiples of 4 and 16"),
        (DeltaHeads(1, 16, 1, 24, 4), "key_dim is 16, value_dim 24; expected multiples of 4 and 16"),
        (DeltaHeads(1, 2**15, 1, 16, 4), "too large for the scratch memory"),
    ],
)
def test_sizes_that_are_not_computed_are_refused(heads, message):
    x, gates = inputs_of(heads, 1)
    with pytest.raises(ValueError, match=message):
        OPS.delta_rule(x, gates, weights_of(heads), states_of(heads, 1), batch([1], [1], [0]))


@pytest.mark.parametrize("ops", [OPS, REFERENCE], ids=["cpu", "reference"])
def test_inputs_that_do_not_fit_are_refused(ops):
    heads = HEADS["one head each"]
    weights, states, metadata = weights_of(heads), states_of(heads, 1), batch([1], [1], [0])
    x, gates = inputs_of(heads, 1)
    with pytest.raises(ValueError, match=r"x is \[1, 63\] and gates \[1, 2\], expected \[1, 64\] and \[1, 2\]"):
        ops.delta_rule(x[:, :-1].contiguous(), gates, weights, states, metadata)
    with pytest.raises(ValueError, match=r"conv is \[3, 48\], expected \[4, 48\]"):
        ops.delta_rule(x, gates, replace(weights, conv=weights.conv[1:].contiguous()), states, metadata)
    other = DeltaStates(states.conv, states.recurrent[..., :8].contiguous())
    with pytest.raises(ValueError, match=r"states of a request are \[3, 48\] and \[1, 16, 8\]"):
        ops.delta_rule(x, gates, weights, other, metadata)
    with pytest.raises(ValueError, match="the batch has no state_slots"):
        ops.delta_rule(x, gates, weights, states, replace(metadata, state_slots=None))


def test_rows_that_a_program_would_misread_are_refused():
    heads = HEADS["one head each"]
    weights, states, metadata = weights_of(heads), states_of(heads, 2), batch([1, 1], [1, 1], [0, 1])
    x, gates = inputs_of(heads, 2)
    for name in ("query_start_loc", "seq_lens", "state_slots"):
        wide = replace(metadata, **{name: getattr(metadata, name).long()})
        with pytest.raises(ValueError, match=f"{name} is int64 on cpu .*, CPU operations take int32"):
            OPS.delta_rule(x, gates, weights, states, wide)
    with pytest.raises(ValueError, match="the batch has 2 rows and 1 state_slots"):
        OPS.delta_rule(x, gates, weights, states, replace(metadata, state_slots=metadata.state_slots[:1]))
