"""Tokens that only the device knows: kept by state row, found by reference, remembered for penalties."""

import numpy as np
import pytest
import torch

from engine.runner.device_tokens import DeviceTokens
from engine.runner.stream import InlineStream
from tests.support.engine.stream import LateStream


@pytest.fixture
def host_token_ids():
    return np.zeros((4, 6), dtype=np.int32)


@pytest.fixture(params=[InlineStream(), LateStream()], ids=["inline", "late"])
def tokens(request, host_token_ids):
    return DeviceTokens(host_token_ids, request.param, max_steps_in_flight=2)


def _append(tokens, rows, num_tokens, token_ids, with_history=True):
    tokens.append(
        torch.tensor(rows),
        torch.tensor(num_tokens, dtype=torch.int32),
        torch.tensor(token_ids),
        with_history=with_history,
    )


def test_references_become_the_tokens_sampled_last_for_their_rows(tokens):
    _append(tokens, [2, 0], [1, 1], [11, 22])
    _append(tokens, [3, 2], [1, 2], [33, 44])
    input_ids = torch.tensor([7, -1 - 2, 0, -1 - 0, -1 - 3])
    tokens.resolve(input_ids)
    assert input_ids.tolist() == [7, 44, 0, 22, 33]


def test_a_failed_row_goes_on_with_token_0(tokens):
    _append(tokens, [1, 2], [1, 1], [5, -1])
    input_ids = torch.tensor([-1 - 2, -1 - 1])
    tokens.resolve(input_ids)
    assert input_ids.tolist() == [0, 5]
    assert tokens.history[2].tolist() == [0] * 6


def test_a_history_is_what_was_uploaded_and_what_was_sampled_since(tokens):
    staged = tokens.stage(np.array([3, 4, 5], dtype=np.int32))
    tokens.upload(1, staged)
    _append(tokens, [0, 1], [1, 3], [8, 6])
    _append(tokens, [1], [4], [7])
    assert tokens.history[1, :5].tolist() == [3, 4, 5, 6, 7]
    assert tokens.history[0, 1] == 8


def test_histories_are_kept_only_if_a_row_needs_one(tokens):
    _append(tokens, [0], [1], [8], with_history=False)
    assert not tokens.history.any()


def test_one_step_at_a_time_on_the_host_needs_no_copy_of_what_the_host_knows(host_token_ids):
    tokens = DeviceTokens(host_token_ids, InlineStream(), max_steps_in_flight=1)
    host_token_ids[2, :3] = 1, 2, 3
    assert tokens.history[2, :3].tolist() == [1, 2, 3]
    assert tokens.is_host_record


def test_a_late_device_has_its_own_history_even_with_one_step_in_flight(host_token_ids):
    """It reads the host's memory whenever it likes, and the host writes there."""
    tokens = DeviceTokens(host_token_ids, LateStream(), max_steps_in_flight=1)
    assert not tokens.is_host_record
    host_token_ids[2, :3] = 1, 2, 3
    tokens.upload(2, tokens.stage(host_token_ids[2, :3]))
    _append(tokens, [2], [3], [4])
    assert tokens.history[2].tolist() == [1, 2, 3, 4, 0, 0]


def test_histories_of_all_lengths_are_staged_in_memory_that_was_allocated_before(monkeypatch):
    """As many buffers of one size as rows of 4,096 tokens need in all steps in flight."""
    stream, sizes = LateStream(), []
    allocate = stream.host_buffer
    monkeypatch.setattr(stream, "host_buffer", lambda num_bytes: sizes.append(num_bytes) or allocate(num_bytes))
    host_token_ids = np.arange(3 * 10_000, dtype=np.int32).reshape(3, 10_000)
    tokens = DeviceTokens(host_token_ids, stream, max_steps_in_flight=2)
    assert len(sizes) == 3 * 2
    pooled = set(sizes)
    assert len(pooled) == 1
    for row, (length, num_buffers) in enumerate([(1, 1), (4096, 1), (9000, 3)]):
        sizes.clear()
        tokens.upload(row, tokens.stage(host_token_ids[row, :length]))
        assert len(sizes) == num_buffers
        assert set(sizes) == pooled
        assert torch.equal(tokens.history[row, :length], torch.from_numpy(host_token_ids[row, :length]))
        assert not tokens.history[row, length:].any()
