"""Decode attention alone is correct and counts its bytes."""

import pytest
import torch

from chairlift.bench.shapes import SHAPES
from engine.bench.attention_call import make_attention_call

SEQ_LENS = (1, 16, 17, 50)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.int8, 2e-2)])
def test_rows_are_attention_over_their_own_keys(dtype: torch.dtype, tolerance: float) -> None:
    call = make_attention_call(SHAPES["tiny"], SEQ_LENS, dtype, num_layers=2, num_threads=1)
    rows = call.run()
    for index in range(len(SEQ_LENS)):
        torch.testing.assert_close(rows[index], call.expected(index), atol=tolerance, rtol=0)
    assert call.kv_bytes == 2 * 2 * sum(SEQ_LENS) * 2 * 16 * dtype.itemsize


def test_cache_is_filled_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.bench.attention_call._FILL_TOKENS", 7)
    call = make_attention_call(SHAPES["tiny"], SEQ_LENS, torch.float32, num_layers=1, num_threads=1)
    torch.testing.assert_close(call.run()[3], call.expected(3), atol=1e-5, rtol=0)
