"""A pair of its own: a tiny model without a tokenizer, and no failover of requests whose engine is lost."""

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from chairlift import Client, GenerationError
from tests.hang import HANG_S
from tests.support.pair import PairAddress

CONFIG = """{
  "architectures": ["LlamaForCausalLM"], "vocab_size": 211, "hidden_size": 64, "intermediate_size": 112,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16384
}"""


@pytest.fixture
def tiny_pair(start_pair: Callable[..., PairAddress], tmp_path: Path) -> PairAddress:
    (tmp_path / "config.json").write_text(CONFIG)
    engine_flags = ("--model", str(tmp_path), "--load-format", "dummy", "--kv-cache-memory-bytes", "64M")
    return start_pair(*engine_flags, frontend_flags=("--failover-timeout", "0"))


def test_token_ids_are_served_until_the_engine_is_killed(tiny_pair: PairAddress) -> None:
    with Client(tiny_pair.target) as client:
        answer = client.generate(token_ids=[5, 6, 7], max_tokens=9, temperature=0, return_token_ids=True)
        again = client.generate(token_ids=[5, 6, 7], max_tokens=9, temperature=0, return_token_ids=True)
        assert len(answer.token_ids) == 9
        assert list(answer.token_ids) == list(again.token_ids)
        assert answer.text == ""
        with pytest.raises(GenerationError, match="the model has no tokenizer: send token_ids") as caught:
            client.generate("Once upon a time")
        assert caught.value.status is grpc.StatusCode.INVALID_ARGUMENT
        assert kill_under_streams(client, tiny_pair.engine) == [grpc.StatusCode.UNAVAILABLE] * 8
        with pytest.raises(GenerationError) as caught:
            client.generate(token_ids=[5, 6, 7], timeout_s=HANG_S)
        assert caught.value.status is grpc.StatusCode.UNAVAILABLE
        assert caught.value.retry_delay_s is not None


def kill_under_streams(client: Client, engine: subprocess.Popen[str]) -> list[grpc.StatusCode]:
    """Kills the engine once eight streams have begun; returns how they end."""
    statuses: list[grpc.StatusCode] = []
    started = threading.Barrier(9)

    def run() -> None:
        stream = client.stream(token_ids=[5, 6, 7], max_tokens=16_000, ignore_end_token=True, timeout_s=HANG_S)
        next(stream)
        started.wait(HANG_S)
        try:
            for _ in stream:
                pass
        except GenerationError as error:
            statuses.append(error.status)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    started.wait(HANG_S)
    engine.kill()
    for thread in threads:
        thread.join(HANG_S)
    return statuses
