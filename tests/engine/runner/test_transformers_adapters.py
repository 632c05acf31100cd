"""LoRA adapters of models that transformers computes: tokens are those of transformers with the adapter merged."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.request import Adapter, SamplingParams
from engine.errors import CheckpointError
from engine.model.lora import LoraAdapter
from engine.model.transformers_probe import TransformersConfig
from kernels.families import cpu_ops, reference_ops
from tests.support.engine.adapters import merged_changes, save_adapter
from tests.support.engine.families import FAMILIES
from tests.support.engine.int_checkpoints import Scheme, quantise_checkpoint

NUM_TOKENS = 8
GREEDY = SamplingParams(seed=0, max_tokens=NUM_TOKENS, temperature=0.0, ignore_end_token=True, top_logprobs=1)
WITHOUT = {"GPT-2"}
"""Families without linear layers of torch."""
# Layers in all places; experts; shared experts of flattened tokens; keys and values from a latent vector, which come
# with a dimension more; feed-forward networks of flattened tokens; layers with state, of Jamba token by token.
IN_EVERY_RUN = ("Command R", "Gemma 4", "OLMoE", "Qwen2-MoE", "DeepSeek-V2", "OPT", "Qwen3.5", "Jamba")


@pytest.fixture
def mixed(prompt):
    """mixed(digests) -> prompts, each three times: for the model and for two adapters."""

    def make(digests: Sequence[bytes]):
        rng = random.Random(3)
        shared = [rng.randrange(3, 300) for _ in range(40)]
        lengths = (0, 1), (40, 5), (33, 9)
        all_ids = [shared[:begin] + [rng.randrange(3, 300) for _ in range(others)] for begin, others in lengths]
        chosen = [None, *(Adapter(index, digest) for index, digest in enumerate(digests))]
        return [prompt(ids, GREEDY, adapter=adapter) for ids in all_ids for adapter in chosen]

    return make


@torch.inference_mode()
def check(reference_of, folder: Path, adapters: Sequence[Path], prompts, run) -> None:
    """Each token is transformers' own choice after the same tokens, with its logprob; adapters change all of them."""
    base = reference_of(folder).model
    for index, change in enumerate([{}, *map(merged_changes, adapters)], start=-1):
        merged = reference_of(folder).model
        for name, matrix in change.items():
            merged.get_submodule(name).weight += matrix
        for prompt, answer in zip(prompts, run.answers, strict=True):
            if index != (-1 if prompt.adapter is None else prompt.adapter.index):
                continue
            assert len(answer.token_ids) == NUM_TOKENS
            ids, first = torch.tensor([[*prompt.prompt_ids, *answer.token_ids]]), len(prompt.prompt_ids) - 1
            logits = merged(ids, use_cache=False).logits[0, first:-1].float()
            assert logits.argmax(dim=-1).tolist() == answer.token_ids
            wanted = logits.log_softmax(dim=-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
            found = torch.tensor([row.chosen for row in answer.logprobs], dtype=torch.float32)
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)
            if change:
                unchanged = base(ids, use_cache=False).logits[0, first:-1].float()
                assert (logits - unchanged).abs().amax(dim=-1).min() > 0.05


def save_two(engine, tmp_path: Path, base: Path) -> list[LoraAdapter]:
    """Returns an adapter of all layers that can have one, and one of every third."""
    shapes = engine.config.projection_shapes()
    assert shapes
    third = dict(list(shapes.items())[::3])
    folders = [
        save_adapter(tmp_path / "all", base, rank=3, layers=shapes),
        save_adapter(tmp_path / "third", base, rank=8, seed=2, layers=third, use_rslora=True),
    ]
    return [LoraAdapter.open(folder.name, folder, shapes) for folder in folders]


def serve(engine, prompts):
    """In chunks and with reused prefixes, which are of the same adapter."""
    return engine.serve(
        prompts,
        num_blocks=12,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        num_snapshots=10 if engine.config.shape.state_bytes else 0,
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow)
        for name in FAMILIES
        if name not in WITHOUT
    ],
)
def test_tokens_are_those_of_the_merged_weights(name, make_family, transformers_on, reference_of, mixed, tmp_path):
    base = make_family(name)
    ops = cpu_ops()
    engine = transformers_on(base, ops)
    adapters = save_two(engine, tmp_path, base)
    engine.model.set_adapters(ops, [adapter.read() for adapter in adapters])
    prompts = mixed([adapter.sha256 for adapter in adapters])
    run = serve(engine, prompts)
    assert run.num_preemptions > 0
    check(reference_of, base, [adapter.folder for adapter in adapters], prompts, run)


def test_integers_with_adapters_are_their_values_with_the_adapters_merged(
    make_family, transformers_on, reference_of, mixed, tmp_path
):
    original = make_family("Qwen3.5", intermediate_size=128)
    integers, twin = (shutil.copytree(original, tmp_path / name) for name in ("integers", "twin"))
    quantise_checkpoint(original, integers, twin, Scheme("awq"))
    save_file(load_file(twin / "model.safetensors"), twin / "model.safetensors", {"format": "pt"})
    ops = cpu_ops()
    engine = transformers_on(integers, ops)
    adapters = save_two(engine, tmp_path, twin)
    engine.model.set_adapters(ops, [adapter.read() for adapter in adapters])
    prompts = mixed([adapter.sha256 for adapter in adapters])
    check(reference_of, twin, [adapter.folder for adapter in adapters], prompts, serve(engine, prompts))


@pytest.mark.parametrize("make_ops", [reference_ops, cpu_ops])
def test_a_reserved_adapter_is_replaced_while_others_stay(
    make_ops, make_family, transformers_on, reference_of, mixed, tmp_path
):
    base, ops = make_family("Gemma 4"), make_ops()
    engine = transformers_on(base, ops)
    first, second = save_two(engine, tmp_path, base)
    engine.model.reserve_adapters(ops, 2, 8)
    for chosen in ((first, second), (second, second), (second, first)):
        for index, adapter in enumerate(chosen):
            with adapter.reading() as change_of:
                engine.model.set_adapter(ops, index, change_of)
        prompts = mixed([adapter.sha256 for adapter in chosen])
        check(reference_of, base, [adapter.folder for adapter in chosen], prompts, serve(engine, prompts))


def test_requests_without_an_adapter_have_the_bits_of_an_engine_without_adapters(
    make_family, transformers_on, mixed, tmp_path
):
    base, ops = make_family("OLMoE"), cpu_ops()
    engine = transformers_on(base, ops)
    plain = [one for one in mixed([b"1", b"2"]) if one.adapter is None]
    before = serve_all(engine, plain)
    engine.model.set_adapters(ops, [adapter.read() for adapter in save_two(engine, tmp_path, base)])
    assert serve_all(engine, plain) == before


def serve_all(engine, prompts) -> list[list[float]]:
    run = engine.serve(prompts, max_num_batched_tokens=24)
    return [[row.chosen for row in answer.logprobs] for answer in run.answers]


@pytest.mark.parametrize(
    ("name", "target", "names"),
    [
        ("OLMoE", "gate_up_proj", "q_proj, k_proj, v_proj, o_proj"),
        ("OLMoE", "lm_head", "q_proj, k_proj, v_proj, o_proj"),
        ("ModernBERT decoder", "lm_head.dense", "q_proj, k_proj, v_proj, Wo, Wi"),
        ("Command A MoE", "mlp.gate", "q_proj, k_proj, v_proj, o_proj"),
    ],
)
def test_layers_that_adapters_cannot_change_are_refused_by_name(name, target, names, make_family, tmp_path):
    """Experts, the output head, and layers that get the last tokens only."""
    base = make_family(name)
    folder = save_adapter(tmp_path / "adapter", base, layers={f"model.{target}": (64, 64)}, target_modules=[target])
    shapes = TransformersConfig.from_dir(base).projection_shapes()
    error = f"target_modules names '{target}', the linear layers of this model that adapters can change are {names}$"
    with pytest.raises(CheckpointError, match=error):
        LoraAdapter.open("tuned", folder, shapes)
