"""The whole pair answers from a GGUF file as from the folder that it was converted from."""

from pathlib import Path

import pytest

from chairlift import Client
from engine.bench.gguf_writer import save_gguf, save_twin
from tests.support.engine.gguf import save_random_blocks
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
