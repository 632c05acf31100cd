"""The demo model through vLLM's API: tokens are those of our own stream on the same port; texts keep to constraints."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import jsonschema
import pytest
from llguidance import LLTokenizer
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc

from engine.demo import MODEL_DIR
from frontend.routing.cached_blocks import CachedBlocks
from frontend.routing.foreign.cache_feed import follow_cache
from frontend.routing.foreign.vllm import VllmDialect
from frontend.routing.wire import ids_to_bytes
from tests.hang import HANG_S, START_HANG_S
from tests.support.engine.client import AttachClient, submission
from tests.support.engine.gateway import Gateway, tokens_of, wanted
from tests.support.pair import Processes

TOKENIZER = LLTokenizer((MODEL_DIR / "tokenizer.json").read_text())
END_TOKEN_ID = 1
PROMPTS = ["Once upon a time", "The fox and the miller", "<|user|>Tell me a story.<|end|><|assistant|>"]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine process with both APIs on one socket."""
    processes = Processes(tmp_path_factory.mktemp("engine"))
    address = f"unix:{processes.folder / 'engine.sock'}"
    process = processes.start("engine", "--api", "vllm", "--uds", address.removeprefix("unix:"))
    try:
        with grpc.insecure_channel(address) as channel:
            wait_until_healthy(vllm_grpc.VllmEngineStub(channel), lambda: process.poll() is None, processes, process)
        yield address
    finally:
        processes.stop()


def wait_until_healthy(stub: Any, runs: Any, processes: Processes, process: Any) -> None:
    deadline_s = time.monotonic() + START_HANG_S
    while not stub.HealthCheck(vllm_pb.HealthCheckRequest(), wait_for_ready=True, timeout=START_HANG_S).healthy:
        assert runs(), processes.log(process)
        assert time.monotonic() < deadline_s, processes.log(process)
        time.sleep(0.1)  # another process's state is polled; there is nothing to wait on


@pytest.fixture
async def gateway(address: str) -> Any:
    async with grpc.aio.insecure_channel(address) as channel:
        yield Gateway(channel)


def text_of(token_ids: Any) -> str:
    return bytes(TOKENIZER.decode_bytes([each for each in token_ids if each != END_TOKEN_ID])).decode()


async def text(gateway: Gateway, **params: Any) -> str:
    """The whole answer to the first prompt."""
    prompt_ids = TOKENIZER.tokenize_str(PROMPTS[0])
    (response,) = await gateway.generate(wanted(prompt_ids, stream=False, **{"max_tokens": 100, **params}))
    assert response.complete.finish_reason == "stop"
    return text_of(response.complete.output_ids)


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_greedy_tokens_and_logprobs_are_those_of_our_own_stream(
    address: str, gateway: Gateway, prompt: str
) -> None:
    prompt_ids = TOKENIZER.tokenize_str(prompt)
    async with AttachClient.open(address) as client:
        (own,) = await client.generate(submission(1, prompt_ids, 40, top_logprobs=2))
    responses = await gateway.generate(wanted(prompt_ids, max_tokens=40, logprobs=2))
    assert tokens_of(responses) == own.token_ids
    chunks = [response.chunk for response in responses if response.HasField("chunk")]
    assert [value for chunk in chunks for value in chunk.output_logprobs.token_logprobs] == own.chosen_logprobs


async def test_drawn_tokens_are_those_of_our_own_stream_with_the_same_seed(address: str, gateway: Gateway) -> None:
    prompt_ids = TOKENIZER.tokenize_str(PROMPTS[0])
    async with AttachClient.open(address) as client:
        own_submission = submission(1, prompt_ids, 40)
        own_submission.sampling.temperature, own_submission.sampling.seed = 1.0, 5
        (own,) = await client.generate(own_submission)
    assert (
        tokens_of(await gateway.generate(wanted(prompt_ids, max_tokens=40, temperature=1.0, seed=5))) == own.token_ids
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_texts_keep_to_their_constraint(gateway: Gateway, temperature: float) -> None:
    jsonschema.validate(
        json.loads(await text(gateway, temperature=temperature, json_schema=json.dumps(SCHEMA))), SCHEMA
    )
    assert re.fullmatch(r"[0-9]{3}-[a-c]{2}", await text(gateway, temperature=temperature, regex="[0-9]{3}-[a-c]{2}"))
    choice = vllm_pb.ChoiceConstraint(choices=["red fox", "pig"])
    assert await text(gateway, temperature=temperature, choice=choice) in ("red fox", "pig")
    grammar = 'start: greeting " " NAME\ngreeting: "hi" | "bye"\nNAME: /[a-z]{2,5}/'
    assert re.fullmatch(r"(hi|bye) [a-z]{2,5}", await text(gateway, temperature=temperature, grammar=grammar))


async def test_a_stop_text_ends_the_text(gateway: Gateway) -> None:
    prompt_ids = TOKENIZER.tokenize_str(PROMPTS[0])
    whole = text_of((await gateway.generate(wanted(prompt_ids, stream=False, max_tokens=40)))[0].complete.output_ids)
    stop = whole[20:23]
    (response,) = await gateway.generate(wanted(prompt_ids, stream=False, max_tokens=40, stop=[stop]))
    cut = text_of(response.complete.output_ids)
    assert (response.complete.finish_reason, response.complete.matched_stop_str) == ("stop", stop)
    assert whole.startswith(cut)
    assert stop in cut
    assert stop not in text_of(response.complete.output_ids[:-1])


async def test_our_frontend_follows_the_prefix_cache_that_it_publishes(address: str, gateway: Gateway) -> None:
    prompt_ids = TOKENIZER.tokenize_str("The miller had a donkey, a cat and three sons. " * 8)
    prompt = ids_to_bytes(prompt_ids)
    blocks = CachedBlocks()
    async with grpc.aio.insecure_channel(address) as channel:
        following = asyncio.create_task(follow_cache(VllmDialect(channel), blocks, address))
        await gateway.generate(wanted(prompt_ids, max_tokens=2))
        async with asyncio.timeout(HANG_S):
            while blocks.num_cached_tokens(prompt) < len(prompt_ids) - 16:
                assert not following.done()
                await asyncio.sleep(0.01)  # lets the engine run; there is nothing else to wait on
        late = CachedBlocks()  # what is cached already comes first
        follower = asyncio.create_task(follow_cache(VllmDialect(channel), late, address))
        async with asyncio.timeout(HANG_S):
            while len(late) < len(blocks):
                await asyncio.sleep(0.01)
        assert late.num_cached_tokens(prompt) == blocks.num_cached_tokens(prompt) == len(prompt_ids) // 16 * 16
        for task in (following, follower):
            task.cancel()
