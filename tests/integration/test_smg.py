"""SMG, a gateway of another project, before two engines: chat, tools, structured output, streaming, and its routing.

It runs where the program `smg` is installed (`pip install smg`), or CHAIRLIFT_SMG names it.
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import openai
import pytest
from llguidance import LLTokenizer
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc

from engine.demo import MODEL_DIR
from loadgen.processes import held_port
from tests.hang import HANG_S, START_HANG_S
from tests.support.pair import Processes

SMG = os.environ.get("CHAIRLIFT_SMG") or shutil.which("smg")
MODEL = "chairlift-demo"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
TOKENIZER = LLTokenizer((MODEL_DIR / "tokenizer.json").read_text())

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SMG is None, reason="the program smg is not installed, and CHAIRLIFT_SMG does not name it"),
]


@dataclass(frozen=True)
class Fleet:
    """A gateway and its engines."""

    client: openai.OpenAI
    engines: tuple[Any, ...]  # stubs


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two engines of the demo model behind a gateway that has no file of it: it gets the tokenizer from an engine."""
    folder = tmp_path_factory.mktemp("fleet")
    model = folder / "model"
    shutil.copytree(MODEL_DIR, model)
    processes = Processes(folder)
    with held_port() as one, held_port() as two, held_port() as port, held_port() as metrics_port:
        flags = ("--model", str(model), "--served-model-name", MODEL, "--api", "vllm")
        addresses = [f"127.0.0.1:{engine_port}" for engine_port in (one, two)]
        engines = [processes.start("engine", *flags, "--port", address.rpartition(":")[2]) for address in addresses]
        gateway = None
        try:
            stubs = tuple(vllm_grpc.VllmEngineStub(grpc.insecure_channel(address)) for address in addresses)
            for stub, engine in zip(stubs, engines, strict=True):
                until(
                    lambda: stub.HealthCheck(vllm_pb.HealthCheckRequest(), wait_for_ready=True).healthy,  # noqa: B023
                    lambda: processes.log(engine),  # noqa: B023
                )
            shutil.rmtree(model)
            gateway = start_gateway(folder / "smg.log", addresses, port, metrics_port)
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            until(lambda: serves(client), (folder / "smg.log").read_text)
            yield Fleet(client, stubs)
        finally:
            if gateway is not None:
                gateway.kill()
                gateway.wait()
            processes.stop()


def start_gateway(log: Path, addresses: list[str], port: int, metrics_port: int) -> subprocess.Popen[bytes]:
    command = [str(SMG), "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--worker-urls", *(f"grpc://{address}" for address in addresses)]
    command += ["--policy", "cache_aware", "--tool-call-parser", "qwen"]
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def serves(client: openai.OpenAI) -> bool:
    """Whether the gateway knows the model and its tokenizer."""
    try:
        client.completions.create(model=MODEL, prompt="Once", max_tokens=1)
    except (openai.APIConnectionError, openai.APIStatusError):
        return False
    return True


def until(condition: Callable[[], bool], log: Callable[[], str]) -> None:
    """Polls the state of another program; there is nothing to wait on."""
    deadline_s = time.monotonic() + START_HANG_S
    while not condition():
        assert time.monotonic() < deadline_s, log()
        time.sleep(0.2)


def own_answer(fleet: Fleet, prompt: str, max_tokens: int) -> str:
    """The greedy text of an engine, asked directly."""
    request = vllm_pb.GenerateRequest(
        request_id="direct",
        tokenized=vllm_pb.TokenizedInput(input_ids=TOKENIZER.tokenize_str(prompt)),
        sampling_params=vllm_pb.SamplingParams(temperature=0.0, max_tokens=max_tokens),
    )
    (response,) = fleet.engines[0].Generate(request, timeout=HANG_S)
    return str(TOKENIZER.decode_str([each for each in response.complete.output_ids if each != 1]))


def test_chat_has_the_greedy_text_of_the_engine(fleet: Fleet) -> None:
    answer = fleet.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=24, temperature=0
    )
    prompt = "<|user|>Tell me a story.<|end|><|assistant|>"
    assert answer.choices[0].message.content == own_answer(fleet, prompt, 24)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (24, "length")


def test_streams_have_the_text_of_whole_answers(fleet: Fleet) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    whole = fleet.client.completions.create(**asked)
    parts = [part for part in fleet.client.completions.create(**asked, stream=True) if part.choices]
    assert len(parts) > 1  # tokens of a few milliseconds share a message
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert whole.choices[0].text == own_answer(fleet, "Once upon a time", 24)


def test_a_stop_text_and_logprobs(fleet: Fleet) -> None:
    whole = own_answer(fleet, "Once upon a time", 24)
    answer = fleet.client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=24, temperature=0, stop=whole[20:24], logprobs=2
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (whole[: whole.index(whole[20:24])], "stop")


def test_several_answers_differ(fleet: Fleet) -> None:
    answer = fleet.client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=24, temperature=1, seed=3, n=3
    )
    assert len({choice.text for choice in answer.choices}) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_structured_output_keeps_to_its_schema(fleet: Fleet, stream: bool) -> None:
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer: Any = fleet.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "A city"}],
        max_tokens=60,
        temperature=0,
        response_format=response_format,
        stream=stream,
    )
    if stream:
        content = "".join(part.choices[0].delta.content or "" for part in answer if part.choices)
    else:
        content = answer.choices[0].message.content
    jsonschema.validate(json.loads(content), CITY)


def test_a_forced_tool_call_has_arguments_of_its_schema(fleet: Fleet) -> None:
    answer: Any = fleet.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Weather in Rome?"}],
        max_tokens=60,
        temperature=0,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, answer.choices[0].finish_reason) == ("get_weather", "tool_calls")
    jsonschema.validate(json.loads(call.function.arguments), CITY)


def test_bad_input_is_a_client_error_that_names_the_field(fleet: Fleet) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape("sampling_params.grammar")):
        fleet.client.completions.create(model=MODEL, prompt="Once", max_tokens=5, extra_body={"ebnf": "start: nothing"})


def test_requests_go_to_the_engine_that_has_their_prefix(fleet: Fleet) -> None:
    """Two families of prompts, each long enough for several blocks: later ones find their prefix in an engine."""
    families = [" ".join(["the red fox and the miller"] * 12), " ".join(["a patient sparrow on the bridge"] * 12)]

    def ask(prompt: str) -> int:
        answer = fleet.client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0

    for family in families:
        until(lambda: ask(family) >= 48, lambda: family)  # noqa: B023 - the gateway learns of the first one's blocks
    for number in range(6):
        for family in families:
            assert ask(f"{family} number {number}") >= 48, (family, number)
