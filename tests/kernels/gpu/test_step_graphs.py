"""Decode steps are recorded once and replayed on the current buffers, with a fake of CUDA graphs."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from engine.runner.buckets import decode_buckets
from kernels.gpu.memory import free_bytes
from kernels.gpu.step_graphs import StepGraphs, decode_inputs
from kernels.metadata import AdaptedTokens, GroupBlocks
from tests.support.kernels.batches import make_step_buffers
from tests.support.kernels.gpu_memory import FakeGpuMemory
from tests.support.kernels.graphs import FakeGraphs

META = torch.device("meta")
MAX_REQS, MAX_TOKENS, MAX_BLOCKS, VOCAB = 8, 20, 3, 7


@pytest.fixture
def largest():
    """Buffers of two cache groups before the first batch, filled with rows of padding."""
    buffers = make_step_buffers(MAX_REQS, MAX_TOKENS, MAX_BLOCKS)
    other = GroupBlocks(buffers.metadata.block_table.clone(), buffers.metadata.slot_mapping.clone())
    metadata = replace(buffers.metadata, other_groups=(other,))
    return replace(buffers, metadata=metadata, logits=torch.empty(MAX_REQS, VOCAB))


def recorded_by(_recorder):
    """For steps without attention."""
    return nullcontext()


def step(inputs):
    """Returns logits that depend on every input."""
    metadata = inputs.metadata
    values = inputs.input_ids + 100 * inputs.positions
    rows = metadata.seq_lens + 1e3 * metadata.query_start_loc[1:]
    for group in range(2):
        blocks = metadata.of_group(group)
        values = values + (1 + group) * 1e4 * blocks.slot_mapping
        rows = rows + (1 + group) * 50 * blocks.block_table.sum(1)
    values = values.double() + 1e6 * torch.repeat_interleave(rows.double(), metadata.query_start_loc.diff())
    logits = (values[inputs.logits_indices][:, None] * torch.arange(1, VOCAB + 1)).float()
    return logits if inputs.logits is None else inputs.logits.copy_(logits)


def fill(largest, num_rows, seed, *, num_padded=0, num_wanted=None, query_len=1):
    """Writes a batch to the beginnings of the buffers and returns views of it."""
    generator = torch.Generator().manual_seed(seed)
    size = num_rows + num_padded
    num_tokens = size * query_len
    whole = largest.metadata
    largest.input_ids[:num_tokens] = torch.randint(1, 90, (num_tokens,), generator=generator)
    largest.positions[:num_tokens] = torch.randint(1, 40, (num_tokens,), generator=generator)
    whole.seq_lens[:size] = torch.randint(1, 40, (size,), generator=generator).int()
    whole.seq_lens[num_rows:size] = 0
    for blocks in (whole, *whole.other_groups):
        blocks.block_table[:size] = torch.randint(1, 90, (size, MAX_BLOCKS), generator=generator).int()
        blocks.slot_mapping[:num_tokens] = torch.randint(1, 90, (num_tokens,), generator=generator)
    whole.query_start_loc[: size + 1] = torch.arange(size + 1) * query_len
    wanted = torch.randperm(num_rows, generator=generator)[:num_wanted].sort().values
    largest.logits_indices[: len(wanted)] = (wanted + 1) * query_len - 1
    largest.logits_indices[len(wanted) : size] = 0
    inputs = decode_inputs(largest, size)
    return replace(
        inputs,
        input_ids=largest.input_ids[:num_tokens],
        positions=largest.positions[:num_tokens],
        metadata=replace(
            whole.one_token_rows(size, num_tokens),
            max_query_len=query_len,
            num_one_token_reqs=size if query_len == 1 else 0,
        ),
        logits_indices=largest.logits_indices[: len(wanted)],
    )


def test_the_largest_is_recorded_first_and_all_share_one_pool(graphs, largest):
    StepGraphs(graphs.recordable(step), largest, [1, 2, 4], [], recorded_by)
    assert [num_rows for num_rows, _ in graphs.recorded] == [4, 2, 1]
    assert len({pool for _, pool in graphs.recorded}) == 1
    assert graphs.replayed == []


def test_graphs_of_all_sizes_keep_one_buffer_of_logits_and_the_memory_of_the_largest(monkeypatch):
    """The default sizes of 256 slots; separate logits would take 16.5 times the largest."""
    memory, vocab_size = FakeGpuMemory(), 1000
    for name, replacement in FakeGraphs(memory).patches().items():
        monkeypatch.setattr(torch.cuda, name, replacement)

    def step(inputs):
        hidden = inputs.input_ids[inputs.logits_indices][:, None].expand(-1, vocab_size).bfloat16()
        return inputs.logits.copy_(hidden)

    with memory:
        largest = make_step_buffers(256, 2048, MAX_BLOCKS, device="meta")
        logits = torch.empty(256, vocab_size, device="meta")
        buffers_bytes, before = memory.live_bytes, free_bytes(META)
        graphs = StepGraphs(step, replace(largest, logits=logits), decode_buckets(256), [], recorded_by)
        assert memory.live_bytes == buffers_bytes
        ids_bytes, bf16_bytes = 256 * 8, 256 * vocab_size * 2
        assert before - free_bytes(META) == ids_bytes + bf16_bytes
        del graphs
        assert free_bytes(META) == before


def test_a_step_that_returns_other_memory_than_the_buffer_is_an_error(graphs, largest):
    with pytest.raises(AssertionError, match="does not write its logits to the buffer"):
        StepGraphs(graphs.recordable(lambda inputs: step(replace(inputs, logits=None))), largest, [1], [], recorded_by)


def test_steps_of_recorded_sizes_replay_on_the_current_buffers(graphs, largest):
    replaying = StepGraphs(graphs.recordable(step), largest, [1, 2, 4, 8], [], recorded_by)
    sizes = (4, 1, 8, 2, 4, 4, 1)
    for seed, num_rows in enumerate(sizes):
        inputs = fill(largest, num_rows, seed)
        want = step(replace(inputs, logits=None))
        assert torch.equal(replaying(inputs), want)
    assert graphs.replayed == list(sizes)


def test_a_padded_step_yields_logits_of_the_wanted_rows_only(graphs, largest):
    replaying = StepGraphs(graphs.recordable(step), largest, [1, 2, 4, 8], [], recorded_by)
    for num_rows, num_padded, num_wanted in ((5, 3, 5), (3, 1, 2), (6, 2, 1), (7, 1, 0)):
        inputs = fill(largest, num_rows, num_rows, num_padded=num_padded, num_wanted=num_wanted)
        logits = replaying(inputs)
        assert logits.shape == (num_wanted, VOCAB)
        assert torch.equal(logits, step(replace(inputs, logits=None)))
    assert graphs.replayed == [8, 4, 8, 8]


def test_other_steps_run_eagerly(graphs, largest):
    """Steps with prompts, and decode steps of sizes that were not recorded."""
    replaying = StepGraphs(graphs.recordable(step), largest, [2, 4], [], recorded_by)
    for num_rows, query_len in ((4, 5), (2, 3), (3, 1), (8, 1), (1, 1)):
        inputs = fill(largest, num_rows, num_rows, query_len=query_len)
        assert torch.equal(replaying(inputs), step(replace(inputs, logits=None)))
    assert graphs.replayed == []


@pytest.mark.parametrize("failing", [(2,), (8, 1), (8, 4, 2, 1)])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory.\nAdvice"), RuntimeError("not permitted\nAdvice")]
)
def test_sizes_whose_capture_fails_run_eagerly_beside_graphs_of_the_others(graphs, largest, failing, error):
    graphs.failing = dict.fromkeys(failing, error)
    replaying = StepGraphs(graphs.recordable(step), largest, [1, 2, 4, 8], [], recorded_by)
    line = str(error).splitlines()[0]
    assert replaying.unrecorded == [(size, True, line) for size in failing]
    assert graphs.stream == "steps"
    free_bytes(META)  # empties the cache of the allocator
    for num_rows, num_padded in ((1, 0), (2, 0), (3, 1), (5, 3)):
        inputs = fill(largest, num_rows, num_rows, num_padded=num_padded)
        assert torch.equal(replaying(inputs), step(replace(inputs, logits=None)))
    assert graphs.replayed == [size for size in (1, 2, 4, 8) if size not in failing]


def test_a_step_that_fails_without_a_capture_is_an_error(graphs, largest):
    def fails(_inputs):
        raise RuntimeError("illegal memory access")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        StepGraphs(fails, largest, [1], [], recorded_by)


def test_a_device_that_fails_in_a_capture_is_an_error(graphs, largest, monkeypatch):
    num_waits = iter(range(9))

    def synchronize(device):
        graphs._synchronize(device)
        if next(num_waits):  # the first wait is before the capture
            raise RuntimeError("illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    graphs.failing = {1: RuntimeError("unspecified launch failure")}
    with pytest.raises(RuntimeError, match="illegal memory access"):
        StepGraphs(graphs.recordable(step), largest, [1], [], recorded_by)


def test_progress_is_shown_while_graphs_are_recorded(graphs, largest):
    shown = []

    def progress(iterable, /, *, desc, total):
        shown.append((desc, total))
        for form, is_decode in iterable:
            shown.append(form.size)
            yield form, is_decode
            assert graphs.recorded[-1][0] == form.size

    StepGraphs(graphs.recordable(step), largest, [1, 2, 4], [], recorded_by, progress)
    assert shown == [("recording CUDA graphs", 3), 4, 2, 1]


def test_steps_with_and_without_adapted_tokens_have_graphs_of_their_own(graphs, largest):
    """The one with adapters reads as many entries as it has tokens; the other does nothing for them."""
    seen = []

    def adapting_step(inputs):
        logits = step(inputs)
        seen.append(None if inputs.adapted is None else len(inputs.adapted.adapters))
        if inputs.adapted is not None:
            assert not inputs.adapted.derived, "a replay would not compute what was derived before the recording"
            inputs.adapted.derived["tiles"] = 1
            logits.add_(1e7 * (inputs.adapted.adapters + 1).sum())
        return logits

    adapted = AdaptedTokens(torch.zeros(MAX_TOKENS, dtype=torch.int64), torch.full((MAX_TOKENS,), -1))
    largest = replace(largest, adapted=adapted)
    compiled = StepGraphs(graphs.recordable(adapting_step), largest, [2, 4], [], recorded_by)
    assert seen == [size for size in (4, None, 2, None) for _ in range(2)]
    for num_rows, num_padded, query_len in ((3, 1, 1), (2, 0, 1), (3, 0, 3)):
        for num_adapted in (0, 2):
            inputs = fill(largest, num_rows, num_rows, num_padded=num_padded, query_len=query_len)
            adapted.adapters.fill_(-1)
            adapted.adapters[:num_adapted] = torch.arange(num_adapted)
            own = AdaptedTokens(adapted.indices[:num_adapted], adapted.adapters[:num_adapted])
            inputs = replace(inputs, adapted=own)
            before = len(seen)
            expected = step(replace(inputs, logits=None)) + 1e7 * (adapted.adapters + 1).sum()
            assert torch.equal(compiled(inputs), expected)
            assert (len(seen) > before) == (query_len == 3), "other sizes are replayed"
