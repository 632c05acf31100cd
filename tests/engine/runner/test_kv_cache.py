"""Size of the cache, and errors if it cannot hold one request."""

import re
from dataclasses import replace

import pytest
import torch

from engine.core.cache_groups import CacheGroups
from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.model_shape import LayerShape
from engine.runner.kv_cache import allocate_kv_caches, plan_kv_cache
from kernels.families import cpu_ops
from kernels.gpu.ops import GpuOps
from kernels.gpu.targets import TARGETS
from tests.support.kernels.batches import cache_tensors

BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head size, fp32


@pytest.fixture
def shape(make_checkpoint):
    return ModelConfig.from_dir(make_checkpoint("llama")).shape  # 512 positions


def test_llama_2_7b_in_fp16_takes_512_kib_per_token(shape):
    llama_2_7b = replace(shape, layers=(LayerShape(32, 32, 128),) * 32, max_position_embeddings=4096)
    plan = plan_kv_cache(llama_2_7b, torch.float16, 16, 8 * 2**30, 4096)
    assert plan.bytes_per_token == 512 * 1024
    assert plan.num_tokens == 16384


@pytest.mark.parametrize(("dtype", "num_bytes"), [(torch.bfloat16, 1152), (torch.float8_e4m3fn, 580)])
def test_latents_of_deepseek_v3_are_stored_once(shape, dtype, num_bytes):
    deepseek_v3 = replace(shape, layers=(LayerShape(128, 1, 576, value_dim=512),) * 2)
    plan = plan_kv_cache(deepseek_v3, dtype, 16, 2**20, 256)
    assert plan.bytes_per_token == 2 * num_bytes
    ops = GpuOps(torch.device("cpu"), TARGETS["sm_90"], num_processors=4)
    caches = allocate_kv_caches(plan, deepseek_v3, dtype, ops)
    assert sum(cache.k.nbytes + cache.k_scales.nbytes for cache in caches) == plan.num_bytes
    assert all(cache.v.untyped_storage().data_ptr() == cache.k.data_ptr() for cache in caches)


def test_plan_takes_the_whole_blocks_that_fit(shape):
    plan = plan_kv_cache(shape, torch.float32, 16, 100 * 16 * BYTES_PER_TOKEN + 16 * BYTES_PER_TOKEN - 1, 300)
    assert (plan.num_blocks, plan.num_tokens, plan.max_model_len) == (100, 1600, 300)
    assert plan.bytes_per_token == BYTES_PER_TOKEN
    assert plan.num_bytes == 100 * 16 * BYTES_PER_TOKEN


def test_the_default_length_is_reduced_to_what_fits(shape):
    assert plan_kv_cache(shape, torch.float32, 16, 20 * 16 * BYTES_PER_TOKEN, None).max_model_len == 320
    assert plan_kv_cache(shape, torch.float32, 16, 2**30, None).max_model_len == 512


def test_a_requested_length_is_kept_or_rejected(shape):
    budget = 20 * 16 * BYTES_PER_TOKEN
    assert plan_kv_cache(shape, torch.float32, 16, budget, 320).max_model_len == 320
    with pytest.raises(ConfigError) as error:
        plan_kv_cache(shape, torch.float32, 16, budget, 321)
    numbers = re.findall(r"[\d.]+", str(error.value))
    assert numbers[0] == "321"
    assert str(BYTES_PER_TOKEN) in numbers
    assert "320" in str(error.value)
    assert "--max-model-len" in str(error.value)


@pytest.mark.parametrize("available_bytes", [-5, 0, 16 * BYTES_PER_TOKEN - 1])
def test_a_budget_below_one_block_is_rejected(shape, available_bytes):
    with pytest.raises(ConfigError, match="enough for a max_model_len of 0"):
        plan_kv_cache(shape, torch.float32, 16, available_bytes, None)


def test_a_length_above_the_positions_of_the_model_is_rejected(shape):
    with pytest.raises(ConfigError, match="--max-model-len is 513, the model has 512"):
        plan_kv_cache(shape, torch.float32, 16, 2**30, 513)


@pytest.mark.parametrize(("available_bytes", "says"), [(1000, "1000 bytes"), (1536, "1.5 KiB"), (2**16, "64 KiB")])
def test_sizes_of_small_caches_have_readable_units(shape, available_bytes, says):
    with pytest.raises(ConfigError, match=f" {says} is available"):
        plan_kv_cache(shape, torch.float32, 16, available_bytes, 512)


def test_override_ignores_the_budget(shape):
    plan = plan_kv_cache(shape, torch.float32, 16, 0, None, num_blocks_override=7)
    assert (plan.num_blocks, plan.max_model_len) == (7, 112)


def test_caches_are_as_planned_and_free_of_nan(shape, ops):
    plan = plan_kv_cache(shape, torch.float32, 16, 0, None, num_blocks_override=7)
    caches = allocate_kv_caches(plan, shape, torch.float32, ops)
    tensors = [tensor for cache in caches for tensor in cache_tensors(cache)]
    assert len(caches) == 2
    assert sum(tensor.nbytes for tensor in tensors) == plan.num_bytes
    assert not any(tensor.any() for tensor in tensors)


def test_int8_takes_a_byte_per_element_and_a_scale_per_vector(shape):
    plan = plan_kv_cache(shape, torch.int8, 16, 0, None, num_blocks_override=7)
    caches = allocate_kv_caches(plan, shape, torch.int8, cpu_ops())
    assert plan.bytes_per_token == 2 * 2 * 2 * (16 + 4)
    assert sum(tensor.nbytes for cache in caches for tensor in cache_tensors(cache)) == plan.num_bytes


def test_memory_that_cannot_be_had_is_a_config_error(shape, ops):
    plan = plan_kv_cache(shape, torch.float32, 16, 0, None, num_blocks_override=2**50)
    with pytest.raises(ConfigError, match="cannot be allocated"):
        allocate_kv_caches(plan, shape, torch.float32, ops)


def test_groups_share_memory_and_a_long_request_takes_the_full_layers_and_a_window(shape):
    heads = LayerShape(2, 2, 16)
    groups = CacheGroups(num_full=1, num_windowed=3, window=64)
    layers = tuple(heads._replace(group=group) for group in (1, 2, 3, 0, 1, 2, 3, 0))
    windowed = replace(shape, layers=layers, cache_groups=groups, max_position_embeddings=8192)
    layer_bytes = 2 * 2 * 16 * 4  # K and V, KV heads, head size, fp32
    plan = plan_kv_cache(windowed, torch.float32, 16, 300 * 16 * 2 * layer_bytes, None, step_tokens=32)
    assert plan.bytes_per_token == 2 * layer_bytes  # of two layers
    assert (plan.num_blocks, plan.num_bytes) == (300, 300 * 16 * 2 * layer_bytes)
    assert plan.num_tokens == 300 // 4 * 16
    num_in_window = (64 + 32) // 16 + 2
    assert plan.max_model_len == (300 - 3 * num_in_window) * 16  # 2.4 times what all layers would hold
    assert plan.num_longest_requests == 1.0
    caches = allocate_kv_caches(plan, windowed, torch.float32, cpu_ops())
    places = {id(cache) for cache in caches}
    assert len(caches) == 8
    assert len(places) == 2
    assert all(caches[index] is caches[index - index % 4] for index in range(8))


def test_the_error_of_a_cache_with_windows_has_its_numbers(shape):
    layers = tuple(LayerShape(2, 2, 16, group) for group in (0, 1))
    windowed = replace(shape, layers=layers, cache_groups=CacheGroups(1, 1, 16), max_position_embeddings=4096)
    with pytest.raises(ConfigError, match=r"needs 144 KiB \(512 bytes per token\), 25 KiB is available, enough for a"):
        plan_kv_cache(windowed, torch.float32, 16, 25 * 2**10, 512, step_tokens=16)


def test_copies_of_states_take_a_quarter_of_the_cache_at_most(shape):
    with_state = replace(shape, state_bytes=1000)
    plan = plan_kv_cache(with_state, torch.float32, 16, 2**20, 128, max_snapshots=1000)
    assert plan.num_snapshots == 2**18 // 1000
    assert plan.num_blocks == (2**20 - plan.num_snapshots * 1000) // (16 * BYTES_PER_TOKEN)
    assert plan.num_bytes <= 2**20 < plan.num_bytes + 16 * BYTES_PER_TOKEN
    few = plan_kv_cache(with_state, torch.float32, 16, 2**20, 128, max_snapshots=7)
    assert (few.num_snapshots, few.num_bytes) == (7, few.num_blocks * 16 * BYTES_PER_TOKEN + 7000)


def test_a_number_of_blocks_leaves_as_much_for_copies_of_states(shape):
    with_state = replace(shape, state_bytes=1000)
    plan = plan_kv_cache(with_state, torch.float32, 16, 0, 112, 7, max_snapshots=1000)
    assert (plan.num_blocks, plan.num_snapshots) == (7, 7 * 16 * BYTES_PER_TOKEN // 3000)


def test_models_without_state_or_with_windows_have_no_copies(shape):
    layers = tuple(LayerShape(2, 2, 16, group) for group in (0, 1))
    windowed = replace(shape, layers=layers, cache_groups=CacheGroups(1, 1, 16), state_bytes=1000)
    for model in (shape, windowed):
        assert plan_kv_cache(model, torch.float32, 16, 2**20, 128, step_tokens=16, max_snapshots=9).num_snapshots == 0
