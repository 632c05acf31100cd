"""The row of each token of a batch, for kernels whose programs take tokens of several rows."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import launch
from kernels.metadata import AttentionMetadata

_ROWS_AT_ONCE = 128
_BLOCK = 64


def token_rows(metadata: AttentionMetadata, num_tokens: int) -> torch.Tensor:
    """Returns [num_tokens] int32, the row of each token, or -1 for padding; launches its kernel once per step.

    Args:
        metadata: the batch; keeps the result for the other layers of the step.
        num_tokens: tokens of the batch with those behind the last row, which are padding.
    """
    key = (token_rows, num_tokens)
    rows: torch.Tensor | None = metadata.derived.get(key)
    if rows is None:
        rows = metadata.derived[key] = torch.empty(num_tokens, dtype=torch.int32, device=metadata.seq_lens.device)
        launch(
            _token_rows_kernel,
            (triton.cdiv(num_tokens, _BLOCK),),
            metadata.query_start_loc,
            metadata.seq_lens,
            rows,
            metadata.num_reqs,
            num_tokens,
            ROWS_AT_ONCE=_ROWS_AT_ONCE,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return rows


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr"],
)
def _token_rows_kernel(  # type: ignore[no-untyped-def]
    query_start_loc_ptr,
    seq_lens_ptr,
    rows_ptr,
    num_rows,
    num_tokens,
    ROWS_AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts the rows that end before each of BLOCK tokens."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_rows, ROWS_AT_ONCE):
        rows = start + tl.arange(0, ROWS_AT_ONCE)
        ends = tl.load(query_start_loc_ptr + 1 + rows, mask=rows < num_rows, other=2**31 - 1)
        found += tl.sum((ends[None, :] <= tokens[:, None]).to(tl.int32), axis=1)
    seq_lens = tl.load(seq_lens_ptr + found, mask=found < num_rows, other=0)
    tl.store(rows_ptr + tokens, tl.where(seq_lens > 0, found, -1), mask=tokens < num_tokens)
