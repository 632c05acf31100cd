"""Attention backends: what their libraries are given, by fake libraries that compute with the reference.

The fakes accept what flashinfer-python 0.6 to 0.7 and flash-attn-4 4.0.0b30 to b36 accept, with their meaning.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kernels.families import reference_ops
from kernels.gpu.attention_backends import (
    FlashAttention,
    FlashInferAttention,
    UnsupportedBackendError,
    attention_backend,
)
from kernels.gpu.kv_cache import make_kv_cache
from kernels.gpu.launch import compile_only
from kernels.gpu.ops import GpuOps
from kernels.gpu.targets import TARGETS
from kernels.metadata import AttentionMetadata
from kernels.reference.paged_attention import paged_attention
from tests.support.kernels.batches import assert_close, fill_cache, make_ragged_batch

CPU = torch.device("cpu")
QUERY_LENS, SEQ_LENS = (1, 1, 17, 5), (1, 33, 40, 5)
SUPPORTED = {"target": TARGETS["sm_90"], "head_dims": [128, 64], "dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
FEATURES = [{}, {"sliding_window": 7}, {"soft_cap": 5.0}]


class FakeFlashInfer:
    """The part of FlashInfer's API that is used."""

    def __init__(self):
        self.plans = []
        fake = self

        class BatchPrefillWithPagedKVCacheWrapper:
            def __init__(self, float_workspace_buffer, kv_layout="NHD"):
                assert float_workspace_buffer.dtype is torch.uint8
                assert float_workspace_buffer.numel() == 128 * 2**20
                assert kv_layout == "HND"

            def plan(
                self,
                qo_indptr,
                paged_kv_indptr,
                paged_kv_indices,
                paged_kv_last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim_qk,
                page_size,
                *,
                causal=False,
                sm_scale=None,
                window_left=-1,
                logits_soft_cap=None,
                q_data_type="float16",
                kv_data_type=None,
            ):
                tensors = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
                assert all(tensor.dtype is torch.int32 and tensor.dim() == 1 for tensor in tensors)
                assert all(tensor.is_contiguous() for tensor in tensors)
                assert causal
                num_rows = len(paged_kv_last_page_len)
                assert len(qo_indptr) == len(paged_kv_indptr) == num_rows + 1
                assert paged_kv_indptr[-1] == len(paged_kv_indices)
                num_pages = paged_kv_indptr.diff()
                assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
                table = torch.full((num_rows, int(num_pages.max())), 1 << 30, dtype=torch.int32)
                for row in range(num_rows):
                    pages = paged_kv_indices[paged_kv_indptr[row] : paged_kv_indptr[row + 1]]
                    table[row, : len(pages)] = pages
                self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
                self.dtypes = (q_data_type, kv_data_type)
                self.metadata = metadata_of(
                    qo_indptr, (num_pages - 1) * page_size + paged_kv_last_page_len, table, page_size
                )
                self.options = {
                    "scale": sm_scale,
                    "sliding_window": None if window_left < 0 else window_left + 1,
                    "soft_cap": logits_soft_cap or None,
                }
                fake.plans.append(self.options)

            def run(self, q, paged_kv_cache):
                k, v = paged_kv_cache
                _, num_kv_heads, page_size, head_dim = k.shape
                assert k.shape == v.shape
                assert q.is_contiguous()
                assert self.shape == (q.shape[1], num_kv_heads, head_dim, page_size)
                assert self.dtypes == (q.dtype, k.dtype)
                cache = (k.transpose(1, 2), v.transpose(1, 2))
                return paged_attention(q, cache, self.metadata, **self.options).view(q.shape)

        self.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper


def flash_attn_varlen_func(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    seqused_k,
    max_seqlen_q,
    page_table,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    softcap=0.0,
):
    num_rows, head_dim = len(seqused_k), q.shape[2]
    for tensor in (cu_seqlens_q, seqused_k, page_table):
        assert tensor.dtype is torch.int32
        assert tensor.stride(-1) == 1
    assert cu_seqlens_q.shape == (num_rows + 1,)
    assert page_table.shape[0] == num_rows
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert k.shape == v.shape
    assert k.shape[3] == head_dim
    for tensor in (q, k, v):  # otherwise the library would copy the whole cache
        assert tensor.dtype is q.dtype
        assert tensor.stride(-1) == 1
        assert all(stride * tensor.itemsize % 16 == 0 for stride in tensor.stride()[:-1])
        assert tensor.data_ptr() % 16 == 0
    assert causal
    left, right = window_size
    assert right in (None, 0)
    metadata = metadata_of(cu_seqlens_q, seqused_k, page_table, k.shape[1])
    window = None if left is None else left + 1
    out = paged_attention(q, (k, v), metadata, scale=softmax_scale, sliding_window=window, soft_cap=softcap or None)
    return out.view(q.shape), torch.zeros(q.shape[1], q.shape[0])


def metadata_of(query_start_loc, seq_lens, block_table, block_size):
    return AttentionMetadata(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=block_table,
        slot_mapping=torch.zeros(int(query_start_loc[-1]), dtype=torch.int64),
        block_size=block_size,
        max_query_len=int(query_start_loc.diff().max()),
        max_seq_len=int(seq_lens.max()),
    )


@pytest.fixture
def libraries(monkeypatch):
    fakes = {
        "flashinfer": FakeFlashInfer(),
        "flash_attn.cute": SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func),
    }
    monkeypatch.setattr("kernels.gpu.attention_backends.importlib.import_module", fakes.__getitem__)
    return fakes


def gpu_cache(batch, dtype):
    """A cache in the layout of the GPU operations; unused slots are NaN."""
    block_size, (num_kv_heads, head_dim) = batch.metadata.block_size, batch.k[0].shape[1:]
    shape = (batch.num_blocks, block_size, num_kv_heads, head_dim)
    cache = make_kv_cache(*shape, dtype, device=CPU, target=TARGETS["sm_90"])
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    for row in range(len(batch.k)):
        slots = batch.slots(row)
        cache.k[slots // block_size, :, slots % block_size] = batch.k[row].to(dtype)
        cache.v[slots // block_size, :, slots % block_size] = batch.v[row].to(dtype)
    return cache


def backend(name):
    return attention_backend(name, device=CPU, **SUPPORTED)


@pytest.mark.parametrize("name", ["flashinfer", "flash-attn", "torch"])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("features", FEATURES)
def test_backends_get_what_the_reference_gets(libraries, name, block_size, features):
    batch = make_ragged_batch(QUERY_LENS, SEQ_LENS, block_size=block_size)
    q = batch.q.bfloat16()
    expected = paged_attention(
        q, fill_cache(reference_ops(), batch, torch.bfloat16), batch.metadata, scale=0.25, **features
    )
    wide = torch.cat((q, q), dim=1)[:, : q.shape[1]]  # a view, like the queries in the product of a layer
    actual = backend(name)(wide, gpu_cache(batch, torch.bfloat16), batch.metadata, scale=0.25, **features)
    assert actual.dtype is torch.bfloat16
    assert_close(actual, expected)


def test_torch_attention_reads_8_bit_caches():
    batch = make_ragged_batch(QUERY_LENS, SEQ_LENS)
    cache = make_kv_cache(batch.num_blocks, 16, 2, 64, torch.float8_e4m3fn, device=CPU, target=TARGETS["sm_90"])
    for row in range(len(batch.k)):
        slots = batch.slots(row)
        blocks, offsets = slots // 16, slots % 16
        for part, scales, values in ((cache.k, cache.k_scales, batch.k[row]), (cache.v, cache.v_scales, batch.v[row])):
            scale = values.abs().amax(dim=-1) / 448
            scales[blocks, :, offsets] = scale
            part[blocks, :, offsets] = (values / scale[..., None]).to(part.dtype)
    expected = paged_attention(batch.q, fill_cache(reference_ops(), batch), batch.metadata, scale=batch.scale)
    actual = backend("torch")(batch.q, cache, batch.metadata, scale=batch.scale)
    assert (actual - expected).abs().max() < 0.2 < expected.abs().max()


def test_flashinfer_plans_once_per_step_and_window(libraries):
    attend = backend("flashinfer")
    plans = libraries["flashinfer"].plans
    batch = make_ragged_batch(QUERY_LENS, SEQ_LENS)
    q, cache = batch.q.bfloat16(), gpu_cache(batch, torch.bfloat16)
    for _layer in range(2):
        for window in (None, 7):
            attend(q, cache, batch.metadata, scale=0.25, sliding_window=window)
    assert [plan["sliding_window"] for plan in plans] == [None, 7]
    attend(q, cache, replace(batch.metadata), scale=0.25)  # the next step, of the same sizes
    assert [plan["sliding_window"] for plan in plans] == [None, 7, None]


def test_flashinfer_plans_layers_of_another_scale_or_other_heads_apart(libraries):
    """A plan fixes both: models of transformers may have layers that differ in them."""
    attend, batches = (
        backend("flashinfer"),
        [make_ragged_batch(QUERY_LENS, SEQ_LENS, head_dim=dim) for dim in (64, 128)],
    )
    for scale, batch in ((0.25, batches[0]), (0.125, batches[0]), (0.25, batches[1])):
        metadata, q = batches[0].metadata, batch.q.bfloat16()
        expected = paged_attention(q, fill_cache(reference_ops(), batch, torch.bfloat16), metadata, scale=scale)
        assert_close(attend(q, gpu_cache(batch, torch.bfloat16), metadata, scale=scale), expected)
    assert len(libraries["flashinfer"].plans) == 3


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        (
            "flashinfer",
            {"target": TARGETS["gfx942"]},
            "--attention-backend flashinfer does not support gfx942: use triton",
        ),
        (
            "flash-attn",
            {"target": TARGETS["sm_80"]},
            "--attention-backend flash-attn does not support sm_80: use triton",
        ),
        ("flashinfer", {"dtype": torch.float32}, "does not support float32: use --dtype bfloat16"),
        ("flash-attn", {"kv_dtype": torch.float8_e4m3fn}, "does not .* --kv-cache-dtype fp8: omit one of the two"),
        ("flashinfer", {"head_dims": [64, 96]}, "does not support heads of 96 on sm_90: use triton"),
        ("flashinfer", {"head_dims": [256, 512]}, "does not support heads of 512 on sm_90: use triton"),
        ("flashinfer", {"head_dims": [256, 576]}, "does not support heads of 576 on sm_90: use torch"),
        ("flash-attn", {"head_dims": [192], "target": TARGETS["sm_100"]}, "does not support heads of 192 on sm_100"),
    ],
)
def test_what_a_backend_does_not_support_is_refused_by_name(libraries, name, fields, words):
    with pytest.raises(UnsupportedBackendError, match=words):
        attention_backend(name, device=CPU, **SUPPORTED | fields)


@pytest.mark.parametrize("name", ["flashinfer", "flash-attn"])
def test_a_missing_library_is_named_with_its_extra(monkeypatch, name):
    def fail(module):
        raise ModuleNotFoundError(f"No module named {module!r}")

    monkeypatch.setattr("kernels.gpu.attention_backends.importlib.import_module", fail)
    with pytest.raises(UnsupportedBackendError, match=rf"No module named .*; pip install 'chairlift\[{name}\]'"):
        backend(name)


def test_a_backend_replaces_attention_and_is_not_called_while_kernels_are_compiled(device, target):
    calls = []

    def attend(q, kv_cache, metadata, **options):
        calls.append(options)
        return q.flatten(1)

    ops = GpuOps(device, target, num_processors=132, attention=attend)
    q, cache = torch.ones(3, 4, 64), ops.make_kv_cache(1, 16, 4, 64, torch.float32)
    with compile_only():
        assert ops.paged_attention(q, cache, None, scale=0.5).shape == (3, 256)
    assert not calls
    assert ops.paged_attention(q, cache, None, scale=0.5, sliding_window=3).shape == (3, 256)
    assert calls == [{"scale": 0.5, "sliding_window": 3, "soft_cap": None, "sinks": None}]


@pytest.mark.parametrize(
    "library",
    [FlashInferAttention(FakeFlashInfer(), CPU), FlashAttention(SimpleNamespace(flash_attn_varlen_func=None))],
    ids=["flashinfer", "flash-attn"],
)
def test_sinks_are_computed_by_torch_where_a_library_has_none(library):
    batch = make_ragged_batch(QUERY_LENS, SEQ_LENS)
    options = {"scale": batch.scale, "sliding_window": 7, "sinks": torch.linspace(-1.0, 3.0, batch.q.shape[1])}
    expected = paged_attention(batch.q, fill_cache(reference_ops(), batch), batch.metadata, **options)
    assert_close(library(batch.q, gpu_cache(batch, torch.float32), batch.metadata, **options), expected)
