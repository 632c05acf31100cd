"""The public API in front of each kind of engine, over real gRPC."""

import asyncio
import json

import grpc
import pytest

from chairlift.v1 import generation_service_pb2 as pb
from tests.hang import HANG_S
from tests.support.frontend.byte_tokenizer import END_TOKEN_ID, byte_tokenizer_files
from tests.support.frontend.foreign_answers import answer_to, logprob
from tests.support.frontend.foreign_engine import ForeignEngine

KINDS = ("vllm", "sglang", "trtllm")
TEXT = "The quick brown fox"


def params(engine):
    """The sampling parameters of the last request, under vLLM's names."""
    message = engine.requests[-1].message
    return message.sampling_config if engine.kind == "trtllm" else message.sampling_params


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens_per_chunk", [1, 7])
async def test_answer_ends_with_its_end_token(make_foreign, read, encode, kind, tokens_per_chunk):
    world = await make_foreign(ForeignEngine(kind=kind, tokens_per_chunk=tokens_per_chunk))
    expected = answer_to(encode(TEXT), 3000)
    finished = await read(world, TEXT).complete(expected)
    assert finished.reason == pb.FINISH_REASON_END_TOKEN
    assert finished.usage.num_prompt_tokens == len(TEXT)


@pytest.mark.parametrize("kind", KINDS)
async def test_answer_ends_at_max_tokens(make_foreign, read, encode, kind):
    world = await make_foreign(kind)
    expected = answer_to(encode(TEXT), 90, ignore_end=True)
    finished = await read(world, TEXT, max_tokens=90, ignore_end_token=True).complete(expected)
    assert finished.reason == pb.FINISH_REASON_MAX_TOKENS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token_window", [1, 8, 90])
async def test_answer_ends_with_the_last_token_of_its_credit(make_foreign, read, encode, kind, token_window):
    """Engines send the end in a message of its own. No credit comes for it: the answer may have no further token."""
    world = await make_foreign(kind, token_window=token_window, default_timeout_s=HANG_S)
    expected = answer_to(encode(TEXT), 90, ignore_end=True)
    finished = await read(world, TEXT, max_tokens=90, ignore_end_token=True).complete(expected)
    assert finished.reason == pb.FINISH_REASON_MAX_TOKENS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token_window", [1, 90])
async def test_answer_ends_before_the_text_of_a_stop_token(make_foreign, text_request, encode, kind, token_window):
    world = await make_foreign(kind, token_window=token_window)
    stop = answer_to(encode(TEXT), 5)[-1]
    expected = answer_to(encode(TEXT), 3000, stop_token_ids=[stop])
    output = pb.OutputOptions(text=True, token_ids=True, top_logprobs=0)
    answer = await world.stub.Generate(text_request(TEXT, stop_token_ids=[stop], output=output))
    assert (answer.finished.reason, answer.finished.stop_token_id) == (pb.FINISH_REASON_STOP_TOKEN, stop)
    assert list(answer.token_ids) == expected
    assert list(answer.logprobs.chosen) == [logprob(one) for one in expected]
    assert answer.text.encode() == b"".join(answer.logprobs.chosen_bytes[:-1])


@pytest.mark.parametrize("kind", KINDS)
async def test_answer_ends_where_the_context_does(make_foreign, read, encode, kind):
    world = await make_foreign(ForeignEngine(kind=kind, max_model_len=len(TEXT) + 8))
    # Without max_tokens, because one that does not fit is refused; 8 tokens are what is left.
    reading = read(world, TEXT, max_tokens=8, ignore_end_token=True)
    assert (await reading.complete(answer_to(encode(TEXT), 8, ignore_end=True))).reason == pb.FINISH_REASON_MAX_TOKENS


@pytest.mark.parametrize("kind", KINDS)
async def test_log_probabilities_are_those_of_the_drawn_and_of_the_best_tokens(
    make_foreign, text_request, encode, kind
):
    world = await make_foreign(kind)
    answer = await world.stub.Generate(
        text_request(
            TEXT, max_tokens=20, ignore_end_token=True, output=pb.OutputOptions(token_ids=True, top_logprobs=2)
        )
    )
    expected = answer_to(encode(TEXT), 20, ignore_end=True)
    columns = answer.answers[0].logprobs if hasattr(answer, "answers") else answer.logprobs
    assert list(columns.chosen) == [logprob(one) for one in expected]
    for position, token_id in enumerate(expected):
        known = {0, 1} if kind != "vllm" else {token_id, 0, 1}
        best = sorted((logprob(one) for one in known), reverse=True)[:2]
        assert list(columns.top_values[2 * position : 2 * position + 2]) == best


@pytest.mark.parametrize("kind", KINDS)
async def test_sampling_parameters_reach_the_engine(make_foreign, text_request, kind):
    world = await make_foreign(kind)
    request = text_request(
        TEXT,
        max_tokens=4,
        min_tokens=2,
        sampling=pb.SamplingOptions(
            temperature=0.5,
            top_p=0.75,
            top_k=9,
            min_p=0.125,
            repetition_penalty=1.25,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            seed=(1 << 40) + 5,
        ),
    )
    await world.stub.Generate(request)
    (engine,) = world.engines
    sent = params(engine)
    values = (sent.temperature, sent.top_p, sent.top_k, sent.min_p, sent.repetition_penalty)
    assert values == (0.5, 0.75, 9, 0.125, 1.25)
    assert (sent.presence_penalty, sent.frequency_penalty) == (0.5, 0.25)
    assert (engine.requests[-1].max_tokens, engine.requests[-1].min_tokens) == (4, 2)
    if kind == "vllm":
        assert sent.seed == 5  # 31 bits
    if kind == "trtllm":
        assert sent.seed == (1 << 40) + 5


@pytest.mark.parametrize("kind", KINDS)
async def test_greedy_without_limits_is_not_taken_for_unset(make_foreign, text_request, kind):
    world = await make_foreign(kind)
    await world.stub.Generate(text_request(TEXT, max_tokens=2, sampling=pb.SamplingOptions(temperature=0)))
    sent = params(world.engines[0])
    assert (sent.temperature, sent.top_p, sent.repetition_penalty) == (0, 1, 1)
    assert sent.top_k == {"vllm": 0, "sglang": -1, "trtllm": 0}[kind]
    if kind != "sglang":
        assert sent.HasField("temperature")


@pytest.mark.parametrize("kind", KINDS)
async def test_structured_output_reaches_the_engine(make_foreign, text_request, kind):
    world = await make_foreign(kind)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    for form in ({"json_schema": json.dumps(schema)}, {"regex": "[a-z]+"}):
        request = text_request(TEXT, max_tokens=2)
        request.spec.structured_output.CopyFrom(pb.StructuredOutput(**form))
        await world.stub.Generate(request)
    by_schema, by_rule = (request.message for request in world.engines[0].requests)
    if kind == "trtllm":
        guides = by_schema.guided_decoding, by_rule.guided_decoding
        assert [guide.guide_type for guide in guides] == [2, 4]
        sent, rule = guides[0].guide, guides[1].guide
    else:
        sent = by_schema.sampling_params.json_schema
        rules = by_rule.sampling_params
        rule = rules.grammar if kind == "vllm" else rules.ebnf_grammar
    assert json.loads(sent)["properties"] == schema["properties"]
    assert rule.strip() == "start: /[a-z]+/"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_logprobs", [0, 3])
async def test_an_end_that_the_engine_leaves_out_is_certain(make_foreign, text_request, encode, kind, top_logprobs):
    """As SGLang ends an answer whose grammar allows nothing else."""
    world = await make_foreign(kind)
    (engine,) = world.engines
    engine_answers = engine.answers

    def three_tokens(request, context):
        request.max_tokens = 3
        return engine_answers(request, context)

    def stopped(messages):
        for message in messages:
            if message.WhichOneof("response") == "complete":
                message.complete.finish_reason = "stop"
        return messages

    engine.answers, engine.rewrite = three_tokens, stopped
    output = pb.OutputOptions(token_ids=True, top_logprobs=top_logprobs)
    request = text_request(TEXT, max_tokens=9, output=output)
    request.spec.structured_output.regex = ".*"
    answer = await world.stub.Generate(request)
    assert list(answer.token_ids) == [*answer_to(encode(TEXT), 3, ignore_end=True), END_TOKEN_ID]
    assert answer.finished.reason == pb.FINISH_REASON_END_TOKEN
    assert answer.logprobs.chosen[3] == 0
    last = slice(3 * top_logprobs, None)
    assert answer.logprobs.top_ids[last] == [END_TOKEN_ID, 0, 1][:top_logprobs]
    assert answer.logprobs.top_values[last] == [0, -9999, -9999][:top_logprobs]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_an_engine_lacks_is_refused_by_name(make_foreign, text_request, kind):
    world = await make_foreign(kind)
    name = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}[kind]
    refused = {
        "bad_words": text_request(TEXT, sampling=pb.SamplingOptions(bad_words=["a"])),
        "allowed_token_ids": text_request(TEXT, sampling=pb.SamplingOptions(allowed_token_ids=[70])),
        "cache_salt": text_request(TEXT),
    }
    refused["cache_salt"].spec.cache_salt = "mine"
    if kind == "trtllm":
        refused["prompt_logprobs"] = text_request(TEXT, output=pb.OutputOptions(prompt_logprobs=1))
        refused["logit_bias"] = text_request(TEXT)
        refused["logit_bias"].spec.sampling.logit_bias[70] = 1.0
    for parameter, request in refused.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.stub.Generate(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"{parameter} is not supported by {name} engines" in caught.value.details()
    assert not world.engines[0].requests


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_prompt_log_probabilities(make_foreign, text_request, encode, kind):
    world = await make_foreign(kind)
    output = pb.OutputOptions(top_logprobs=1, prompt_logprobs=1)
    answer = await world.stub.Generate(text_request(TEXT, max_tokens=1, output=output))
    chosen = list(answer.prompt.logprobs.chosen)
    assert chosen[-len(TEXT) + 1 :] == [logprob(one) for one in encode(TEXT)[1:]]


@pytest.mark.parametrize("kind", KINDS)
async def test_cancelled_call_cancels_and_aborts_the_engines_request(make_foreign, read, kind):
    world = await make_foreign(ForeignEngine(kind=kind, step_interval_s=0.001))
    (engine,) = world.engines
    reading = read(world, TEXT, ignore_end_token=True)
    await world.until(lambda: len(reading.token_ids) > 3)
    reading.call.cancel()
    await engine.wait_for(lambda: engine.ended and engine.aborted)
    assert engine.ended == engine.aborted == [engine.requests[0].request_id]
    assert not reading.task.done() or reading.task.cancelled() or reading.error is None


@pytest.mark.parametrize("kind", KINDS)
async def test_deadline_of_the_call_ends_the_engines_request(make_foreign, read, kind):
    world = await make_foreign(ForeignEngine(kind=kind, step_interval_s=0.01))
    (engine,) = world.engines
    reading = read(world, TEXT, ignore_end_token=True, timeout=1.0)
    await reading.end()
    assert reading.error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await world.until(lambda: engine.ended == [request.request_id for request in engine.requests])


@pytest.mark.parametrize("kind", KINDS)
async def test_time_budget_ends_the_answer_with_its_tokens(make_foreign, read, kind):
    world = await make_foreign(ForeignEngine(kind=kind, step_interval_s=0.005))
    reading = read(world, TEXT, ignore_end_token=True, time_budget={"nanos": 300_000_000})
    await reading.end()
    assert reading.error is None
    assert reading.finished[0].reason == pb.FINISH_REASON_TIME_BUDGET
    assert reading.finished[0].usage.num_output_tokens == len(reading.token_ids)


async def test_new_requests_go_to_the_engine_with_less_work(make_foreign, read, encode):
    busy = ForeignEngine(loads={"num_running_reqs": 40, "num_waiting_reqs": 9, "num_waiting_uncached_tokens": 9000})
    world = await make_foreign(busy, "vllm")
    attachments = [connection.attachment for connection in world.app.engines._connections.values()]
    await world.until(lambda: attachments[0].session.load().num_waiting_tokens == 9000)
    for _ in range(4):
        await read(world, TEXT).complete(answer_to(encode(TEXT), 3000))
    assert (len(busy.requests), len(world.other(busy).requests)) == (0, 4)


async def test_load_and_model_are_metrics(make_foreign, scrape):
    engine = ForeignEngine(loads={"num_waiting_reqs": 3, "token_usage": 0.25})
    world = await make_foreign(engine)
    assert scrape(world.app.metrics, "chairlift:num_requests_waiting") == 3
    assert scrape(world.app.metrics, "chairlift:kv_cache_usage_perc") == 0.25
    assert scrape(world.app.metrics, "chairlift:engine_info", "engine_version") == {"1.2.3": 1}
    assert scrape(world.app.metrics, "chairlift:cache_config_info", "num_gpu_blocks") == {"2048": 1}


@pytest.mark.parametrize("kind", KINDS)
async def test_tokenizer_may_come_from_a_folder(make_foreign, read, encode, kind, tmp_path):
    for name, data in byte_tokenizer_files().items():
        (tmp_path / name).write_bytes(data)
    world = await make_foreign(ForeignEngine(kind=kind, unimplemented={"GetTokenizer"}), tokenizer=tmp_path)
    finished = await read(world, TEXT).complete(answer_to(encode(TEXT), 3000))
    assert finished.reason == pb.FINISH_REASON_END_TOKEN


async def test_many_streams_share_one_connection(make_foreign, read, encode):
    world = await make_foreign("vllm", "vllm")
    texts = [f"{TEXT} {number}" for number in range(64)]
    readings = [read(world, text, max_tokens=100) for text in texts]
    await asyncio.gather(
        *(reading.complete(answer_to(encode(text), 100)) for text, reading in zip(texts, readings, strict=True))
    )
    assert all(len(engine.requests) > 16 for engine in world.engines)
