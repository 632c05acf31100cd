"""Log-probabilities of prompts over HTTP: as lm-evaluation-harness reads them, and as vLLM's clients do."""

import json
import threading

import aiohttp
import openai
import pytest
import tokenizers

from frontend.api.openai import choices_builder
from frontend.api.openai import completion_response as completions
from frontend.generation import generation
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files
from tests.support.frontend.fake_engine import FakeEngine
from tests.support.frontend.fake_requests import prompt_logprob

TEXT = "né 雪, scored"
BYTES = TEXT.encode()
SCORES = [None] + [prompt_logprob(index) for index in range(1, len(BYTES))]
OFFSETS = [len(BYTES[:index].decode(errors="ignore")) for index in range(len(BYTES))]


async def columns_of(answer, *, stream):
    """All columns of a completion's first choice, and its text."""
    columns, text = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}, ""
    for event in [event async for event in answer] if stream else [answer]:
        (choice,) = event.choices
        text += choice.text
        if choice.logprobs is not None:
            for name, values in columns.items():
                values.extend(getattr(choice.logprobs, name))
    return columns, text


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_scores_the_prompt_too(shared_client, shared_pair, stream):
    answer = await shared_client.completions.create(
        model="fake", prompt=TEXT, echo=True, logprobs=2, max_tokens=2, stream=stream
    )
    columns, text = await columns_of(answer, stream=stream)
    assert text == TEXT + "n\ufffd"  # the second token is half a character
    assert columns["token_logprobs"] == [*SCORES, -0.5, -0.5]
    assert columns["text_offset"] == [*OFFSETS, len(TEXT), len(TEXT) + 1]
    assert columns["top_logprobs"][0] is None
    assert [max(top.values()) for top in columns["top_logprobs"][1:]] == columns["token_logprobs"][1:]
    assert {len(columns[name]) for name in columns} == {len(BYTES) + 2}
    assert columns["tokens"][0] == "n"
    assert shared_pair.engine.submissions[0].prompt_logprobs == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_0_scores_without_generating(shared_client, stream):
    answer = await shared_client.completions.create(
        model="fake",
        prompt=TEXT,
        echo=True,
        logprobs=1,
        max_tokens=0,
        stream=stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    if stream:
        *events, last = [event async for event in answer]
        assert "".join(event.choices[0].text for event in events) == TEXT
        assert events[-1].choices[0].finish_reason == "length"
        usage = last.usage
    else:
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "length")
        assert answer.choices[0].logprobs.token_logprobs == SCORES
        usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(BYTES), 0)


async def test_without_alternatives_there_are_only_scores(shared_client):
    answer = await shared_client.completions.create(model="fake", prompt="abc", echo=True, logprobs=0, max_tokens=0)
    logprobs = answer.choices[0].logprobs
    assert (logprobs.token_logprobs, logprobs.top_logprobs) == ([None, -0.25, -0.5], None)


async def test_every_choice_of_every_prompt_is_scored(shared_client):
    answer = await shared_client.completions.create(
        model="fake", prompt=[[97, 98], [1, 2, 3]], n=2, echo=True, logprobs=1, max_tokens=1
    )
    scores = [choice.logprobs.token_logprobs for choice in answer.choices]
    assert scores == [[None, -0.25, -0.5]] * 2 + [[None, -0.25, -0.5, -0.5]] * 2


def files_with_bos():
    """The byte tokenizer, with a token put before every prompt."""
    files = byte_tokenizer_files()
    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 256)]
    )
    return {**files, "tokenizer.json": tokenizer.to_str().encode()}


async def test_token_added_before_the_prompt_has_no_width_in_its_text(make_pair, connect):
    client = connect(await make_pair(engine=FakeEngine(files=files_with_bos()), http=True))
    answer = await client.completions.create(model="fake", prompt="abc", echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer.choices
    assert (choice.text, choice.logprobs.tokens) == ("abc", ["<|end|>", "a", "b", "c"])
    assert choice.logprobs.text_offset == [0, 0, 1, 2]


async def test_harness_reads_its_loglikelihood_off_the_answer(shared_client):
    """What lm-evaluation-harness does in LocalCompletionsAPI.parse_logprobs, with one token generated."""
    context = 4
    out = await shared_client.post(
        "/completions",
        body={"model": "fake", "prompt": [list(range(9))], "temperature": 0, "max_tokens": 1, "logprobs": 1}
        | {"seed": 1234, "echo": True},
        cast_to=object,
    )
    (choice,) = out["choices"]
    scores = choice["logprobs"]["token_logprobs"][context:-1]
    tops = choice["logprobs"]["top_logprobs"][context:-1]
    assert sum(scores) == sum(prompt_logprob(index) for index in range(context, 9))
    assert all(score == max(top.values()) for score, top in zip(scores, tops, strict=True))


VLLM = {"prompt_logprobs": 2, "return_token_ids": True}


async def test_prompt_logprobs_are_those_of_vllm_for_completions(shared_client):
    answer = await shared_client.completions.create(model="fake", prompt=[7, 9, 11], max_tokens=1, extra_body=VLLM)
    (choice,) = answer.choices
    first, second, third = choice.prompt_logprobs
    assert first is None
    assert [list(second), list(third)] == [["9", "10"], ["11", "12"]]
    assert (second["9"]["logprob"], second["9"]["rank"]) == (-0.25, 1)
    assert (second["10"]["logprob"], second["10"]["rank"]) == (-1.25, 2)
    assert isinstance(second["9"]["decoded_token"], str)
    assert (choice.prompt_token_ids, choice.token_ids) == ([7, 9, 11], [7])
    assert choice.logprobs is None


async def test_prompt_logprobs_are_those_of_vllm_for_chat(shared_client):
    answer = await shared_client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=1, extra_body=VLLM
    )
    (first, *others), (_, *ids) = answer.prompt_logprobs, answer.prompt_token_ids
    text = "".join(row[str(token_id)]["decoded_token"] for row, token_id in zip(others, ids, strict=True))
    assert (first, text) == (None, "user>hi<assistant>")


async def test_token_outside_of_the_best_has_no_rank(http_pair, client):
    def worse(step):
        for prompt in step.prompt_logprobs:
            prompt.top_ids[:] = [3] * len(prompt.top_ids)
        return [step]

    http_pair.engine.rewrite_step = worse
    body = {"prompt_logprobs": 1}
    answer = await client.completions.create(model="fake", prompt=[7, 9], max_tokens=0, extra_body=body)
    own, best = answer.choices[0].prompt_logprobs[1].values()
    assert (own["rank"], best["rank"]) == (None, 1)


async def test_prompts_token_ids_come_with_the_first_event(shared_client):
    stream = await shared_client.completions.create(
        model="fake", prompt=[7, 9], stream=True, extra_body={"return_token_ids": True}
    )
    first, *others = [event async for event in stream]
    assert (first.choices[0].prompt_token_ids, first.choices[0].text) == ([7, 9], "")
    assert [token_id for event in others for token_id in getattr(event.choices[0], "token_ids", [])] == [7, 9, 256]
    messages = [{"role": "user", "content": "hi"}]
    chat = await shared_client.chat.completions.create(
        model="fake", messages=messages, stream=True, extra_body={"return_token_ids": True}
    )
    first, *others = [event async for event in chat]
    assert len(first.prompt_token_ids) == len("<user>hi<assistant>")
    assert not any(hasattr(event, "prompt_token_ids") for event in others)


async def test_large_answer_is_the_same_json_as_a_small_one(shared_client, shared_pair):
    """It is put together in pieces; the pieces are one JSON text."""
    body = {"model": "fake", "prompt": ['"quoted" \\ é', "b"], "max_tokens": 1, "echo": True, "logprobs": 1}
    response = await shared_client.completions.with_raw_response.create(**body, extra_body={"prompt_logprobs": 1})
    parsed = json.loads(response.text)
    assert json.dumps(parsed, ensure_ascii=False, separators=(",", ":")) == response.text
    assert parsed["choices"][0]["text"] == '"quoted" \\ é"'


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_logprobs_are_built_in_a_thread(shared_client, monkeypatch, stream):
    threads = []

    def noted(make):
        return lambda *args, **options: threads.append(threading.current_thread()) or make(*args, **options)

    monkeypatch.setattr(completions, "echo_logprobs", noted(completions.echo_logprobs))
    monkeypatch.setattr(generation, "PromptEcho", noted(generation.PromptEcho))
    answer = await shared_client.completions.create(
        model="fake", prompt=TEXT, echo=True, logprobs=1, max_tokens=1, stream=stream
    )
    await columns_of(answer, stream=stream)
    assert len(threads) == 2
    assert threading.main_thread() not in threads


async def test_too_many_prompt_logprobs_for_one_call_are_refused(shared_client, monkeypatch):
    monkeypatch.setattr(completions, "MAX_CALL_PROMPT_LOGPROBS", 20)
    body = {"model": "fake", "echo": True, "logprobs": 1, "max_tokens": 1}
    await shared_client.completions.create(prompt=["abcdef", "abcdef"], **body)
    with pytest.raises(openai.BadRequestError, match="more than 20 log-probabilities") as caught:
        await shared_client.completions.create(prompt=["abcdef", "abcdef"], n=2, **body)
    assert caught.value.param == "prompt"


CHAT = "<u>h<assistant>"
REPEATED = [
    ("completions", {"prompt": [7] * 5, "echo": True}, "echo", 2 * 5, 2 * 5),
    ("completions", {"prompt": [7] * 5, "return_token_ids": True}, "return_token_ids", 2 * 5, 2 * 5),
    (
        *("chat/completions", {"messages": [{"role": "u", "content": "h"}], "return_token_ids": True}),
        *("return_token_ids", len(CHAT), 2 * len(CHAT)),  # one response object has the prompt of a chat once
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param", "whole", "streamed"), REPEATED)
async def test_what_all_choices_repeat_of_prompts_is_limited(
    shared_pair, monkeypatch, path, body, param, whole, streamed, stream
):
    num_repeated = streamed if stream else whole
    url = f"http://127.0.0.1:{shared_pair.app.http_port}/v1/{path}"
    async with aiohttp.ClientSession() as http:
        for most, status in ((num_repeated, 200), (num_repeated - 1, 400)):
            monkeypatch.setattr(choices_builder, "MAX_ECHO_BYTES", most)
            async with http.post(url, json={"n": 2, "max_tokens": 1, "stream": stream, **body}) as answer:
                assert answer.status == status
                text = await answer.text()
    error = json.loads(text)["error"]
    assert error["param"] == param
    assert f"at most {most} are sent" in error["message"]


BAD = [
    ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
    ({"prompt_logprobs": "two"}, "integer"),
    ({"prompt_logprobs": 1, "stream": True}, "not streamed"),
    ({"max_tokens": 0}, "max_tokens is 0"),
]


@pytest.mark.parametrize(("body", "words"), BAD)
async def test_bad_parameter_of_chat_is_named(shared_client, body, words):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await shared_client.post(
            "/chat/completions", body={"messages": [{"role": "user", "content": "hi"}], **body}, cast_to=object
        )
    assert caught.value.param == next(iter(body))
