"""The whole pair answers from a GGUF file as from the folder that it was converted from."""

from pathlib import Path

import pytest

from chairlift import Client
from tests.support.engine.gguf import save_gguf
from tests.support.pair import DEMO_MODEL, running_pair

PROMPTS = ("Once upon a time", "The fox said: \"It's 12 o'clock\"", "東京")
CHAT = [("user", "Tell me a short story about a brave fox.")]


def answers(tmp_path: Path, model: Path) -> list[tuple[list[int], str]]:
    tmp_path.mkdir()
    flags = ("--model", str(model), "--kv-cache-memory-bytes", "64M")
    with running_pair(tmp_path, *flags) as pair, Client(pair.target) as client:
        options = {"max_tokens": 24, "temperature": 0, "return_token_ids": True}
        results = [client.generate(prompt, **options) for prompt in PROMPTS]
        results.append(client.generate(chat=CHAT, **options))
        return [(list(result.token_ids), result.text) for result in results]


@pytest.mark.slow
def test_text_and_chat_have_the_tokens_of_the_folder(tmp_path: Path) -> None:
    save_gguf(DEMO_MODEL, tmp_path / "demo.gguf", "BF16")
    assert answers(tmp_path / "file", tmp_path / "demo.gguf") == answers(tmp_path / "folder", DEMO_MODEL)
