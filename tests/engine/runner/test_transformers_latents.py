"""Attention over latents: a small cache, and the tokens of transformers; those of the families are tested there."""

import random

import pytest
import torch

from engine.core.request import SamplingParams
from engine.model.transformers_latents import means_of_values, queries_of_latents
from kernels.families import cpu_ops

GREEDY = SamplingParams(seed=0, max_tokens=8, temperature=0.0, ignore_end_token=True)
FAMILY = "DeepSeek-V3"  # latents of 16 and a shared key of 8; four heads with keys of 24 and values of 16


@pytest.fixture
def prompts(prompt):
    rng = random.Random(5)
    return [prompt([rng.randrange(3, 300) for _ in range(length)], GREEDY) for length in (1, 40, 17, 60, 3)]


@torch.inference_mode()
def check(reference, prompts, run) -> None:
    for prompt, answer in zip(prompts, run.answers, strict=True):
        ids = torch.tensor([[*prompt.prompt_ids, *answer.token_ids]])
        logits = reference.model(ids, use_cache=False).logits[0, len(prompt.prompt_ids) - 1 : -1]
        assert logits.argmax(dim=-1).tolist() == answer.token_ids


@pytest.mark.parametrize(("may_keep_latents", "heads"), [(True, (4, 1, 32)), (False, (4, 4, 32))])
def test_tokens_are_the_same_with_one_head_of_latents_and_with_all_expanded(
    may_keep_latents, heads, make_family, transformers_on, reference_of, prompts
):
    path = make_family(FAMILY)
    engine = transformers_on(path, cpu_ops(), may_keep_latents=may_keep_latents)
    assert engine.config.has_latents is may_keep_latents
    assert {layer[:3] for layer in engine.config.shape.layers} == {heads}
    run = engine.serve(prompts, num_blocks=12, max_num_seqs=4, max_num_batched_tokens=24)
    check(reference_of(path), prompts, run)


def test_the_matrix_that_is_not_called_has_no_adapters_and_counts_as_a_plain_one(make_family, transformers_on):
    path = make_family(FAMILY)
    kept, expanded = (transformers_on(path, cpu_ops(), may_keep_latents=way).config for way in (True, False))
    plain = {name for name in expanded.linear_layers if name.endswith(".kv_b_proj")}
    assert len(plain) == 3
    assert expanded.linear_layers.keys() - kept.linear_layers.keys() == plain
    assert expanded.projection_shapes().keys() - kept.projection_shapes().keys() == plain


@pytest.mark.parametrize("num_tokens", [1, 8, 9])
def test_scores_and_means_are_those_of_expanded_keys_and_values(num_tokens):
    """In any number of threads, whose number stays."""
    heads, latent, key, value, rotated, before = 3, 10, 6, 4, 2, torch.get_num_threads()
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    module = torch.nn.Module()
    module.kv_b_proj = torch.nn.Linear(latent, heads * (key + value), bias=False)
    module.kv_b_proj.weight = torch.nn.Parameter(draw(heads * (key + value), latent), requires_grad=False)
    module.qk_nope_head_dim, module.v_head_dim = key, value
    latents, shared, query = draw(5, latent), draw(5, rotated), draw(1, heads, num_tokens, key + rotated)
    expanded = module.kv_b_proj(latents).view(5, heads, key + value).transpose(0, 1)
    keys = torch.cat([expanded[..., :key], shared.expand(heads, 5, rotated)], dim=-1)
    wanted = query[0] @ keys.transpose(1, 2)
    found = queries_of_latents(module, query)[0] @ torch.cat([latents, shared], dim=-1).T
    torch.testing.assert_close(found, wanted)
    weights = wanted.softmax(dim=-1)
    means = (weights @ latents).transpose(0, 1)[None]
    torch.testing.assert_close(means_of_values(module, means)[0], (weights @ expanded[..., key:]).transpose(0, 1))
    assert torch.get_num_threads() == before
