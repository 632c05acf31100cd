"""Structured output, allowed ids and bad words through the gRPC API: the constraints that the engine gets."""

import asyncio
import json
import signal

import grpc
import pytest

from chairlift.v1 import generation_service_pb2 as pb
from frontend.text.tokenizer import Tokenizer
from tests.hang import HANG_S
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files
from tests.support.frontend.fake_engine import FakeEngine

ENDLESS = 'start: %json {"type": "integer", "multipleOf": 1000003}'


async def submitted(pair, **fields):
    await pair.stub().Generate(pb.GenerateRequest(spec=pb.GenerationSpec(**{"text": "abc", **fields})))
    return pair.engine.submissions[-1]


CONSTRAINTS = {
    "json_schema": ({"json_schema": '{"const": 1}'}, "json_schema", lambda schema: schema["const"] == 1),
    "json_object": ({"json_object": True}, "json_schema", lambda schema: schema["type"] == "object"),
    "regex": ({"regex": "a/b+"}, "lark_grammar", lambda lark: "b+" in lark),
    "choice": ({"choice": pb.Choices(texts=["a", 'b"\n'])}, "lark_grammar", lambda lark: r'"a" | "b\"\n"' in lark),
    "grammar": ({"grammar": 'start: "x"'}, "lark_grammar", lambda lark: lark == 'start: "x"'),
    "grammar in GBNF": ({"grammar": 'root ::= "x"'}, "lark_grammar", lambda lark: 'start: "x"' in lark),
}


@pytest.mark.parametrize("case", CONSTRAINTS)
async def test_each_constraint_reaches_the_engine_as_a_grammar(pair, case):
    constraint, kind, is_right = CONSTRAINTS[case]
    submission = await submitted(pair, structured_output=pb.StructuredOutput(**constraint))
    (grammar,) = json.loads(submission.grammar)["grammars"]
    assert is_right(grammar[kind])


async def test_request_without_constraint_starts_no_compiler(pair):
    submission = await submitted(pair)
    assert submission.grammar == ""
    assert not submission.sampling.allowed_token_ids
    assert not submission.sampling.bad_sequences
    assert len(pair.app.grammars._jobs) == 0


async def test_all_answers_of_a_request_have_its_grammar(pair):
    await submitted(pair, num_answers=3, structured_output=pb.StructuredOutput(json_object=True))
    assert len({submission.grammar for submission in pair.engine.submissions}) == 1
    assert len(pair.engine.submissions) == 3


async def test_allowed_ids_are_sorted_sent_and_echoed(pair):
    spec = pb.GenerationSpec(text="abc", sampling=pb.SamplingOptions(allowed_token_ids=[7, 3, 7]))
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=spec))
    assert list(pair.engine.submissions[-1].sampling.allowed_token_ids) == [3, 7]
    assert list(answer.effective_sampling.allowed_token_ids) == [3, 7]


async def test_bad_words_are_sent_as_tokens_with_and_without_space_and_echoed(pair):
    spec = pb.GenerationSpec(text="abc", sampling=pb.SamplingOptions(bad_words=["no", " no", "é"]))
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=spec))
    tokenizer = Tokenizer(byte_tokenizer_files())
    sent = [
        b"".join(map(tokenizer.token_bytes, sequence.token_ids)).decode()
        for sequence in pair.engine.submissions[-1].sampling.bad_sequences
    ]
    tokenizer.close()
    assert sent == ["no", " no", "é", " é"]
    assert list(answer.effective_sampling.bad_words) == ["no", " no", "é"]


async def test_structured_output_needs_a_tokenizer(make_pair):
    pair = await make_pair(engine=FakeEngine(files={}))
    for field, value in (
        ("structured_output", pb.StructuredOutput(json_object=True)),
        ("sampling", pb.SamplingOptions(bad_words=["x"])),
    ):
        spec = pb.GenerationSpec(token_ids=pb.TokenIds(ids=[1]), **{field: value})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.stub().Generate(pb.GenerateRequest(spec=spec))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "no tokenizer" in caught.value.details()


async def test_a_refusal_that_quotes_a_long_name_reaches_the_client(pair):
    schema = json.dumps({"properties": {"\u5b57" * 5000: {"contains": {}}}}, ensure_ascii=False)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await submitted(pair, structured_output=pb.StructuredOutput(json_schema=schema))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("json_schema cannot be served: properties.\u5b57")


async def test_other_streams_run_while_a_schema_is_compiled_up_to_its_limit(make_pair, text_request):
    """The worker is stopped meanwhile, so that it cannot be done first."""
    pair = await make_pair(grammar_timeout_s=0.4)
    await submitted(pair, structured_output=pb.StructuredOutput(json_object=True))
    (idle,) = pair.app.grammars._pool._idle
    worker = idle.process._process
    worker.send_signal(signal.SIGSTOP)
    spec = pb.GenerationSpec(text="abc", structured_output=pb.StructuredOutput(grammar=ENDLESS))
    slow = asyncio.ensure_future(pair.stub().Generate(pb.GenerateRequest(spec=spec)))
    while pair.app.grammars._pool._idle:
        await asyncio.sleep(0)
    for _ in range(3):
        texts = [message.chunk.text async for message in pair.stub().StreamGenerate(text_request("hello"))]
        assert "".join(texts) == "hello"
    assert not slow.done()
    worker.send_signal(signal.SIGCONT)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await slow
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "grammar cannot be served: compiling it takes more than 0.4 s of CPU time"
    assert len(pair.engine.submissions) == 4


async def test_request_cancelled_during_compilation_leaves_the_queue(make_pair):
    pair = await make_pair(grammar_timeout_s=0.4)
    spec = pb.GenerationSpec(text="abc", structured_output=pb.StructuredOutput(grammar=ENDLESS))
    call = pair.stub().Generate(pb.GenerateRequest(spec=spec))
    async with asyncio.timeout(HANG_S):
        while not len(pair.app.grammars._jobs):
            await asyncio.sleep(0)
    call.cancel()
    await pair.idle()
    assert not pair.engine.submissions
