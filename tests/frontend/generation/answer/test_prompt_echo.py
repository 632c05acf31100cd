"""Echo of a prompt over gRPC: text, token ids, log-probabilities."""

import grpc
import pytest

from chairlift.v1 import generation_service_pb2 as pb
from tests.support.frontend.byte_tokenizer import VOCAB_SIZE
from tests.support.frontend.fake_engine import FakeEngine
from tests.support.frontend.fake_requests import prompt_logprob

TEXT = "é and some more: longer than what comes in one piece"
NUM_TOKENS = len(TEXT.encode())


def spec(**output):
    return pb.GenerationSpec(text=TEXT, output=pb.OutputOptions(**output), stop=pb.StopOptions(max_tokens=3))


async def generate(pair, request):
    return await pair.stub().Generate(pb.GenerateRequest(spec=request))


async def test_prompt_is_echoed_only_on_request(pair):
    assert not (await generate(pair, spec())).HasField("prompt")
    assert not pair.engine.submissions[0].HasField("prompt_logprobs")


async def test_echo_is_the_prompt_as_the_model_got_it(pair):
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
    answer = await generate(pair, pb.GenerationSpec(chat=chat, output=pb.OutputOptions(echo=True, token_ids=True)))
    assert answer.prompt.text == "<user>hi<assistant>"
    assert len(answer.prompt.token_ids) == len("<user>hi<assistant>")
    assert not answer.prompt.HasField("logprobs")


async def test_special_tokens_are_part_of_the_echo(pair):
    request = pb.GenerationSpec(token_ids=pb.TokenIds(ids=[256, 5]), output=pb.OutputOptions(echo=True))
    answer = await generate(pair, request)
    assert answer.prompt.text.startswith("<|end|>")
    assert not answer.prompt.token_ids


@pytest.mark.parametrize("width", [0, 1, 3])
async def test_every_token_but_the_first_has_its_log_probability(pair, width):
    answer = await generate(pair, spec(prompt_logprobs=width, token_ids=True))
    prompt, logprobs = answer.prompt, answer.prompt.logprobs
    assert prompt.text == ""
    assert b"".join(logprobs.chosen_bytes) == TEXT.encode()[1:]
    assert list(logprobs.chosen) == [prompt_logprob(index) for index in range(1, NUM_TOKENS)]
    assert logprobs.top_width == width
    ids = list(prompt.token_ids)
    assert list(logprobs.top_ids) == [(token_id + rank) % VOCAB_SIZE for token_id in ids[1:] for rank in range(width)]
    assert len(logprobs.top_values) == (NUM_TOKENS - 1) * width
    assert pair.engine.submissions[0].prompt_logprobs == width
    assert not answer.HasField("logprobs")


async def test_prompt_logprobs_come_with_started_once_for_all_answers(pair):
    request = spec(prompt_logprobs=2, echo=True)
    request.num_answers = 3
    call = pair.stub().StreamGenerate(pb.StreamGenerateRequest(spec=request))
    messages = [message async for message in call]
    assert messages[0].started.prompt.text == TEXT
    assert len(messages[0].started.prompt.logprobs.chosen) == NUM_TOKENS - 1
    assert [each.HasField("prompt_logprobs") for each in pair.engine.submissions] == [True, False, False]
    answer = await generate(pair, request)
    assert answer.prompt == messages[0].started.prompt


async def test_prompt_of_one_token_has_an_empty_list(pair):
    request = pb.GenerationSpec(text="a", output=pb.OutputOptions(prompt_logprobs=2))
    answer = await generate(pair, request)
    assert (answer.prompt.HasField("logprobs"), list(answer.prompt.logprobs.chosen)) == (True, [])


@pytest.mark.parametrize("output", [{"echo": True}, {"prompt_logprobs": 1}])
async def test_max_tokens_0_returns_only_the_prompt(pair, output):
    request = spec(**output)
    request.stop.max_tokens = 0
    answer = await generate(pair, request)
    assert (answer.text, answer.finished.usage.num_output_tokens) == ("", 0)
    assert answer.finished.reason == pb.FINISH_REASON_MAX_TOKENS
    assert answer.finished.usage.num_prompt_tokens == NUM_TOKENS
    assert answer.effective_stop.max_tokens == 0
    assert len(answer.prompt.logprobs.chosen) == (NUM_TOKENS - 1 if "prompt_logprobs" in output else 0)


async def test_effective_stop_options_are_returned(pair):
    stop = pb.StopOptions(
        max_tokens=9,
        min_tokens=2,
        stop_texts=["zz"],
        stop_token_ids=[4],
        include_stop_text=True,
        ignore_end_token=True,
    )
    answer = await generate(pair, pb.GenerationSpec(text="abc", stop=stop))
    assert answer.effective_stop == stop


@pytest.mark.parametrize(("max_model_len", "expected"), [(4096, 256), (100, 100 - 3)])
async def test_length_limit_in_force_is_the_one_decided(make_pair, max_model_len, expected):
    pair = await make_pair(engine=FakeEngine(max_model_len=max_model_len))
    call = pair.stub().StreamGenerate(pb.StreamGenerateRequest(spec=pb.GenerationSpec(text="abc")))
    messages = [message async for message in call]
    assert messages[0].started.effective_stop.max_tokens == expected
    assert pair.engine.submissions[0].stops.max_tokens == expected


async def test_missing_prompt_logprobs_fail_the_request(pair):
    def cut(step):
        del step.prompt_logprobs[-1:]
        return [step]

    pair.engine.rewrite_step = cut
    with pytest.raises(grpc.aio.AioRpcError, match="log-probabilities of the prompt missing") as caught:
        await generate(pair, spec(prompt_logprobs=1))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
