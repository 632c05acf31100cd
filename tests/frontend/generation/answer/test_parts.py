"""OutputOptions.parse: what an answer says, what the model thought, which tools it calls. FakeEngine answers with the
rendered conversation, so that the test writes the answer.
"""

import json

import grpc
import openai
import pytest
import tokenizers

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.content_blocks import BlockKind, Blocks
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files
from tests.support.frontend.fake_engine import FakeEngine

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLS = "".join(f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' for city in "åb")
ANSWER = f"<think>\nHmm, é\n</think>\n\nWell:\n{CALLS}"
HERMES = "{{ messages[0].content }}{# <tool_call> </think> #}"
MISTRAL = "{{ messages[0].content }}{# [TOOL_CALLS] #}"


@pytest.fixture
def pair_of(module_pair):
    """pair_of(template) -> a pair whose model has this chat template."""

    async def make(template=HERMES, *, tokens_per_step=1):
        pair = await module_pair(template)
        pair.engine.tokens_per_step = tokens_per_step
        return pair

    return make


def spec(text=ANSWER, *, tools=(WEATHER,), stop=None, num_answers=1, **output):
    chat = pb.ChatPrompt(
        messages=[pb.ChatMessage(role="user", content=text)], tools_json=[json.dumps(tool) for tool in tools]
    )
    return pb.GenerationSpec(
        chat=chat, num_answers=num_answers, stop=stop, output=pb.OutputOptions(**{"parse": True, **output})
    )


async def generate(pair, request):
    return await pair.stub().Generate(pb.GenerateRequest(spec=request))


async def stream(pair, request):
    call = pair.stub().StreamGenerate(pb.StreamGenerateRequest(spec=request))
    return [message async for message in call]


def parts(answer):
    """Text, reasoning, and (name, arguments) of each call."""
    return answer.text, answer.reasoning, [(call.name, call.arguments_json) for call in answer.tool_calls]


@pytest.mark.parametrize("tokens_per_step", [1, 7, 20, 1000])
async def test_text_after_a_call_follows_it_in_any_batch(pair_of, tokens_per_step):
    """In APIs whose answers are lists of blocks, a call whose end came with later text was divided in two."""
    pair = await pair_of(tokens_per_step=tokens_per_step)
    blocks = Blocks(one_call=False)
    for message in await stream(pair, spec(f"<think>\nHmm\n</think>\n\nWell:\n{CALLS}\nDone.")):
        blocks.take(message.chunk)
    assert [(block.kind, block.name, block.text.strip()) for block in blocks.all] == [
        (BlockKind.REASONING, "", "Hmm"),
        (BlockKind.TEXT, "", "Well:"),
        (BlockKind.CALL, "weather", '{"city": "å"}'),
        (BlockKind.CALL, "weather", '{"city": "b"}'),
        (BlockKind.TEXT, "", "Done."),
    ]


EXPECTED = ("Well:", "Hmm, é", [("weather", '{"city": "å"}'), ("weather", '{"city": "b"}')])


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 7, 50, 1000])
async def test_every_chunking_gives_the_same_and_deltas_add_up(pair_of, tokens_per_step):
    pair = await pair_of(tokens_per_step=tokens_per_step)
    answer = await generate(pair, spec())
    assert parts(answer) == EXPECTED
    assert len({call.id for call in answer.tool_calls}) == 2
    chunks = [message.chunk for message in await stream(pair, spec()) if message.HasField("chunk")]
    assert "".join(chunk.text for chunk in chunks) == EXPECTED[0]
    assert "".join(chunk.reasoning for chunk in chunks) == EXPECTED[1]
    deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
    heads = [(delta.index, delta.name) for delta in deltas if delta.id]
    assert heads == [(0, "weather"), (1, "weather")]
    for index, (_, arguments) in enumerate(EXPECTED[2]):
        assert "".join(delta.arguments_json for delta in deltas if delta.index == index) == arguments
    num_tokens = 0
    for chunk in chunks:
        assert chunk.first_token_index == num_tokens
        num_tokens += chunk.num_tokens
    assert num_tokens == answer.finished.usage.num_output_tokens


@pytest.mark.parametrize("text", [ANSWER, "<think>never ends", "plain words", CALLS, "<tool_call>{broken", ""])
async def test_grpc_and_http_parse_an_answer_alike(pair_of, text):
    pair = await pair_of("{{ messages[0].content }}{# <tool_call> </think> #}|")
    answer = await generate(pair, spec(text))
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{pair.app.http_port}/v1", api_key="none") as client:
        over_http = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": text}], tools=[WEATHER]
        )
    message = over_http.choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert parts(answer) == (message.content or "", getattr(message, "reasoning_content", ""), calls)


async def test_without_parse_the_answer_stays_as_the_model_wrote_it(pair_of):
    pair = await pair_of()
    answer = await generate(pair, spec(parse=False))
    assert parts(answer) == (ANSWER, "", [])


async def test_without_tools_only_the_reasoning_is_taken_out(pair_of):
    pair = await pair_of()
    answer = await generate(pair, spec(tools=()))
    assert parts(answer) == (f"Well:\n{CALLS}", "Hmm, é", [])


async def test_reasoning_that_the_prompt_opened(pair_of):
    pair = await pair_of("{{ messages[0].content }}{# </think> #}<think>\n")
    answer = await generate(pair, spec("so</think>then ", tools=()))
    assert answer.reasoning == "so"
    assert answer.text.startswith("then ")


async def test_each_of_several_answers_is_parsed(pair_of):
    pair = await pair_of()
    answer = await generate(pair, spec(num_answers=3))
    assert [parts(each) for each in (answer, *answer.other_answers)] == [EXPECTED] * 3
    ids = {call.id for each in (answer, *answer.other_answers) for call in each.tool_calls}
    assert len(ids) == 6


async def test_stop_text_ends_the_answer_before_it_is_parsed(pair_of):
    pair = await pair_of()
    answer = await generate(pair, spec(stop=pb.StopOptions(stop_texts=["ll:"])))
    assert parts(answer) == ("We", "Hmm, é", [])
    assert answer.finished.stop_text == "ll:"


async def test_answer_that_ends_inside_the_reasoning_gives_all_of_it(pair_of):
    pair = await pair_of()
    answer = await generate(pair, spec(stop=pb.StopOptions(max_tokens=len("<think>\nHmm"))))
    assert parts(answer) == ("", "Hmm", [])
    assert answer.finished.reason == pb.FINISH_REASON_MAX_TOKENS


async def test_tokens_and_log_probabilities_are_those_of_the_whole_answer(pair_of):
    pair = await pair_of()
    answer = await generate(pair, spec(token_ids=True, top_logprobs=1))
    assert b"".join(answer.logprobs.chosen_bytes).decode() == ANSWER + "<|end|>"
    assert len(answer.token_ids) == len(answer.logprobs.chosen) == len(ANSWER.encode()) + 1


@pytest.mark.parametrize("tokens_per_step", [1, 1000])
@pytest.mark.parametrize("text", ["so <tool_ca", "so <tool_call>{", "so"])
async def test_incomplete_mark_of_a_call_is_text(pair_of, text, tokens_per_step):
    pair = await pair_of(tokens_per_step=tokens_per_step)
    assert parts(await generate(pair, spec(text))) == (text, "", [])


@pytest.mark.parametrize("in_call", [False, True])
async def test_text_that_spells_a_special_token_is_kept(make_pair, in_call):
    """<s> is a token of Mistral's models and a tag of HTML."""
    files = byte_tokenizer_files(MISTRAL)
    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "<s>"])
    config = {**json.loads(files["tokenizer_config.json"]), "split_special_tokens": True}  # spells them, as the model
    files = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    pair = await make_pair(engine=FakeEngine(files=files))
    struck = "<s>old</s> new <|end|>"
    text = '[TOOL_CALLS]weather[ARGS]{"city": "' + struck + '"}' if in_call else struck
    answer = await generate(pair, spec(text))
    calls = [("weather", '{"city": "' + struck + '"}')] if in_call else []
    assert parts(answer) == ("" if in_call else struck, "", calls)


def engine_of(template, *special_tokens):
    """An engine whose model has further special tokens."""
    files = byte_tokenizer_files(template)
    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    tokenizer.add_special_tokens([*special_tokens])
    return FakeEngine(files={**files, "tokenizer.json": tokenizer.to_str().encode()}, vocab_size=300)


@pytest.mark.parametrize("channel", ["analysis", "final"])
async def test_answer_continues_a_long_message_of_the_prompt(make_pair, channel):
    template = (
        "{{ messages[1].content }}"  # the answer
        "{% for m in messages %}<|start|>{{ m.role }}<|channel|>" + channel + "<|message|>{{ m.content }}{% endfor %}"
    )
    pair = await make_pair(engine=engine_of(template, "<|start|>", "<|channel|>", "<|message|>"), http=True)
    said = "assistants help you. " * 9
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}]
    body = {"model": "fake", "messages": messages, "max_tokens": len(said)}
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{pair.app.http_port}/v1", api_key="none") as client:
        answer = (await client.chat.completions.create(**body, extra_body=continued)).choices[0].message
        json_object = {"type": "json_object"}
        await client.chat.completions.create(**body, response_format=json_object, extra_body=continued)
    in_part = {"analysis": getattr(answer, "reasoning_content", ""), "final": answer.content}
    assert in_part[channel] == said
    assert "before" not in pair.engine.submissions[-1].grammar  # the message has a header


@pytest.mark.parametrize("keep_special_tokens", [False, True])
async def test_special_token_marks_are_parsed_and_other_special_tokens_hidden_by_default(
    make_pair, keep_special_tokens
):
    pair = await make_pair(engine=engine_of(MISTRAL, "[TOOL_CALLS]"))
    call = 'So. [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rom"}}]'
    answer = await generate(pair, spec(call, keep_special_tokens=keep_special_tokens))
    assert [(each.name, each.arguments_json) for each in answer.tool_calls] == [("weather", '{"city": "Rom"}')]
    plain = await generate(pair, spec("hi", tools=(), keep_special_tokens=keep_special_tokens))
    assert plain.text == ("hi<|end|>" if keep_special_tokens else "hi")


@pytest.mark.parametrize(
    ("request_", "template", "words"),
    [
        (pb.GenerationSpec(text="a", output=pb.OutputOptions(parse=True)), HERMES, "for answers to a chat"),
        (spec(tools=[{"type": "function", "function": {}}]), HERMES, "no function with a name"),
        (spec(tools=[{}]), HERMES, "no function with a name"),
        (spec(), "{{ messages[0].content }}", "no known format of tool calls"),
    ],
)
async def test_parse_is_refused_without_chat_or_with_unusable_tools(pair_of, request_, template, words):
    pair = await pair_of(template)
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await generate(pair, request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not pair.engine.submissions


async def test_parse_without_text_is_refused(pair_of):
    pair = await pair_of()
    request = spec()
    request.output.text = False
    with pytest.raises(grpc.aio.AioRpcError, match="and text is false"):
        await generate(pair, request)


async def test_tools_of_any_format_are_shown_to_the_model_without_parse(pair_of):
    pair = await pair_of()
    assert (await generate(pair, spec("hi", tools=[{"any": "thing"}], parse=False))).text == "hi"
