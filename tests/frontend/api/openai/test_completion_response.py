"""/v1/completions through OpenAI's own client, with FakeEngine behind it: it answers a prompt with the prompt."""

import asyncio

import openai
import pytest

TEXT = "héllo wörld, 雪だるま ☃"
NUM_BYTES = len(TEXT.encode())


async def collect(stream):
    return [event async for event in stream]


async def test_answer_has_text_reason_and_usage(shared_client):
    answer = await shared_client.completions.create(model="fake", prompt=TEXT, max_tokens=100)
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, TEXT, "stop", None)
    assert (answer.object, answer.model) == ("text_completion", "fake")
    assert answer.id.startswith("cmpl-")
    assert answer._request_id == answer.id
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (NUM_BYTES, NUM_BYTES + 1)
    assert usage.total_tokens == 2 * NUM_BYTES + 1
    assert usage.prompt_tokens_details.cached_tokens == 1
    assert usage.completion_tokens_details is None, "reasoning is not parsed"


async def test_max_tokens_is_16_by_default_and_ends_with_length(shared_client):
    answer = await shared_client.completions.create(model="fake", prompt="x" * 40)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("x" * 16, "length")
    assert answer.usage.completion_tokens == 16


async def test_streamed_text_adds_up_to_the_answer(shared_client):
    events = await collect(
        await shared_client.completions.create(model="fake", prompt=TEXT, max_tokens=100, stream=True)
    )
    assert "".join(event.choices[0].text for event in events) == TEXT
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert len({event.id for event in events}) == 1
    assert all(event.usage is None for event in events)


async def test_usage_is_the_last_event_on_request(shared_client):
    stream = await shared_client.completions.create(
        model="fake", prompt=TEXT, max_tokens=100, stream=True, stream_options={"include_usage": True}
    )
    *events, last = await collect(stream)
    assert all(event.usage is None for event in events)
    assert (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens) == ([], NUM_BYTES, NUM_BYTES + 1)


async def test_usage_is_in_every_event_on_request(shared_client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await shared_client.completions.create(
        model="fake", prompt="abcdef", max_tokens=100, stream=True, stream_options=options
    )
    counts = [event.usage.completion_tokens for event in await collect(stream)]
    assert counts == sorted(counts)
    assert (counts[0] >= 1, counts[-1]) == (True, 7)


async def test_every_prompt_of_a_list_has_a_choice(shared_client):
    prompts = ["one", "twenty", "three"]
    answer = await shared_client.completions.create(model="fake", prompt=prompts)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(prompts))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (14, 17)


async def test_prompts_of_a_list_are_streamed_by_index(shared_client):
    prompts = [f"{number}" * (number + 1) for number in range(9)]
    stream = await shared_client.completions.create(
        model="fake", prompt=prompts, stream=True, stream_options={"include_usage": True}
    )
    *events, last = await collect(stream)
    texts = dict.fromkeys(range(9), "")
    ended = []
    for event in events:
        texts[event.choices[0].index] += event.choices[0].text
        ended += [event.choices[0].index] if event.choices[0].finish_reason else []
    assert list(texts.values()) == prompts
    assert sorted(ended) == list(range(9))
    assert last.usage.prompt_tokens == sum(map(len, prompts))


async def test_token_ids_are_a_prompt_and_are_returned(shared_client):
    answer = await shared_client.completions.create(
        model="fake", prompt=[5, 6, 7], extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].token_ids == [5, 6, 7, 256]
    two = await shared_client.completions.create(
        model="fake", prompt=[[5], [7, 8]], extra_body={"return_token_ids": True}
    )
    assert [choice.token_ids for choice in two.choices] == [[5, 256], [7, 8, 256]]


@pytest.mark.parametrize("stream", [False, True])
async def test_n_answers_each_have_a_choice(shared_client, stream):
    answer = await shared_client.completions.create(model="fake", prompt=["ab", "c"], n=3, stream=stream)
    texts = [""] * 6
    for event in await collect(answer) if stream else [answer]:
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == ["ab", "ab", "ab", "c", "c", "c"]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_text_ends_the_answer_and_is_named(shared_client, stream):
    answer = await shared_client.completions.create(
        model="fake", prompt="one two three", stop=["tw", "zz"], stream=stream
    )
    events = await collect(answer) if stream else [answer]
    assert "".join(event.choices[0].text for event in events) == "one "
    assert (events[-1].choices[0].finish_reason, events[-1].choices[0].stop_reason) == ("stop", "tw")


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_the_answer(shared_client, stream):
    answer = await shared_client.completions.create(model="fake", prompt=["abc", "d"], n=2, echo=True, stream=stream)
    texts = [""] * 4
    for event in await collect(answer) if stream else [answer]:
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == ["abcabc", "abcabc", "dd", "dd"]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_columns(shared_client, shared_pair, stream):
    answer = await shared_client.completions.create(model="fake", prompt="ab", logprobs=2, stream=stream)
    columns = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in await collect(answer) if stream else [answer]:
        if event.choices[0].logprobs is not None:
            for name, values in columns.items():
                values.extend(getattr(event.choices[0].logprobs, name))
    assert columns["tokens"] == ["a", "b", "<|end|>"]
    assert columns["token_logprobs"] == [-0.5] * 3
    assert columns["text_offset"] == [0, 1, 2]
    assert [top[token] for top, token in zip(columns["top_logprobs"], columns["tokens"], strict=True)] == [-0.5] * 3
    assert [len(top) for top in columns["top_logprobs"]] == [2, 2, 2]
    assert shared_pair.engine.submissions[0].top_logprobs == 2


async def test_logprobs_0_requests_no_alternatives(shared_client):
    answer = await shared_client.completions.create(model="fake", prompt="ab", logprobs=0)
    assert (answer.choices[0].logprobs.token_logprobs, answer.choices[0].logprobs.top_logprobs) == ([-0.5] * 3, None)


async def test_parameters_reach_the_engine(shared_client, shared_pair):
    await shared_client.completions.create(
        model="fake",
        prompt="a",
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        presence_penalty=-1,
        frequency_penalty=2.0,
        seed=-2,
        logit_bias={"3": -100, "1": 2},
        extra_body={
            "top_k": 7,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "stop_token_ids": [4, 200],
            "ignore_eos": True,
            "priority": -3,
            "cache_salt": "täg",
        },
    )
    sent = shared_pair.engine.submissions[0]
    sampling = sent.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.125)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1.0, 2.0)
    assert (sampling.seed, list(sampling.bias_ids), list(sampling.bias_values)) == (2**64 - 2, [1, 3], [2.0, -100.0])
    assert (sent.stops.max_tokens, sent.stops.min_tokens) == (9, 2)
    assert (list(sent.stops.stop_token_ids), sent.stops.ignore_end_token) == ([4, 200], True)
    assert (sent.priority, sent.cache_salt) == (-3, "täg".encode())


async def test_top_k_minus_1_is_all(shared_client, shared_pair):
    await shared_client.completions.create(model="fake", prompt="a", extra_body={"top_k": -1})
    assert shared_pair.engine.submissions[0].sampling.top_k == 0


async def test_request_id_of_the_client_is_returned(shared_client):
    answer = await shared_client.completions.create(model="fake", prompt="a", extra_headers={"x-request-id": "mine"})
    assert answer.id == answer._request_id == "cmpl-mine"


async def test_many_streams_at_once_each_get_their_own_text(shared_client):
    async def one(number):
        text = f"<{number}>" * (1 + number % 5)
        stream = await shared_client.completions.create(model="fake", prompt=text, max_tokens=99, stream=True)
        return "".join(event.choices[0].text for event in await collect(stream)) == text

    assert all(await asyncio.gather(*(one(number) for number in range(100))))


def test_blocking_client_gets_answers_and_streams(blocking_client):
    assert blocking_client.completions.create(model="fake", prompt="abc").choices[0].text == "abc"
    stream = blocking_client.completions.create(model="fake", prompt="abc", stream=True)
    assert "".join(event.choices[0].text for event in stream) == "abc"
    with pytest.raises(openai.BadRequestError):
        blocking_client.completions.create(model="fake", prompt="")
