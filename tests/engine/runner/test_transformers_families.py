"""Every family that transformers computes, through scheduler, runner and paged cache: tokens of transformers alone."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.request import SamplingParams
from engine.model.implementation import choose_implementation
from kernels.families import cpu_ops
from tests.support.engine.families import (
    FAMILIES,
    WITHOUT_A_CLASS_FOR_TEXT,
    save_as_part,
    save_with_images,
    save_without_images,
)

NUM_TOKENS = 12
GREEDY = SamplingParams(seed=0, max_tokens=NUM_TOKENS, temperature=0.0, ignore_end_token=True, top_logprobs=1)
# Experts, sinks, windows; learned positions, transposed and tied weights; layers with state, which Jamba continues by
# single tokens only.
IN_EVERY_RUN = ("gpt-oss", "GPT-2", "Jamba", "LFM2", "Qwen3.5")


@pytest.fixture(scope="module")
def prompts(prompt):
    """20 prompts of 1 to 90 tokens; every third begins like another one."""
    rng = random.Random(3)
    shared = [rng.randrange(3, 300) for _ in range(50)]
    lengths = [1, 2, 90, *(rng.randrange(3, 60) for _ in range(17))]
    return [
        prompt(
            (shared[: length // 2] if index % 3 == 0 else [])
            + [rng.randrange(3, 300) for _ in range(length - length // 2 if index % 3 == 0 else length)],
            GREEDY,
        )
        for index, length in enumerate(lengths)
    ]


@torch.inference_mode()
def check(reference, prompts, run, *, tolerance: float = 1e-4) -> None:
    """Each token is the reference's own choice after the same tokens, with its logprob: so is the whole answer."""
    for prompt, answer in zip(prompts, run.answers, strict=True):
        assert len(answer.token_ids) == NUM_TOKENS
        ids = torch.tensor([[*prompt.prompt_ids, *answer.token_ids]])
        logits = reference.model(ids, use_cache=False).logits[0, len(prompt.prompt_ids) - 1 : -1].float()
        assert logits.argmax(dim=-1).tolist() == answer.token_ids
        wanted = logits.log_softmax(dim=-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor([row.chosen for row in answer.logprobs]), wanted.double().float(), atol=tolerance, rtol=0
        )


def serve(engine, prompts):
    """Staggered, in chunks, with preemption and, unless layers have state, with reused prefixes."""
    has_state = bool(engine.config.shape.state_bytes)
    run = engine.serve(
        prompts,
        num_blocks=14 if has_state else 24,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        num_snapshots=20 if has_state else 0,
    )
    assert run.num_preemptions > 0
    assert has_state or run.num_cached_tokens > 0
    return run


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in FAMILIES],
)
def test_tokens_are_those_of_transformers(name, make_family, transformers_on, reference_of, prompts):
    path = make_family(name)
    check(reference_of(path), prompts, serve(transformers_on(path, cpu_ops()), prompts))


def test_the_text_part_of_a_checkpoint_for_images_gives_the_tokens_of_the_whole(
    tmp_path, transformers_on, reference_of, prompts, caplog
):
    save_with_images(tmp_path)
    engine = transformers_on(tmp_path, cpu_ops())
    assert "tensors are unexpected" not in caplog.text
    check(reference_of(tmp_path), prompts, serve(engine, prompts))


@pytest.mark.parametrize(
    ("name", "architecture", "model_type"),
    [
        ("Command R7B", "Cohere2VisionForConditionalGeneration", "cohere2_vision"),
        ("Gemma 3n", "Gemma3nForConditionalGeneration", "gemma3n"),
        ("Gemma 4 unified", "Gemma4UnifiedForConditionalGeneration", "gemma4_unified"),
        ("GLM-4.5", "Glm4vMoeForConditionalGeneration", "glm4v_moe/glm4v_moe_text"),
        ("LFM2", "Lfm2VlForConditionalGeneration", "lfm2_vl"),
        ("Ministral 3", "Mistral3ForConditionalGeneration", "mistral3"),
        ("Mistral 4", "Mistral3ForConditionalGeneration", "mistral3"),
        ("Qwen3.5", "Qwen3_5ForConditionalGeneration", "qwen3_5"),
        ("Qwen3.5-MoE", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    ],
)
def test_so_do_text_parts_under_the_names_of_published_files(
    name, architecture, model_type, tmp_path, make_family, transformers_on, reference_of, prompts, caplog
):
    text = make_family(name)
    save_as_part(tmp_path / "whole", text, architecture, model_type)
    engine = transformers_on(tmp_path / "whole", cpu_ops())
    assert "tensors are unexpected" not in caplog.text
    check(reference_of(text), prompts, serve(engine, prompts))


@pytest.mark.parametrize(
    ("name", "architecture", "section"),
    [
        ("DeepSeek-V3", "KimiK25ForConditionalGeneration", {"text_config": {"model_type": "kimi_k2"}}),
        ("Nemotron-H", "NemotronH_Nano_Omni_Reasoning_V3", {"llm_config": {}}),
    ],
)
def test_text_parts_are_served_without_the_code_of_their_publishers(
    name, architecture, section, tmp_path, make_family, transformers_on, reference_of, prompts
):
    """The whole is of no class of transformers; names are those of text behind a prefix."""
    text = make_family(name)
    (key, changes), config = *section.items(), json.loads((text / "config.json").read_text())
    whole = {"architectures": [architecture], "auto_map": {"AutoModel": "x.Y"}, "model_type": "x"}
    (tmp_path / "config.json").write_text(json.dumps({**whole, key: {**config, **changes, "auto_map": {}}}))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(text / "model.safetensors").items()}
    save_file({**tensors, "vision_model.x": torch.ones(3)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert choose_implementation(tmp_path, "auto") == "transformers"
    check(reference_of(text), prompts, serve(transformers_on(tmp_path, cpu_ops()), prompts))


@pytest.mark.parametrize("prefix", WITHOUT_A_CLASS_FOR_TEXT)
def test_text_parts_without_a_class_of_their_own_have_the_head_of_the_whole(prefix, tmp_path, transformers_on, prompts):
    whole = save_without_images(tmp_path, prefix)
    check(SimpleNamespace(model=whole), prompts, serve(transformers_on(tmp_path, cpu_ops()), prompts))


@pytest.mark.parametrize("is_long", [False, True])
def test_longrope_has_the_factors_of_the_longest_request(
    is_long, make_family, transformers_on, reference_of, prompts, caplog
):
    """transformers chooses by the longest request of a batch: alone, within or beyond the original positions."""
    original = 16 if is_long else 128
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": original,
    }
    path = make_family("Phi-3", rope_parameters=rope, original_max_position_embeddings=original)
    served = [one for one in prompts if not is_long or len(one.prompt_ids) > original]
    with caplog.at_level("INFO"):
        engine = transformers_on(path, cpu_ops(), max_model_len=128)
    assert f"uses its {'long' if is_long else 'short'} factors" in caplog.text
    check(reference_of(path), served, engine.serve(served, max_num_batched_tokens=48))


def test_hunyuans_dynamic_rotation_with_a_fixed_alpha_is_served(make_family, transformers_on, reference_of, prompts):
    """As its checkpoints are published: by alpha the frequencies do not follow the longest request."""
    path = make_family("Hunyuan", rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0})
    assert choose_implementation(path, "auto") == "transformers"
    check(reference_of(path), prompts, serve(transformers_on(path, cpu_ops()), prompts))


def test_int8_layers_give_the_tokens_of_the_native_decoder(make_family, transformers_on, engine_on, prompts):
    """The same products in int8, whichever implementation calls them: an int8 row has its own scale.

    The last bits of norms and attention differ, by which an input may be rounded to the next of its 255 values. So
    log-probabilities differ by up to 0.03 here, and answers where the best two tokens are that near.
    """
    path = make_family("Llama", hidden_act="silu", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    ops = cpu_ops(quantization="int8")
    ours, native = (make(path, ops).serve(prompts, max_num_batched_tokens=48) for make in (transformers_on, engine_on))
    num_equal = 0
    for one, other in zip(ours.answers, native.answers, strict=True):
        both = list(zip(one.token_ids, other.token_ids, strict=True))
        num_same = next((index for index, (token, its) in enumerate(both) if token != its), NUM_TOKENS - 1) + 1
        for row, its in zip(one.logprobs[:num_same], other.logprobs[:num_same], strict=True):
            assert row.chosen == pytest.approx(its.chosen, abs=0.1)
        num_equal += one.token_ids == other.token_ids
    assert num_equal >= 15


@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3.5-MoE", "Qwen3-Next"])
def test_the_native_decoder_keeps_the_state_of_each_request(make_family, engine_on, reference_of, prompts, name):
    """Chunks, preemption and slots that other requests have left, and the same bits alone as among others."""
    path = make_family(name)
    engine = engine_on(path, cpu_ops())
    together = serve(engine, prompts)
    check(reference_of(path), prompts, together)
    without = engine.serve(prompts, enable_prefix_caching=False)
    assert [one.token_ids for one in without.answers] == [one.token_ids for one in together.answers]
    assert [one.logprobs for one in without.answers] == [one.logprobs for one in together.answers]
    for prompt, among_others in zip(prompts[:4], together.answers, strict=False):
        (alone,) = engine.serve([prompt], max_num_batched_tokens=7).answers
        assert alone.token_ids == among_others.token_ids
        assert alone.logprobs == among_others.logprobs


@pytest.mark.parametrize(("name", "is_native"), [("Qwen3.5", True), ("LFM2", False), ("Jamba", False)])
def test_prefixes_of_models_with_state_are_reused(
    name, is_native, make_family, engine_on, transformers_on, reference_of, prompt
):
    """Turns of conversations with one system prompt: each goes on from a copy of a state, in steps that overlap."""
    path = make_family(name)
    engine = (engine_on if is_native else transformers_on)(path, cpu_ops())
    rng = random.Random(7)
    system = [rng.randrange(3, 300) for _ in range(130)]
    turns = [system + [rng.randrange(3, 300) for _ in range(length)] for length in (3, 5, 9, 17, 70)]
    turns += [turn + [rng.randrange(3, 300) for _ in range(6)] for turn in turns]
    conversations = [prompt(turn, GREEDY) for turn in turns]
    run = engine.serve(conversations, max_num_seqs=1, num_snapshots=20, max_num_batched_tokens=48)
    assert run.num_cached_tokens >= 7 * 128  # the first one is alone, and the second one makes the copy
    check(reference_of(path), conversations, run)
    if is_native:
        without = engine.serve(conversations, enable_prefix_caching=False)
        assert [one.logprobs for one in without.answers] == [one.logprobs for one in run.answers]
