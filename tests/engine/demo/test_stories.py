"""The generated text: the same for a seed, well formed, and true to its characters."""

import random
import re

import pytest

from tests.support.demo_model.documents import Document, Role, document
from tests.support.demo_model.grammar import Draw, parse_template, phrases, polish, words
from tests.support.demo_model.stories import Length, Story, all_names, plots

NUM_DOCUMENTS = 400


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return [document("test", 7, index) for index in range(NUM_DOCUMENTS)]


def test_document_is_the_same_for_a_seed_and_another_for_another() -> None:
    assert document("test", 7, 3) == document("test", 7, 3)
    assert document("test", 7, 3) != document("test", 8, 3)
    assert document("test", 7, 3) != document("other", 7, 3)


def test_text_has_no_slot_bracket_or_double_space_left(documents: list[Document]) -> None:
    for text in (piece for drawn in documents for piece in drawn.spoken()):
        assert not re.search(r"[{}\[\]]|\|| {2}|(?<!=) [.,;:!?]|\n |^\s|\s$", text), text


def test_stories_end_with_punctuation_and_sentences_begin_with_capitals(documents: list[Document]) -> None:
    for text in (drawn.text for drawn in documents if drawn.text):
        assert text[-1] in '.!?"'
        assert not re.search(r"[.] [a-z]", text), text


def test_articles_fit_the_word_that_follows(documents: list[Document]) -> None:
    for text in (piece for drawn in documents for piece in drawn.spoken()):
        assert not re.search(r"\b[Aa] [aeiouAEIOU](?!ne\b|ni|se)", text), text
        assert not re.search(r"\b[Aa]n [bcdfgjklmnpqrstvwxyz]", text), text


def test_chats_alternate_and_the_assistant_speaks_last(documents: list[Document]) -> None:
    for chat in (drawn for drawn in documents if drawn.turns):
        roles = [turn.role for turn in chat.turns if turn.role is not Role.SYSTEM]
        assert roles == [Role.USER, Role.ASSISTANT] * (len(roles) // 2)


def test_kind_list_and_documents_hold_plain_texts_and_chats(documents: list[Document]) -> None:
    share = sum(1 for drawn in documents if drawn.text) / len(documents)
    assert 0.2 < share < 0.4


@pytest.mark.parametrize("length", list(Length))
def test_a_story_names_only_its_two_characters(length: Length) -> None:
    for seed in range(60):
        story = Story.begin(random.Random(seed), length)
        cast = {str(story.draw.bound["H_name"]), str(story.draw.bound["F_name"])}
        named = set(re.findall(r"\b[A-Z][a-z]+\b", story.tell())) & all_names()
        assert str(story.draw.bound["H_name"]) in named
        assert named - cast <= {"Will", "May", "Robin", "Rose", "Daisy", "Poppy", "Ivy", "Pearl", "Ruby", "Opal"}


def test_a_single_character_keeps_one_pronoun() -> None:
    checked = 0
    for seed in range(300):
        story = Story.begin(random.Random(seed), Length.SHORT)
        text = story.tell()
        if str(story.draw.bound["F_name"]) in text:
            continue
        narrated = re.sub(r'"[^"]*"', "", text)
        wrong = r"\b(he|him|his|himself)\b" if story.draw.bound["H_they"] == "she" else r"\b(she|hers?|herself)\b"
        assert not re.search(wrong, narrated), text
        checked += 1
    assert checked > 20


def test_longer_stories_have_more_words() -> None:
    means = [
        sum(len(Story.begin(random.Random(seed), length).tell().split()) for seed in range(40)) / 40
        for length in Length
    ]
    assert means[0] * 1.4 < means[1] < means[2]


def test_every_plot_tells_a_story_of_every_length() -> None:
    for plot in plots():
        for length in Length:
            story = Story.begin(random.Random(plot.name), length)
            story.plot = plot
            assert len(story.tell().split()) > 30


def test_every_phrase_parses_and_word_lists_repeat_nothing() -> None:
    for options in phrases().values():
        for option in options:
            parse_template(option)
    assert all(len(set(found)) == len(found) for found in words().values())


def test_draw_uses_a_list_up_before_it_repeats() -> None:
    draw = Draw(random.Random(0))
    size = len(words()["season"])
    assert len({draw.word("season") for _ in range(size)}) == size
    assert draw.word("season") in words()["season"]


@pytest.mark.parametrize("template", ["[a|b", "a]", "[a|[b]", "{open"])
def test_malformed_template_is_refused(template: str) -> None:
    with pytest.raises(ValueError):
        parse_template(template)


def test_polish_puts_articles_and_capitals_right() -> None:
    assert (
        polish('a owl met a honest bee. "a apple," said a fox.') == 'An owl met an honest bee. "An apple," said a fox.'
    )
