"""Applies token masks to logits: a mask has one bit for each token that a row may draw."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import launch
from kernels.gpu.sampling_tiles import SamplingTile
from kernels.gpu.token_order import INF
from kernels.sampling import TokenMasks


def mask_rows(logits: torch.Tensor, masks: TokenMasks, *, tile: SamplingTile) -> None:
    """Sets forbidden logits to -inf; invalid ones stay, so that the row is still reported as failed.

    Args:
        logits: [S, vocab_size] float32; rows with a mask are changed.
        masks: of these rows.
        tile: sizes.
    """
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, tile.chunk)
    launch(
        _mask_rows_kernel,
        tile.shared_rows(num_rows, num_chunks),
        logits,
        masks.rows,
        masks.words,
        vocab_size,
        masks.words.stride(0),
        num_chunks,
        CHUNK=tile.chunk,
        num_warps=tile.scan_warps,
    )


@triton.jit(
    do_not_specialize=["mask_rows_ptr", "words_ptr", "mask_stride", "num_chunks"]
)  # fmt: skip
def _mask_rows_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, mask_rows_ptr, words_ptr, vocab_size, mask_stride, num_chunks, CHUNK: tl.constexpr
):
    row = tl.program_id(0)
    mask_row = tl.load(mask_rows_ptr + row)
    if mask_row >= 0:
        logits_ptr += row.to(tl.int64) * vocab_size
        words_ptr += mask_row.to(tl.int64) * mask_stride
        for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
            words = chunk * (CHUNK // 32) + tl.arange(0, CHUNK // 32)
            bits = tl.arange(0, 32)[None, :]
            ids = words[:, None] * 32 + bits
            word = tl.load(words_ptr + words, mask=words * 32 < vocab_size, other=0)
            is_forbidden = (ids < vocab_size) & (((word[:, None] >> bits) & 1) == 0)
            logits = tl.load(logits_ptr + ids, mask=is_forbidden, other=0.0)
            tl.store(logits_ptr + ids, -INF, mask=is_forbidden & (logits < INF))
