"""Attention by other libraries instead of Triton kernels, over the same paged KV cache.

Each backend has the arguments of `KernelOps.paged_attention`. They wait for the device or choose their launches by
tensor values, so their steps cannot be recorded as CUDA graphs. None of the two libraries has run in this project yet:
only the conversion of arguments is tested.
"""

import importlib
from collections.abc import Callable, Collection
from typing import Any, Literal, Protocol

import torch

from kernels.dtypes import dtype_name
from kernels.gpu.targets import Target
from kernels.gpu.tiles import has_kernels
from kernels.kv_cache import PagedKVCache
from kernels.metadata import AttentionMetadata
from kernels.torch_attention import torch_attention

BackendName = Literal["flashinfer", "flash-attn", "torch"]

_WORKSPACE_BYTES = 128 * 2**20  # of partial results; the size that FlashInfer recommends
_DTYPES = (torch.float16, torch.bfloat16)


class UnsupportedBackendError(ValueError):
    """A backend that is not installed or does not support the model or the GPU; the message says what to do."""


_LayerForm = tuple[int | None, float | None, float, int, int, int]
"""What a plan of FlashInfer fixes: window, soft cap, scale, heads, KV heads, and the size of a head."""


class Attention(Protocol):
    """`KernelOps.paged_attention`."""

    def __call__(
        self,
        q: torch.Tensor,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `KernelOps`."""
        ...


def attention_backend(
    name: BackendName,
    *,
    device: torch.device,
    target: Target,
    head_dims: Collection[int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> Attention:
    """Returns the attention of a backend; imports its library.

    Args:
        name: name of the backend.
        device: device of the tensors.
        target: its architecture.
        head_dims: sizes of heads, of all layers.
        dtype, kv_dtype: dtypes of the queries and of the cache.
    Raises: UnsupportedBackendError: it is not installed, or does not support one of these.
    """
    if name == "torch":
        return torch_attention
    flag = f"--attention-backend {name}"
    if name == "flashinfer":
        has_target, supported = target.backend == "cuda", {64, 128, 256}
    else:
        has_target = target.name in ("sm_90", "sm_100")
        supported = {*range(8, 129, 8), 256} if target.name == "sm_100" else set(range(8, 257, 8))
    if not has_target:
        raise UnsupportedBackendError(f"{flag} does not support {target.name}: use triton")
    if dtype not in _DTYPES:
        raise UnsupportedBackendError(f"{flag} does not support {dtype_name(dtype)}: use --dtype bfloat16, or triton")
    if kv_dtype is not dtype:
        raise UnsupportedBackendError(
            f"{flag} does not support the scales per token and head of --kv-cache-dtype fp8: omit one of the two"
        )
    if others := sorted({*head_dims} - supported):
        instead = "triton" if all(map(has_kernels, head_dims)) else "torch"
        raise UnsupportedBackendError(f"{flag} does not support heads of {others[0]} on {target.name}: use {instead}")
    if name == "flashinfer":
        return FlashInferAttention(_imported("flashinfer", flag), device)
    return FlashAttention(_imported("flash_attn.cute", flag))


def _imported(module: str, flag: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = flag.split()[1]
        raise UnsupportedBackendError(f"{flag}: {error}; pip install 'chairlift[{extra}]', or use triton") from error


class FlashInferAttention:
    """FlashInfer's batch prefill over a paged cache (arXiv:2501.01005), which also serves one-token rows.

    FlashInfer plans on the host which program computes what: once per step and window, for all layers.
    """

    def __init__(self, flashinfer: Any, device: torch.device) -> None:
        """Allocates the workspace.

        Args:
            flashinfer: the library.
            device: device of the tensors.
        """
        self._make_wrapper: Callable[..., Any] = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[_LayerForm, Any] = {}
        self._planned: set[_LayerForm] = set()  # of this step
        self._metadata: AttentionMetadata | None = None
        self._pages: tuple[torch.Tensor, ...] = ()

    def __call__(
        self,
        q: torch.Tensor,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention by a plan per step and form of layer; with sinks by PyTorch, slowly."""
        if sinks is not None:
            return torch_attention(
                q, kv_cache, metadata, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks
            )
        if metadata is not self._metadata:
            self._metadata, self._pages = metadata, _pages(metadata)
            self._planned.clear()
        key = (sliding_window, soft_cap, scale, q.shape[1], kv_cache.num_kv_heads, q.shape[2])
        if key not in self._wrappers:
            self._wrappers[key] = self._make_wrapper(self._workspace, "HND")
        wrapper = self._wrappers[key]
        if key not in self._planned:
            wrapper.plan(
                *self._pages,
                q.shape[1],
                kv_cache.num_kv_heads,
                q.shape[2],
                metadata.block_size,
                causal=True,
                sm_scale=scale,
                window_left=-1 if sliding_window is None else sliding_window - 1,
                logits_soft_cap=soft_cap,
                q_data_type=q.dtype,
                kv_data_type=kv_cache.k.dtype,
            )
            self._planned.add(key)
        out: torch.Tensor = wrapper.run(q.contiguous(), (kv_cache.k, kv_cache.v))
        return out.flatten(1)


def _pages(metadata: AttentionMetadata) -> tuple[torch.Tensor, ...]:
    """Returns FlashInfer's description of a batch, int32: waits for the device.

    Returns: prefix sums of query lengths and of numbers of blocks, on the host; the blocks of all rows, on the device;
        and the tokens in the last block of each row, on the host.
    """
    seq_lens = metadata.seq_lens.cpu()
    num_blocks = (seq_lens + metadata.block_size - 1) // metadata.block_size
    block_start_loc = torch.zeros(len(seq_lens) + 1, dtype=torch.int32)
    block_start_loc[1:] = num_blocks.cumsum(0)
    is_used = torch.arange(metadata.block_table.shape[1]) < num_blocks[:, None]
    block_ids = metadata.block_table[is_used.to(metadata.block_table.device)]
    last_block_lens = (seq_lens - 1) % metadata.block_size + 1
    return metadata.query_start_loc.cpu(), block_start_loc, block_ids, last_block_lens


class FlashAttention:
    """FlashAttention 4's attention of a ragged batch over a paged cache, of the package flash-attn-4.

    flash-attn 2 cannot be used: its blocks have a multiple of 256 tokens.
    """

    def __init__(self, library: Any) -> None:
        """Uses the library's `flash_attn_varlen_func`."""
        self._attention: Callable[..., Any] = library.flash_attn_varlen_func

    def __call__(
        self,
        q: torch.Tensor,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the attention of a layer; with sinks by PyTorch, slowly.

        The library gets views of the cache, [blocks, tokens, heads, head_dim].
        """
        if sinks is not None:
            return torch_attention(
                q, kv_cache, metadata, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks
            )
        out, _ = self._attention(
            q.contiguous(),
            kv_cache.k.transpose(1, 2),
            kv_cache.v.transpose(1, 2),
            cu_seqlens_q=metadata.query_start_loc,
            seqused_k=metadata.seq_lens,
            max_seqlen_q=metadata.max_query_len,
            page_table=metadata.block_table,
            softmax_scale=scale,
            causal=True,
            window_size=(None, None) if sliding_window is None else (sliding_window - 1, 0),
            softcap=soft_cap or 0.0,
        )
        return torch.flatten(out, 1)
