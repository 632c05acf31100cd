"""Checkpoints of MLX give the values of their integers, or one line that names what is not supported."""

import json
import shutil

import pytest
import torch

from engine.core.request import SamplingParams
from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.int_weights import IntWeights
from engine.model.loader import cpu_checkpoint_dtype, load_model, weights_bytes
from engine.parallel.group import SingleRank
from kernels.families import cpu_ops, reference_ops
from tests.support.engine.mlx_checkpoints import quantise_as_mlx
from tests.support.engine.small_engine import answers_with_flags

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
ONE_FORM: dict[str, tuple[int, int]] = {}
PROMPTS = [[5, 9, 4, 7], [11] * 7, [3, 8, 6, 200, 17, 4, 90, 31, 12]]


@pytest.fixture
def make_twins(servable, tmp_path):
    """make_twins(architecture="qwen3", num_bits=4, **options) -> (checkpoint of MLX, the same values in fp32)."""

    def make(architecture="qwen3", num_bits=4, group_size=32, but=(), own=ONE_FORM, **overrides):
        original = servable(architecture, **{**SIZES, **overrides})
        folders = [shutil.copytree(original, tmp_path / name) for name in ("mlx", "twin")]
        quantise_as_mlx(original, *folders, num_bits=num_bits, group_size=group_size, but=but, own=own)
        return folders

    return make


def answers(path, *flags):
    params = SamplingParams(seed=0, max_tokens=6, temperature=0.0, ignore_end_token=True, top_logprobs=0)
    return answers_with_flags(path, PROMPTS, params, "--kv-cache-memory-bytes", "64M", "--kernel-check", "off", *flags)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "phi3"])
def test_answers_have_the_bits_of_the_values(make_twins, architecture, tied):
    """Gemma scales its embedding, Phi-3 has fused projections."""
    mlx, twin = make_twins(architecture, tie_word_embeddings=tied)
    assert answers(mlx) == answers(twin)


@pytest.mark.parametrize("architecture", ["qwen3", "phi3", "gemma3"])
def test_layers_may_have_bits_and_groups_of_their_own(make_twins, architecture):
    """As mlx-lm's recipe mixed_4_6 writes; `v_proj` and `q_proj` form one matrix, `embed_tokens` is the head too."""
    own = {"v_proj": (6, 64), "o_proj": (3, 32), "layers.1.mlp.down_proj": (8, 128), "embed_tokens": (5, 64)}
    mlx, twin = make_twins(architecture, num_bits=4, group_size=32, own=own)
    assert answers(mlx) == answers(twin)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_experts_and_what_chooses_them_have_the_bits_of_the_values(make_twins, architecture):
    """A tensor for each projection of all experts; the router has bits of its own, as mlx-lm writes it."""
    sizes = {} if architecture == "mixtral" else {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    own = {"mlp.gate": (8, 64), "moe.gate": (8, 64), "shared_expert_gate": (8, 32), "layers.0.mlp.experts": (6, 64)}
    mlx, twin = make_twins(architecture, own=own, **sizes)
    assert answers(mlx) == answers(twin)


def test_another_number_of_experts_is_refused(make_twins):
    mlx, _ = make_twins("mixtral")
    config = json.loads((mlx / "config.json").read_text())
    (mlx / "config.json").write_text(json.dumps(config | {"num_local_experts": 3}))
    with pytest.raises(CheckpointError, match=r"switch_mlp\.\w+\.\w+ has shape \[4, .*requires \[3, "):
        load_model(mlx, ModelConfig.from_dir(mlx), reference_ops())


@pytest.mark.parametrize("num_bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("make_ops", [reference_ops, cpu_ops])
def test_every_number_of_bits_gives_the_values(make_twins, num_bits, make_ops):
    mlx, twin = make_twins(num_bits=num_bits, group_size=64)
    ops, ids = make_ops(), torch.arange(40)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    results = []
    for path in (mlx, twin):
        model = load_model(path, ModelConfig.from_dir(path), ops)
        mlp = model.layers[-1].feed_forward
        results.append((model.vocabulary.embed(ids), model.vocabulary.logits(x), mlp.gate_up(ops, x)))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_ranks_get_their_rows_of_the_vocabulary(make_twins):
    for path, twin in [make_twins(tie_word_embeddings=False)]:
        shards = [load_model(p, ModelConfig.from_dir(p), reference_ops(), group=SingleRank(1, 2)) for p in (path, twin)]
        got, expected = (shard.vocabulary for shard in shards)
        assert torch.equal(got.table, expected.table)


def test_modules_that_are_not_quantised_stay_as_they_are(make_twins):
    mlx, twin = make_twins(tie_word_embeddings=False, but=("lm_head", "model.layers.0.mlp.down_proj"))
    assert answers(mlx) == answers(twin)


def test_memory_is_that_of_the_integers(make_twins):
    mlx, twin = make_twins(group_size=64)
    config = ModelConfig.from_dir(mlx)
    assert cpu_checkpoint_dtype(mlx, config) == "float32"  # of the norms
    num_bytes = weights_bytes(config, torch.float32, kept=(IntWeights,), is_compact=True)
    assert num_bytes < 0.2 * weights_bytes(ModelConfig.from_dir(twin), torch.float32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "mxfp4"}, "mode is 'mxfp4', supported of MLX is 'affine'"),
        ({"bits": 7}, "bits is 7, supported of MLX are 2, 3, 4, 5, 6, 8"),
        ({"group_size": 16}, "group_size is 16, supported of MLX are 32, 64, 128"),
        (
            {"model.layers.0.mlp.up_proj": {"group_size": 32, "bits": 7}},
            "model.layers.0.mlp.up_proj: bits is 7, supported of MLX are 2, 3, 4, 5, 6, 8",
        ),
        (
            {"model.layers.0.mlp.up_proj": {"mode": "nvfp4"}},
            "model.layers.0.mlp.up_proj: mode is 'nvfp4', supported of MLX is 'affine'",
        ),
        ({"bits": None}, "quantization_config: quant_method is 'absent', supported are"),
        ({"model.layers.0.mlp.up_proj": 3}, "model.layers.0.mlp.up_proj is 3, expected an object"),
    ],
)
def test_other_settings_are_refused(make_twins, settings, message):
    mlx, _ = make_twins()
    config = json.loads((mlx / "config.json").read_text())
    config["quantization"] |= settings
    (mlx / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dir(mlx)
    assert message in str(caught.value)


def test_settings_of_a_layer_that_are_those_of_all_change_nothing(make_twins):
    mlx, _ = make_twins()
    before = ModelConfig.from_dir(mlx)
    config = json.loads((mlx / "config.json").read_text())
    config["quantization"] |= {"model.layers.0.mlp.up_proj": {"group_size": 32, "bits": 4}, "lm_head": True}
    (mlx / "config.json").write_text(json.dumps(config))
    assert ModelConfig.from_dir(mlx) == before
