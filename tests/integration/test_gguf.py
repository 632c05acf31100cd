"""Engines, some of them behind a frontend, answer from a GGUF file as from the folder that it was converted from."""

from pathlib import Path
from typing import Any

import pytest

from chairlift import Client
from engine.bench.gguf_writer import save_gguf, save_twin
from engine.core.request import SamplingParams
from tests.support.engine.checkpoints import save_checkpoint
from tests.support.engine.gguf import save_random_blocks
from tests.support.engine.greedy import VOCAB_SIZE, random_prompts, save_word_tokenizer
from tests.support.engine.small_engine import answers_with_flags
from tests.support.pair import DEMO_MODEL, running_pair

PROMPTS = ("Once upon a time", "The fox said: \"It's 12 o'clock\"", "東京")
CHAT = [("user", "Tell me a short story about a brave fox.")]


def answers(tmp_path: Path, model: Path, temperature: float = 0) -> list[tuple[list[int], str]]:
    tmp_path.mkdir()
    flags = ("--model", str(model), "--kv-cache-memory-bytes", "64M")
    with running_pair(tmp_path, *flags) as pair, Client(pair.target) as client:
        options = {"max_tokens": 24, "temperature": temperature, "seed": 7, "return_token_ids": True}
        results = [client.generate(prompt, **options) for prompt in PROMPTS]
        results.append(client.generate(chat=CHAT, **options))
        return [(list(result.token_ids), result.text) for result in results]


@pytest.mark.slow
def test_text_and_chat_have_the_tokens_of_the_folder(tmp_path: Path) -> None:
    save_gguf(DEMO_MODEL, tmp_path / "demo.gguf", "BF16")
    assert answers(tmp_path / "file", tmp_path / "demo.gguf") == answers(tmp_path / "folder", DEMO_MODEL)


@pytest.mark.slow
def test_blocks_have_the_tokens_of_their_numbers(tmp_path: Path) -> None:
    """With random weights, the types mixed as in Q4_K_M."""
    file, twin = tmp_path / "demo.gguf", tmp_path / "twin"
    save_random_blocks(DEMO_MODEL, file, {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}, "Q4_K")
    save_twin(file, DEMO_MODEL, twin)
    (twin / "generation_config.json").unlink()  # defaults of sampling, which a GGUF file has not
    found = answers(tmp_path / "file", file, temperature=1)  # greedy ones repeat themselves
    assert found == answers(tmp_path / "folder", twin, temperature=1)
    assert len({token for tokens, _ in found for token in tokens}) > 10


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"partial_rotary_factor": 0.75, "sliding_window": 24},
    "smollm3": {"no_rope_layers": None, "num_hidden_layers": 4},
    "granite": {},
    "glm4": {},
    "gemma": {"tie_word_embeddings": False},  # otherwise answers repeat few tokens
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {
        "query_pre_attn_scalar": 16,
        "layer_types": None,
        "num_hidden_layers": 7,
        "final_logit_softcapping": 2.0,  # otherwise answers repeat few tokens
    },
    "olmo2": {},
    "olmo3": {},
    "mixtral": {},
    "qwen2_moe": {"mlp_only_layers": [], "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True, "moe_intermediate_size": 64},
    "gpt_oss": {"swiglu_limit": 7.0},
}
WORDS = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [f"t{token_id}" for token_id in range(VOCAB_SIZE)],
    "tokenizer.ggml.scores": [0.0] * VOCAB_SIZE,
    "tokenizer.ggml.token_type": [1] * VOCAB_SIZE,
}


@pytest.mark.parametrize(
    "name", [name if name == "gemma3" else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]
)
def test_tokens_of_an_architecture_are_those_of_a_folder_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    """With matrices in 8 bits, experts of gpt-oss in MXFP4; at temperature 1, because greedy answers repeat themselves.

    tests/integration/test_parity.py compares folders with transformers.
    """
    original, file, twin = tmp_path / "original", tmp_path / "model.gguf", tmp_path / "twin"
    options = {"intermediate_size": 128, **ARCHITECTURES[name]}
    save_checkpoint(original, name, seed=5, dtype="float32", max_shard_size="1GB", **options)
    kinds = {"_exps": "MXFP4"} if name == "gpt_oss" else {}
    save_random_blocks(original, file, kinds, "Q8_0", metadata=WORDS)
    save_twin(file, original, twin)
    save_word_tokenizer(twin)
    prompts = random_prompts((1, 5, 16, 33, 80))
    params = SamplingParams(seed=7, max_tokens=24, temperature=1.0, ignore_end_token=True)
    found, wanted = (
        answers_with_flags(model, prompts, params, "--kv-cache-memory-bytes", "64M") for model in (file, twin)
    )
    assert found == wanted
    assert len({token for answer in found for token in answer.token_ids}) > 20
