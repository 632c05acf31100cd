"""The pair on a model of random weights without a tokenizer: token ids in, token ids out."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from chairlift import Client, GenerationError

CONFIG = """{
  "architectures": ["LlamaForCausalLM"], "vocab_size": 211, "hidden_size": 64, "intermediate_size": 112,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512
}"""


@pytest.fixture(scope="module")
def target(start_pair: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shape") / "tiny"
    path.mkdir()
    (path / "config.json").write_text(CONFIG)
    address: str = start_pair("--model", str(path), "--load-format", "dummy", "--kv-cache-memory-bytes", "1M").target
    return address


def test_token_ids_are_served(target: str) -> None:
    with Client(target) as client:
        answer = client.generate(token_ids=[5, 6, 7], max_tokens=9, temperature=0, return_token_ids=True)
        again = client.generate(token_ids=[5, 6, 7], max_tokens=9, temperature=0, return_token_ids=True)
    assert len(answer.token_ids) == 9
    assert list(answer.token_ids) == list(again.token_ids)
    assert answer.text == ""


def test_text_is_one_clear_error(target: str) -> None:
    with Client(target) as client, pytest.raises(GenerationError) as caught:
        client.generate("Once upon a time")
    assert caught.value.status is grpc.StatusCode.INVALID_ARGUMENT
    assert "the model has no tokenizer: send token_ids" in str(caught.value)
