"""Answers of a model whose decoder drops the space at the start of a text, such as Llama 2's.

FakeEngine repeats the prompt.
"""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from tests.support.frontend.fake_engine import FakeEngine

TEMPLATE = "{{ messages[-1].content }}"


def sentencepiece_files() -> dict[str, bytes]:
    letters = ["<unk>", "<|end|>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    merges = [("▁", "o"), ("▁o", "n"), ("▁on", "e"), ("▁", "t"), ("▁t", "w"), ("▁tw", "o")]
    vocab = [*letters, *("".join(pair) for pair in merges)]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: number for number, token in enumerate(vocab)}, merges))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<|end|>"])
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


@pytest.fixture
async def client(make_pair, connect):
    return connect(await make_pair(engine=FakeEngine(files=sentencepiece_files()), http=True))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_ids", [False, True])
async def test_answer_keeps_the_space_behind_its_prompt(client, by_ids, stream):
    prompt = "one two"
    if by_ids:
        prompt = tokenizers.Tokenizer.from_str(sentencepiece_files()["tokenizer.json"].decode()).encode(prompt).ids
    answer = await client.completions.create(model="fake", prompt=prompt, n=2, stream=stream)
    events = [event async for event in answer] if stream else [answer]
    for index in range(2):
        texts = [choice.text for event in events for choice in event.choices if choice.index == index]
        assert "".join(texts) == " one two"


async def test_log_probabilities_have_the_places_of_their_tokens_in_the_text(client):
    answer = await client.completions.create(model="fake", prompt="one two", echo=True, logprobs=0)
    (choice,) = answer.choices
    assert choice.text == "one two one two"
    columns = choice.logprobs
    for token, offset in zip(columns.tokens[1:], columns.text_offset[1:], strict=True):
        if token != "<|end|>":
            assert choice.text.startswith(token, offset), (token, offset)


async def test_answer_to_a_conversation_starts_without_a_space_unless_it_continues_one(client):
    messages = [{"role": "assistant", "content": "one two"}]
    for continues, text in ((False, "one two"), (True, " one two")):
        answer = await client.chat.completions.create(
            model="fake", messages=messages, extra_body={"continue_final_message": continues}
        )
        assert answer.choices[0].message.content == text


async def test_constrained_answer_to_a_conversation_has_the_text_that_its_constraint_has_seen(client):
    answer = await client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "one two"}],
        extra_body={"structured_outputs": {"regex": "[ a-z]{8}"}},
    )
    assert answer.choices[0].message.content == " one two"
