import numpy as np
import pytest

from loadgen.errors import TargetError
from loadgen.prompts.text import TextMeasure, TextPromptMaker, measure_text
from loadgen.prompts.words import COMMON_WORDS
from loadgen.trace.schema import Accounting, Blocks, Trace


class FakeTokenizer:
    """Counts as a server would: some words are several tokens, every prompt has some more."""

    def __init__(self, long_words: dict[str, int], overhead: int) -> None:
        self.long_words, self.overhead, self.calls, self.longest = long_words, overhead, 0, 0

    async def count(self, text: str) -> int:
        self.calls += 1
        self.longest = max(self.longest, len(text.split(" ")))
        return self.overhead + sum(self.long_words.get(word, 1) for word in text.split(" "))


def workload(lengths: list[int], block_ids: list[list[int]] | None = None, block_tokens: int = 16) -> Trace:
    numbers, ones = np.arange(len(lengths)), np.ones(len(lengths), dtype=np.int64)
    blocks = None
    if block_ids is not None:
        offsets = np.cumsum([0] + [len(ids) for ids in block_ids])
        blocks = Blocks(np.array([i for ids in block_ids for i in ids]), offsets, block_tokens)
    arrivals, inputs = np.zeros(len(lengths)), np.array(lengths)
    return Trace("made up", "jsonl", "d" * 64, arrivals, inputs, ones, numbers, Accounting(len(lengths)), blocks)


def test_the_words_are_plain_and_distinct() -> None:
    assert len(set(COMMON_WORDS)) == len(COMMON_WORDS) > 800
    assert all(word.isascii() and word.isalpha() and word.islower() for word in COMMON_WORDS)


@pytest.mark.parametrize("overhead", [0, 1, 17])
async def test_all_words_serve_where_each_is_one_token(overhead: int) -> None:
    tokenizer = FakeTokenizer({}, overhead)
    measure = await measure_text(tokenizer.count)
    assert measure == TextMeasure(COMMON_WORDS, overhead + 1, 1.0, 0.0)
    assert tokenizer.calls <= 6
    maker = TextPromptMaker("salt", workload([40, 1000]), measure)
    assert [await tokenizer.count(maker.text(index)) for index in (0, 1)] == [40, 1000]


@pytest.mark.parametrize("bad_share", [0.01, 0.5])
async def test_words_of_several_tokens_are_found_out(bad_share: float) -> None:
    rng = np.random.default_rng(3)
    bad = {word: int(rng.integers(2, 4)) for word in COMMON_WORDS if word != "the" and rng.random() < bad_share}
    tokenizer = FakeTokenizer(bad, 3)
    measure = await measure_text(tokenizer.count)
    assert len(measure.words) >= 128
    assert not set(measure.words) & set(bad)
    assert (measure.overhead_tokens, measure.tokens_per_word, measure.mismatch) == (4, 1.0, 0.0)
    assert tokenizer.calls < 310


async def test_without_one_token_words_lengths_are_right_on_average() -> None:
    tokenizer = FakeTokenizer({word: len(word) for word in COMMON_WORDS}, 2)  # letters, as a byte vocabulary counts
    measure = await measure_text(tokenizer.count)
    assert measure.words == COMMON_WORDS
    assert measure.tokens_per_word == sum(map(len, COMMON_WORDS)) / len(COMMON_WORDS)
    assert 0 < measure.mismatch < 0.15
    maker = TextPromptMaker("salt", workload([4000, 3000]), measure)
    for index, length in enumerate([4000, 3000]):
        assert await tokenizer.count(maker.text(index)) == pytest.approx(length, rel=0.05)


@pytest.mark.parametrize("tokens_per_word", [1.0, 2.5])
def test_text_shares_what_the_blocks_share(tokens_per_word: float) -> None:
    measure = TextMeasure(COMMON_WORDS, 4, tokens_per_word)
    block_ids = [list(range(10)), [0, 1, 2, 3, 4, 15, 16, 17, 18, 19], list(range(6))]
    maker = TextPromptMaker("salt", workload([160, 160, 90], block_ids), measure)
    first, second, short = (maker.text(index).split() for index in range(3))
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    assert shared == 1 + 80 // tokens_per_word
    assert len(first) == 1 + round(156 / tokens_per_word)
    assert short == first[: len(short)]


def test_a_prompt_shorter_than_what_is_added_still_has_a_word() -> None:
    assert len(TextPromptMaker("salt", workload([3]), TextMeasure(COMMON_WORDS, 20, 1.0)).text(0).split()) == 1


@pytest.mark.parametrize("opening_tokens", [1, 2])
async def test_lengths_are_exact_where_the_first_word_is_other_tokens(opening_tokens: int) -> None:
    async def count(text: str) -> int:
        _, *others = text.split(" ")
        return 5 + opening_tokens + sum(1 + (word[0] > "s") for word in others if word != "the") + others.count("the")

    measure = await measure_text(count)
    assert (measure.overhead_tokens, measure.tokens_per_word, measure.mismatch) == (5 + opening_tokens, 1.0, 0.0)


async def test_no_test_prompt_is_longer_than_the_model_takes() -> None:
    tokenizer = FakeTokenizer({}, 2)
    measure = await measure_text(tokenizer.count, max_model_len=512)
    assert len(measure.words) == 64
    assert tokenizer.longest < 512


async def test_a_tokenizer_of_letters_and_spaces_is_no_error() -> None:
    async def letters(text: str) -> int:
        return len(text)

    measure = await measure_text(letters)
    assert measure.overhead_tokens == 3
    assert measure.mismatch < 0.1


async def test_senseless_counts_are_refused() -> None:
    async def always_seven(text: str) -> int:
        return 7

    with pytest.raises(TargetError, match="7 tokens for a word given twice and 7"):
        await measure_text(always_seven)
