"""Answers through vLLM's API are those of our own stream; a call ends when its engine or its client ends it."""

import asyncio
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import grpc
import grpc.aio
import pytest
from llguidance import LLTokenizer
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.sampling_fields import seed_of_answer
from engine.constraints.grammar import GrammarMatcher
from engine.core.request import SamplingParams
from engine.demo import MODEL_DIR
from engine.serving.vllm import call, service
from tests.hang import HANG_S
from tests.support.engine.client import AttachClient, engine_status, submission
from tests.support.engine.fake_model import FakeModel
from tests.support.engine.gate import Gate
from tests.support.engine.gateway import tokens_of, wanted

PROMPT = tuple(range(10, 40))


async def failure(responses: Any) -> grpc.aio.AioRpcError:
    """The status with which a call ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(responses, HANG_S)
    return caught.value


async def until(condition: Callable[[], Any]) -> None:
    """Asks again and again: the state of another thread has no event to wait for."""
    async with asyncio.timeout(HANG_S):
        while not await condition():
            await asyncio.sleep(0.01)


def solo(model: FakeModel, seed: int = 0, max_tokens: int = 8, **params: Any) -> list[int]:
    """The answer to PROMPT, computed without an engine."""
    sampling = SamplingParams(seed=seed, max_tokens=max_tokens, **params)
    return list(model.solo_output(PROMPT, sampling, max_model_len=256).token_ids)


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_and_logprobs_are_those_of_our_own_stream(served: Any, stream: bool) -> None:
    request = wanted(PROMPT, stream=stream, logprobs=2, prompt_logprobs=1, stop_token_ids=[3], max_tokens=20)
    responses = await served.gateway.generate(request)
    async with AttachClient.open(served.server.address) as client:
        own = submission(1, PROMPT, 20, top_logprobs=2, prompt_logprobs=1)
        (received,) = await client.generate(own)
    complete = responses[-1].complete
    assert list(complete.output_ids) == received.token_ids == solo(served.model, max_tokens=20)
    assert (complete.finish_reason, complete.prompt_tokens) == ("length", len(PROMPT))
    if stream:
        tokens_of(responses)
        parts = [response.chunk for response in responses[:-1]]
        assert not any(part.HasField("input_logprobs") for part in parts[1:])
    else:
        assert len(responses) == 1
        parts = [complete]
    outputs = [part.output_logprobs for part in parts]
    assert [value for part in outputs for value in part.token_logprobs] == received.chosen_logprobs
    assert [token_id for part in outputs for token_id in part.token_ids] == received.token_ids
    tops = [list(zip(top.token_ids, top.values, strict=True)) for part in outputs for top in part.top_logprobs]
    assert tops == received.top_logprobs
    prompt = parts[0].input_logprobs
    assert list(prompt.token_ids) == list(PROMPT)
    assert not prompt.token_logprobs[0].HasField("value")
    assert [entry.value for entry in prompt.token_logprobs[1:]] == received.prompt_logprobs
    assert [list(zip(top.token_ids, top.values, strict=True)) for top in prompt.top_logprobs[1:]] == (
        received.prompt_top_logprobs
    )


async def test_n_answers_have_the_seeds_that_the_public_proto_documents(served: Any) -> None:
    responses = await served.gateway.generate(wanted(PROMPT, n=3, temperature=1.0, seed=77))
    for index in range(3):
        assert tokens_of(responses, index) == solo(served.model, seed_of_answer(77, index))


async def test_later_answers_find_the_prompt_in_the_prefix_cache(served: Any) -> None:
    responses = await served.gateway.generate(wanted(PROMPT, n=3, stream=False))
    assert [response.complete.index for response in responses] == [0, 1, 2]
    assert [response.complete.cached_tokens for response in responses] == [0, 28, 28]  # whole blocks of 4


async def test_unset_parameters_have_the_defaults_of_vllm(start: Any) -> None:
    served = await start(max_model_len=64, model=FakeModel(3072, frozenset({1}), end_probability=0.0))
    request = vllm_pb.GenerateRequest(request_id="r", tokenized=vllm_pb.TokenizedInput(input_ids=PROMPT))
    (response,) = await served.gateway.generate(request)
    assert response.complete.completion_tokens == 64 - len(PROMPT)
    assert response.complete.finish_reason == "length"
    (other,) = await served.gateway.generate(request)  # its seed is another one
    assert list(other.complete.output_ids) != list(response.complete.output_ids)


async def test_a_stop_token_ends_the_answer_and_is_named(served: Any) -> None:
    answer = solo(served.model)
    responses = await served.gateway.generate(wanted(PROMPT, stop_token_ids=[answer[3]]))
    assert tokens_of(responses) == answer[: answer.index(answer[3]) + 1]
    complete = responses[-1].complete
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", answer[3])


async def test_the_end_token_ends_the_answer_unless_it_is_ignored(start: Any) -> None:
    served = await start(model=FakeModel(3072, frozenset({1}), end_probability=1.0))
    ended = await served.gateway.generate(wanted(PROMPT))
    assert tokens_of(ended) == [1]
    assert ended[-1].complete.finish_reason == "stop"
    assert ended[-1].complete.WhichOneof("matched_stop") is None
    ignoring = await served.gateway.generate(wanted(PROMPT, ignore_eos=True))
    assert tokens_of(ignoring) == [1] * 8
    assert ignoring[-1].complete.finish_reason == "length"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_text_ends_the_answer_with_its_token(served: Any, stream: bool) -> None:
    tokenizer = LLTokenizer((MODEL_DIR / "tokenizer.json").read_text())
    answer = solo(served.model, max_tokens=200)
    spelled = [tokenizer.decode_bytes([token_id]) for token_id in answer]
    text = next(before[-1:] + after for before, after in pairwise(spelled[5:]) if (before[-1:] + after).isascii())
    stop = text.decode()
    written, expected = b"", 0
    for expected, part in enumerate(spelled, 1):  # noqa: B007 - the first number of tokens with the text
        written += part
        if text in written:
            break
    request = wanted(PROMPT, stream=stream, max_tokens=200, stop=["never in it", stop])
    responses = await served.gateway.generate(request)
    complete = responses[-1].complete
    assert list(complete.output_ids) == answer[:expected]
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", stop)
    if stream:
        tokens_of(responses)
    await until(lambda: is_idle(served))


async def test_no_stop_text_within_min_tokens_ends_the_answer(served: Any) -> None:
    responses = await served.gateway.generate(wanted(PROMPT, stop=list("aeiost "), min_tokens=8))
    assert tokens_of(responses) == solo(served.model, min_tokens=8)


async def test_a_stop_text_may_begin_within_min_tokens(served: Any) -> None:
    tokenizer = LLTokenizer((MODEL_DIR / "tokenizer.json").read_text())
    answer = solo(served.model, max_tokens=200)
    spelled = [tokenizer.decode_bytes([token_id]) for token_id in answer]
    number, stop = next(  # token `number` of the answer, from 1, completes this text for the first time
        (number, before[-1:] + after)
        for number, (before, after) in enumerate(pairwise(spelled), 2)
        if (before[-1:] + after).isascii() and before[-1:] + after not in b"".join(spelled[: number - 1])
    )
    for min_tokens, reason in ((number - 1, "stop"), (number, "length")):
        request = wanted(PROMPT, max_tokens=number, stop=[stop.decode()], min_tokens=min_tokens)
        responses = await served.gateway.generate(request)
        assert tokens_of(responses) == answer[:number]
        assert responses[-1].complete.finish_reason == reason


async def test_a_slow_reader_pauses_its_answer(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are written one after the other; a gateway that reads none stops the engine after the window."""
    monkeypatch.setattr(call, "TOKEN_WINDOW", 16)
    served = await start(max_model_len=240, num_blocks=512)
    written = asyncio.Event()
    release = asyncio.Event()
    take = call.Call._next_responses

    async def slow(self: Any, answer: Any) -> Any:
        async for response in take(self, answer):
            written.set()
            await release.wait()
            yield response

    monkeypatch.setattr(call.Call, "_next_responses", slow)
    answering = asyncio.create_task(served.gateway.generate(wanted(PROMPT, max_tokens=200)))
    await asyncio.wait_for(written.wait(), HANG_S)
    await until(lambda: has_generated(served, 16))
    release.set()
    assert tokens_of(await answering) == solo(served.model, max_tokens=200)


async def test_abort_ends_a_call_with_what_it_has(start: Any) -> None:
    gate = Gate()
    gate.let_pass(20)
    served = await start(max_model_len=256, on_step=gate)
    stream = aiter(served.gateway.stub.Generate(wanted(PROMPT, max_tokens=220, n=2)))
    responses = [await anext(stream)]
    await gate.holds()
    await served.gateway.stub.Abort(vllm_pb.AbortRequest(request_ids=["r", "unknown"]))
    gate.open()
    responses += [response async for response in stream]
    completes = [response.complete for response in responses if response.HasField("complete")]
    assert sorted(complete.index for complete in completes) == [0, 1]
    assert {complete.finish_reason for complete in completes} == {"abort"}
    tokens = tokens_of(responses)
    assert tokens == solo(served.model, max_tokens=220)[: len(tokens)]
    assert len(tokens) < 220
    await until(lambda: is_idle(served))


async def test_a_client_that_leaves_stops_its_answers(start: Any) -> None:
    served = await start(max_model_len=256)
    stream = served.gateway.stub.Generate(wanted(PROMPT, max_tokens=220))
    await stream.read()
    stream.cancel()
    await until(lambda: is_idle(served))
    assert tokens_of(await served.gateway.generate(wanted(PROMPT))) == solo(served.model)


async def test_the_engine_ends_a_request_at_its_deadline(start: Any) -> None:
    gate = Gate()
    served = await start(on_step=gate)
    error = await failure(served.gateway.generate(wanted(PROMPT), timeout_s=0.5))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    gate.open()
    await until(lambda: is_idle(served))


async def test_a_deadline_in_years_is_no_error(served: Any) -> None:
    assert tokens_of(await served.gateway.generate(wanted(PROMPT), timeout_s=1e8)) == solo(served.model)


async def test_a_request_id_in_use_is_refused_and_free_afterwards(start: Any) -> None:
    gate = Gate()
    served = await start(on_step=gate)
    first = asyncio.create_task(served.gateway.generate(wanted(PROMPT)))
    await gate.holds()
    error = await failure(served.gateway.generate(wanted(PROMPT)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "request_id 'r' is in use" in error.details()
    gate.open()
    await first
    await served.gateway.generate(wanted(PROMPT))


async def test_a_full_queue_is_resource_exhausted(start: Any) -> None:
    gate = Gate()
    served = await start(on_step=gate, max_num_seqs=1, max_waiting=1)
    running = asyncio.create_task(served.gateway.generate(wanted(PROMPT, request_id="running")))
    await gate.holds()
    waiting = asyncio.create_task(served.gateway.generate(wanted(PROMPT, request_id="waiting")))
    await until(lambda: has_calls(served, 2))
    error = await failure(served.gateway.generate(wanted(PROMPT, request_id="late")))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "at most 2" in error.details()
    gate.open()
    assert tokens_of(await running) == tokens_of(await waiting) == solo(served.model)


async def test_a_later_answer_of_an_accepted_call_waits_for_room(start: Any) -> None:
    served = await start(max_num_seqs=1, max_waiting=1)
    responses = await served.gateway.generate(wanted(PROMPT, n=5, seed=3, temperature=1.0))
    for index in range(5):
        assert tokens_of(responses, index) == solo(served.model, seed_of_answer(3, index))


async def test_a_drain_refuses_new_calls_and_finishes_open_ones(start: Any) -> None:
    gate = Gate()
    served = await start(on_step=gate)
    open_call = asyncio.create_task(served.gateway.generate(wanted(PROMPT)))
    await gate.holds()
    served.server.engine.drain(HANG_S)
    gate.open()
    gate.close()
    await gate.holds()
    await until(lambda: is_draining(served))
    error = await failure(served.gateway.generate(wanted(PROMPT, request_id="late")))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "draining" in error.details()
    health = await served.gateway.stub.HealthCheck(vllm_pb.HealthCheckRequest())
    assert (health.healthy, "draining" in health.message) == (False, True)
    gate.open()
    assert tokens_of(await open_call) == solo(served.model)


async def test_the_end_of_the_grace_period_is_unavailable(start: Any) -> None:
    gate = Gate()
    served = await start(on_step=gate, max_model_len=256)
    open_call = asyncio.create_task(served.gateway.generate(wanted(PROMPT, max_tokens=200)))
    await gate.holds()
    served.server.engine.drain(0.0)
    gate.open()
    error = await failure(open_call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_row_that_fails_ends_only_its_call(start: Any) -> None:
    served = await start(fail=lambda request_id, position: "NaN in row" if request_id == 1 and position > 32 else None)
    bad = asyncio.create_task(served.gateway.generate(wanted(PROMPT, request_id="bad")))
    error = await failure(bad)
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "NaN in row")
    assert tokens_of(await served.gateway.generate(wanted(PROMPT))) == solo(served.model)


async def test_a_prompt_that_never_fits_is_invalid(start: Any) -> None:
    served = await start(max_model_len=32)
    error = await failure(served.gateway.generate(wanted(range(10, 60))))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt has 50 tokens, max_model_len is 32" in error.details()


LOWEST = '{"type": "integer", "minimum": -9223372036854775808, "maximum": -9223372036854775808}'
"""llguidance 1.9.1 recurses until the process crashes."""


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"json_schema": '{"type": "object"'}, ["sampling_params.json_schema", "not valid JSON"]),
        ({"json_schema": '{"not": {"type": "null"}}'}, ["sampling_params.json_schema", "not"]),
        ({"regex": "("}, ["sampling_params.regex"]),
        ({"grammar": "start: nothing"}, ["sampling_params.grammar", 'unknown name: "nothing"']),
        ({"grammar": "x" * 300_000}, ["sampling_params.grammar", "300000 characters"]),
        ({"grammar": f"start: %json {LOWEST}"}, ["sampling_params.grammar contains %json"]),
        ({"json_schema": LOWEST}, ["sampling_params.json_schema", "with maximum -9223372036854775808, beyond 64 bits"]),
        ({"json_schema": '{"multipleOf": 100000007}'}, ["sampling_params.json_schema", "with multipleOf 100000007"]),
        ({"choice": vllm_pb.ChoiceConstraint()}, ["sampling_params.choice.choices is empty"]),
    ],
)
async def test_a_bad_constraint_is_invalid_and_named(served: Any, constraint: dict[str, Any], words: list[str]) -> None:
    error = await failure(served.gateway.generate(wanted(PROMPT, **constraint)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert all(word in error.details() for word in words), error.details()


def hold(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> tuple[threading.Event, threading.Event]:
    """Returns events: one is set when the function has been called, and it goes on when the other one is set."""
    has_begun, may_end, function = threading.Event(), threading.Event(), getattr(owner, name)

    def slow(*arguments: Any) -> Any:
        has_begun.set()
        assert may_end.wait(HANG_S)
        return function(*arguments)

    monkeypatch.setattr(owner, name, slow)
    return has_begun, may_end


async def test_abort_while_a_grammar_compiles(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_end = hold(monkeypatch, GrammarMatcher, "compile")
    answering = asyncio.create_task(served.gateway.generate(wanted(PROMPT, regex="a+")))
    try:
        assert await asyncio.to_thread(has_begun.wait, HANG_S)
        await served.gateway.stub.Abort(vllm_pb.AbortRequest(request_ids=["r"]))
        (response,) = await asyncio.wait_for(answering, HANG_S)
        assert (response.complete.finish_reason, list(response.complete.output_ids)) == ("abort", [])
    finally:
        may_end.set()


async def test_abort_while_a_constraint_is_converted(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_end = hold(monkeypatch, service, "grammar_of")
    answering = asyncio.create_task(served.gateway.generate(wanted(PROMPT, regex="a+")))
    try:
        assert await asyncio.to_thread(has_begun.wait, HANG_S)
        await served.gateway.stub.Abort(vllm_pb.AbortRequest(request_ids=["r"]))
    finally:
        may_end.set()
    (response,) = await asyncio.wait_for(answering, HANG_S)
    assert (response.complete.finish_reason, list(response.complete.output_ids)) == ("abort", [])
    assert tokens_of(await served.gateway.generate(wanted(PROMPT))) == solo(served.model)


async def has_generated(served: Any, num_tokens: int) -> bool:
    status = await engine_status(served.server.address)
    assert status.status.load.num_generated_tokens_total <= num_tokens
    return bool(status.status.load.num_generated_tokens_total == num_tokens)


async def is_draining(served: Any) -> bool:
    status = await engine_status(served.server.address)
    return bool(status.status.state == pb.ENGINE_STATE_DRAINING)


async def is_idle(served: Any) -> bool:
    load = (await engine_status(served.server.address)).status.load
    return not (load.num_running or load.num_waiting)


async def has_calls(served: Any, number: int) -> bool:
    info = await served.gateway.stub.GetServerInfo(vllm_pb.GetServerInfoRequest())
    return bool(info.active_requests == number)
