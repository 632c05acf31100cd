"""The public service over a real channel, with FakeEngine behind it."""

import asyncio

import grpc
import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files
from tests.support.frontend.fake_engine import FakeEngine, rejection

TEXT = "héllo wörld, 雪だるま ☃"


async def collect(call):
    return [message async for message in call]


async def test_stream_is_started_then_chunks_then_one_finished(pair, text_request):
    messages = await collect(pair.stub().StreamGenerate(text_request(TEXT)))
    events = [message.WhichOneof("event") for message in messages]
    assert events[0] == "started"
    assert events[-1] == "finished"
    assert set(events[1:-1]) == {"chunk"}
    assert "".join(message.chunk.text for message in messages) == TEXT
    started, finished = messages[0].started, messages[-1].finished
    num_bytes = len(TEXT.encode())
    assert started.num_prompt_tokens == num_bytes
    assert started.model == "fake"
    assert len(started.request_id) == 32
    assert finished.reason == pb.FINISH_REASON_END_TOKEN
    assert finished.usage == pb.Usage(num_prompt_tokens=num_bytes, num_cached_tokens=1, num_output_tokens=num_bytes + 1)


async def test_chunks_leave_no_gap(pair, text_request):
    messages = await collect(pair.stub().StreamGenerate(text_request("x" * 300, max_tokens=500)))
    next_index = 0
    for chunk in (message.chunk for message in messages[1:-1]):
        assert chunk.first_token_index == next_index
        next_index += chunk.num_tokens
    assert next_index == 301


async def test_buffered_tokens_go_out_as_one_chunk(pair, text_request):
    pair.engine.pause()
    call = pair.stub().StreamGenerate(text_request("abcdefgh"))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    await pair.engine.step()
    assert (await call.read()).HasField("started")
    assert (await call.read()).chunk.text == "a"  # the first token does not wait for a second one
    for _ in range(3):  # one turn of the event loop has room for no sender between these
        pair.session.on_step(next_step(pair))
    chunk = (await call.read()).chunk
    assert (chunk.text, chunk.num_tokens) == ("bcd", 3)
    call.cancel()


def next_step(pair):
    (session,) = pair.engine._sessions
    return pair.engine._step_of(session)


async def test_unary_answer_equals_streamed_answer(pair, text_request):
    request = text_request(TEXT, sampling=pb.SamplingOptions(seed=5), output=pb.OutputOptions(token_ids=True))
    messages = await collect(pair.stub().StreamGenerate(request))
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=request.spec))
    assert answer.text == "".join(message.chunk.text for message in messages)
    assert list(answer.token_ids) == [i for message in messages for i in message.chunk.token_ids]
    assert answer.finished.usage == messages[-1].finished.usage
    assert answer.finished.reason == messages[-1].finished.reason
    assert answer.effective_sampling == messages[0].started.effective_sampling
    assert (answer.model, len(answer.request_id)) == ("fake", 32)


async def test_token_ids_in_and_out(pair):
    spec = pb.GenerationSpec(
        token_ids=pb.TokenIds(ids=[5, 6, 7]), output=pb.OutputOptions(text=False, token_ids=True), request_id="mine"
    )
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=spec))
    assert (answer.text, list(answer.token_ids), answer.request_id) == ("", [5, 6, 7, 256], "mine")


async def test_chat_is_rendered_with_the_models_template(pair):
    messages = [pb.ChatMessage(role="system", content="be"), pb.ChatMessage(role="user", content="hi")]
    answer = await pair.stub().Generate(
        pb.GenerateRequest(spec=pb.GenerationSpec(chat=pb.ChatPrompt(messages=messages)))
    )
    assert answer.text == "<system>be<user>hi<assistant>"


async def test_sampling_reaches_the_engine_and_is_echoed(pair, text_request):
    sampling = pb.SamplingOptions(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        seed=2**64 - 1,
        logit_bias={3: -100.0, 1: 2.0},
    )
    messages = await collect(pair.stub().StreamGenerate(text_request("a", sampling=sampling)))
    assert messages[0].started.effective_sampling == sampling
    sent = pair.engine.submissions[0].sampling
    assert (sent.temperature, sent.top_p, sent.top_k, sent.min_p) == (0.5, 0.25, 7, 0.125)
    assert (sent.repetition_penalty, sent.presence_penalty, sent.frequency_penalty) == (1.5, -1.0, 2.0)
    assert (sent.seed, list(sent.bias_ids), list(sent.bias_values)) == (2**64 - 1, [1, 3], [2.0, -100.0])


async def test_seed_is_drawn_when_absent_and_echoed(pair, text_request):
    seeds = set()
    for _ in range(2):
        messages = await collect(pair.stub().StreamGenerate(text_request("a")))
        seeds.add(messages[0].started.effective_sampling.seed)
    assert seeds == {submission.sampling.seed for submission in pair.engine.submissions}
    assert len(seeds) == 2


async def test_stop_options_reach_the_engine(pair):
    spec = pb.GenerationSpec(
        text="abc",
        stop=pb.StopOptions(max_tokens=9, min_tokens=2, stop_token_ids=[4, 200], ignore_end_token=True),
        priority=-3,
        cache_salt="täg",
    )
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=spec))
    sent = pair.engine.submissions[0]
    assert (sent.stops.max_tokens, sent.stops.min_tokens) == (9, 2)
    assert (list(sent.stops.stop_token_ids), sent.stops.ignore_end_token) == ([4, 200], True)
    assert (sent.priority, sent.cache_salt) == (-3, "täg".encode())
    assert answer.finished.reason == pb.FINISH_REASON_MAX_TOKENS
    assert answer.text == "abcabca"  # two rounds; the end tokens between them have no text


async def test_stop_token_is_counted_but_is_no_text(pair):
    ids = (await pair.stub().CountTokens(pb.CountTokensRequest(text="abc", return_token_ids=True))).token_ids
    spec = pb.GenerationSpec(text="abc", stop=pb.StopOptions(stop_token_ids=[ids[1]]))
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=spec))
    assert (answer.text, answer.finished.usage.num_output_tokens) == ("a", 2)
    assert answer.finished.reason == pb.FINISH_REASON_STOP_TOKEN
    assert answer.finished.stop_token_id == ids[1]


async def test_end_token_is_text_only_on_request(pair):
    spec = pb.GenerationSpec(text="abc", output=pb.OutputOptions(keep_special_tokens=True))
    assert (await pair.stub().Generate(pb.GenerateRequest(spec=spec))).text == "abc<|end|>"


@pytest.mark.parametrize(("include", "text"), [(False, "one t"), (True, "one two th")])
async def test_stop_text_ends_the_answer_and_cancels_in_the_engine(pair, include, text):
    stop = pb.StopOptions(stop_texts=["wo th", "zzz"], include_stop_text=include, max_tokens=2000)
    spec = pb.GenerationSpec(text="one two three", stop=stop)
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=spec))
    assert answer.text == text
    assert answer.finished.reason == pb.FINISH_REASON_STOP_TEXT
    assert answer.finished.stop_text == "wo th"
    assert answer.finished.usage.num_output_tokens == len("one two th")
    await pair.idle()


async def test_stop_text_cancels_with_its_reason_when_the_engine_would_go_on(make_pair, text_request):
    pair = await make_pair()
    pair.engine.pause()
    call = pair.stub().StreamGenerate(text_request("abcdef", stop_texts=["bc"]))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    for _ in range(3):
        await pair.engine.step()
    messages = await collect(call)  # finished at once: the engine has not confirmed anything
    assert messages[-1].finished.stop_text == "bc"
    assert "".join(message.chunk.text for message in messages) == "a"
    await pair.engine.wait_for(lambda: len(pair.engine.cancels) == 1)
    assert pair.engine.cancels[0][1] == 2  # CANCEL_REASON_STOP_TEXT


async def test_stop_text_counts_only_tokens_up_to_the_match(make_pair):
    pair = await make_pair(engine=FakeEngine(tokens_per_step=8))
    spec = pb.GenerationSpec(
        text="abcdefgh",
        stop=pb.StopOptions(stop_texts=["c"]),
        output=pb.OutputOptions(token_ids=True, top_logprobs=2),
    )
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=spec))
    assert (answer.text, answer.finished.usage.num_output_tokens) == ("ab", 3)
    assert len(answer.token_ids) == len(answer.logprobs.chosen) == len(answer.logprobs.chosen_bytes) == 3
    assert len(answer.logprobs.top_ids) == len(answer.logprobs.top_values) == 6


async def test_logprobs_are_columns_over_the_answers_tokens(pair):
    spec = pb.GenerationSpec(text="hé", output=pb.OutputOptions(token_ids=True, top_logprobs=2))
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=spec))
    logprobs, ids = answer.logprobs, list(answer.token_ids)
    assert list(logprobs.chosen) == [-0.5] * 4
    assert logprobs.top_width == 2
    assert list(logprobs.top_ids) == [i + rank for i in ids for rank in (0, 1)]
    assert list(logprobs.top_values) == [-0.5, -1.5] * 4
    assert b"".join(logprobs.chosen_bytes[:3]) == "hé".encode()  # single bytes of a character


async def test_max_tokens_defaults_to_what_fits(make_pair):
    pair = await make_pair(engine=FakeEngine(max_model_len=300))
    for length, expected in ((10, 256), (100, 200), (299, 1)):
        await pair.stub().Generate(pb.GenerateRequest(spec=pb.GenerationSpec(text="x" * length)))
        assert pair.engine.submissions[-1].stops.max_tokens == expected


GENERATION_CONFIG = b'{"temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}'


async def test_defaults_of_generation_config_apply_where_the_request_is_silent(make_pair, text_request):
    files = {**byte_tokenizer_files(), "generation_config.json": GENERATION_CONFIG}
    pair = await make_pair(engine=FakeEngine(files=files))
    model = await pair.stub().GetModel(pb.GetModelRequest())
    assert model.default_sampling == pb.SamplingOptions(
        temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, repetition_penalty=1.5
    )
    own = pb.SamplingOptions(temperature=0, top_k=0, repetition_penalty=1)
    await collect(pair.stub().StreamGenerate(text_request("a", sampling=own)))
    await collect(pair.stub().StreamGenerate(text_request("a")))
    sampling = [submission.sampling for submission in pair.engine.submissions]
    assert [(s.temperature, s.top_k, s.top_p) for s in sampling] == [(0, 0, 0.75), (0.5, 3, 0.75)]
    assert [(s.min_p, s.repetition_penalty) for s in sampling] == [(0.25, 1), (0.25, 1.5)]


async def test_count_tokens(pair):
    stub = pair.stub()
    assert await stub.CountTokens(pb.CountTokensRequest(text="héllo")) == pb.CountTokensResponse(num_tokens=6)
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
    counted = await stub.CountTokens(pb.CountTokensRequest(chat=chat, return_token_ids=True))
    assert counted.num_tokens == len(counted.token_ids) == len("<user>hi<assistant>")


async def test_get_model(pair):
    model = await pair.stub().GetModel(pb.GetModelRequest(model="fake"))
    assert (model.model, model.max_model_len, model.vocab_size, list(model.end_token_ids)) == ("fake", 4096, 258, [256])
    assert model.has_chat_template
    assert model.tokenizer_sha256 == pair.engine.sha256.hex()


async def test_get_model_names_the_aliases(make_pair):
    pair = await make_pair(engine=FakeEngine(aliases=["a", "b"]))
    for name in ("", "fake", "b"):
        model = await pair.stub().GetModel(pb.GetModelRequest(model=name))
        assert (model.model, list(model.aliases)) == ("fake", ["a", "b"])


async def test_many_streams_at_once_each_get_their_own_text(pair, text_request):
    stub = pair.stub()

    async def one(number):
        text = f"<{number}>" * (1 + number % 7)
        messages = await collect(stub.StreamGenerate(text_request(text)))
        return "".join(message.chunk.text for message in messages) == text

    assert all(await asyncio.gather(*(one(number) for number in range(200))))


async def test_no_metadata_is_sent_before_the_first_token(pair, text_request):
    pair.engine.pause()
    call = pair.stub().StreamGenerate(text_request("abc"))
    metadata = asyncio.ensure_future(call.initial_metadata())
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    done, _ = await asyncio.wait([metadata], timeout=0.2)
    assert not done
    pair.engine.resume()
    await metadata
    await collect(call)


async def test_refusals_before_the_first_token_are_retried_by_grpc_itself(make_pair, text_request):
    pair = await make_pair()
    draining = rejection(engine_pb.REJECTION_REASON_DRAINING, "stopping", retry_after_s=0)  # sent as pushback
    pair.engine.rejections = [draining, draining]
    policy = """{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 4, "initialBackoff": "30s",
        "maxBackoff": "30s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}"""
    stub = pair.stub(("grpc.service_config", policy))
    messages = await collect(stub.StreamGenerate(text_request("abc"), timeout=20))
    assert messages[-1].HasField("finished")
    assert len(pair.engine.submissions) == 3


async def test_no_answer_of_any_method_is_unknown_when_the_service_is_broken(pair, text_request, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("frontend.request.convert.named_model", broken)
    stub = pair.stub()
    spec = text_request("a").spec
    calls = [
        stub.Generate(pb.GenerateRequest(spec=spec)),
        stub.CountTokens(pb.CountTokensRequest(text="a")),
        stub.GetModel(pb.GetModelRequest()),
        collect(stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec))),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in caught.value.details()
