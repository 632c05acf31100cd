"""Detokenizing piece by piece equals decoding at once, for every kind of vocabulary and any chunks."""

import json
import random
from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from frontend.text.detokenizer import make_detokenizer
from frontend.text.token_text import ByteTokenText, PieceTokenText, TailRule, token_text

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 2,
    "한국어 음절을 하나도 잃지 않는다. 텍스트는 온전하다.",
    "emoji 🙂 👩‍👩‍👧‍👦 🇩🇪, combining é ñ ạ̈, Ελληνικά, 汉字",
    "don't , stop ! x = 1;\n\n    return x  # tabs\tand  spaces",
]
NUM_STREAMS = 3_000


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["a tool é call"])  # a space and a letter outside the alphabet: stands for itself
    tokenizer.add_special_tokens(["<|im_end|>"])
    return tokenizer


def sentencepiece(*, strip: bool) -> tokenizers.Tokenizer:
    """As Llama 2's (strip) and Gemma's: spaces as ▁, unknown characters as bytes <0xAB>."""
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
    )
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator(CORPUS[:1], trainer)
    settings = json.loads(tokenizer.to_str())
    settings["added_tokens"] = settings["added_tokens"][:3]  # byte tokens are ordinary ones
    settings["model"]["vocab"][""] = len(settings["model"]["vocab"])  # without text: the next token is still the first
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(settings))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return tokenizer


def sentencepiece_metaspace() -> tokenizers.Tokenizer:
    tokenizer = sentencepiece(strip=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=160, special_tokens=["<s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def bpe_with_suffix() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def without_decoder() -> tokenizers.Tokenizer:
    tokenizer = word_piece()
    tokenizer.decoder = None
    return tokenizer


def byte_level_after_fuse() -> tokenizers.Tokenizer:
    """A token outside the alphabet turns the whole text into plain text."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()])
    return tokenizer


def byte_level_twice() -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.ByteLevel()])
    return tokenizer


def unknown_decoder() -> tokenizers.Tokenizer:
    tokenizer = word_piece()
    tokenizer.decoder = decoders.CTC()
    return tokenizer


KINDS: dict[str, tuple[Callable[[], tokenizers.Tokenizer], TailRule | None, int]] = {
    "byte-level": (byte_level, None, NUM_STREAMS),
    "sentencepiece-llama": (lambda: sentencepiece(strip=True), TailRule.BYTE_RUN, NUM_STREAMS),
    "sentencepiece-gemma": (lambda: sentencepiece(strip=False), TailRule.BYTE_RUN, 500),
    "sentencepiece-metaspace": (sentencepiece_metaspace, TailRule.BYTE_RUN, NUM_STREAMS),
    "unigram": (unigram, TailRule.NONE, 500),
    "word-piece": (word_piece, TailRule.NONE, 500),
    "bpe-suffix": (bpe_with_suffix, TailRule.LAST, 500),
    "no-decoder": (without_decoder, TailRule.NONE, 500),
    "unknown-decoder": (unknown_decoder, TailRule.ALL, 500),
    "byte-level-after-fuse": (byte_level_after_fuse, TailRule.ALL, 500),
    "byte-level-twice": (byte_level_twice, TailRule.ALL, 500),
}


def byte_ids(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Returns the tokens of single bytes, which produce incomplete characters."""
    tokens = [(tokenizer.id_to_token(i) or "", i) for i in range(tokenizer.get_vocab_size())]
    return [i for token, i in tokens if token.startswith("<0x") or (len(token) == 1 and ord(token) > 127)]


def random_stream(tokenizer: tokenizers.Tokenizer, bytes_: list[int], rng: random.Random) -> list[int]:
    """Returns the ids of a text, mixed with single bytes and random ids, some without a token."""
    text = rng.choice(CORPUS)
    start = rng.randrange(len(text))
    ids = tokenizer.encode(text[start : start + rng.randint(0, 30)], add_special_tokens=False).ids
    for _ in range(rng.randint(0, 12)):
        wild = rng.choice(bytes_) if bytes_ and rng.random() < 0.6 else rng.randrange(tokenizer.get_vocab_size() + 3)
        ids.insert(rng.randint(0, len(ids)), wild)
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_together_are_the_full_decoding(kind):
    build, rule, num_streams = KINDS[kind]
    tokenizer = build()
    text = token_text(tokenizer)
    assert (text.tail_rule if isinstance(text, PieceTokenText) else None) is rule
    rng = random.Random(kind)
    bytes_ = byte_ids(tokenizer)
    for _ in range(num_streams):
        ids = random_stream(tokenizer, bytes_, rng)
        keep = rng.random() < 0.5
        detokenizer = make_detokenizer(text, keep_special_tokens=keep)
        full = tokenizer.decode(ids, skip_special_tokens=not keep)
        sent, position = "", 0
        while position < len(ids):
            size = rng.choice([1, 1, 1, 2, 7])
            piece = detokenizer.push(ids[position : position + size])
            piece.encode()  # fails for half a surrogate pair
            sent += piece
            position += size
            assert full.startswith(sent), (ids, keep)
        assert sent + detokenizer.finish() == full, (ids, keep)
        assert detokenizer.finish() == ""


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece-llama", "sentencepiece-metaspace", "unigram"])
def test_text_of_ordinary_tokens_is_returned_at_once(kind):
    tokenizer = KINDS[kind][0]()
    ids = tokenizer.encode("the dog jumps over the lazy fox", add_special_tokens=False).ids
    detokenizer = make_detokenizer(token_text(tokenizer), keep_special_tokens=False)
    for count in range(1, len(ids) + 1):
        sent = "".join(detokenizer.push([token_id]) for token_id in ids[:count])
        assert sent == tokenizer.decode(ids[:count])
        detokenizer = make_detokenizer(token_text(tokenizer), keep_special_tokens=False)


def test_incomplete_character_is_held_back():
    tokenizer = byte_level()
    detokenizer = make_detokenizer(token_text(tokenizer), keep_special_tokens=False)
    ids = [tokenizer.token_to_id(char) for char in "ðŁĻĤ"]  # the four bytes of 🙂
    assert [detokenizer.push([token_id]) for token_id in ids] == ["", "", "", "🙂"]


def test_incomplete_character_at_the_end_is_one_replacement_character():
    tokenizer = byte_level()
    detokenizer = make_detokenizer(token_text(tokenizer), keep_special_tokens=False)
    assert detokenizer.push([tokenizer.token_to_id(char) for char in "aðŁĻ"]) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_are_omitted_unless_kept():
    tokenizer = byte_level()
    ids = [
        tokenizer.token_to_id("<s>"),
        *tokenizer.encode("the", add_special_tokens=False).ids,
        tokenizer.token_to_id("<|im_end|>"),
    ]
    text = token_text(tokenizer)
    assert make_detokenizer(text, keep_special_tokens=False).push(ids) == "the"
    assert make_detokenizer(text, keep_special_tokens=True).push(ids) == "<s>the<|im_end|>"


@pytest.mark.parametrize("make", [byte_level, lambda: sentencepiece(strip=True), word_piece])
def test_marks_are_the_only_special_tokens_that_have_text(make):
    tokenizer = make()
    tokenizer.add_special_tokens(["[CALLS]", "[OTHER]"])
    mark, other = map(tokenizer.token_to_id, ("[CALLS]", "[OTHER]"))
    word = tokenizer.encode("dog", add_special_tokens=False).ids
    ids = [*word, other, mark, *word, mark]
    text = token_text(tokenizer)
    for marks in (frozenset(), frozenset({mark}), frozenset({mark, other})):
        detokenizer = make_detokenizer(text, keep_special_tokens=False, marks=marks)
        pieces = [detokenizer.push([token_id]) for token_id in ids]
        visible = [token_id for token_id in ids if token_id in marks or token_id not in (mark, other)]
        assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(visible, skip_special_tokens=False)


def test_leading_space_is_dropped_once_even_as_a_separate_token():
    tokenizer = sentencepiece(strip=True)
    space = tokenizer.token_to_id("▁")
    word = next(token for token in sorted(tokenizer.get_vocab()) if token.startswith("▁") and token[1:].isalpha())
    detokenizer = make_detokenizer(token_text(tokenizer), keep_special_tokens=False)
    pieces = [detokenizer.push([token_id]) for token_id in (space, *[tokenizer.token_to_id(word)] * 2)]
    assert pieces == ["", f" {word[1:]}", f" {word[1:]}"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("bpe-suffix", "unknown-decoder")])
def test_continued_text_and_its_prompt_are_their_full_decoding(kind):
    """A prompt and its continuation are one text: the spaces between them are neither lost nor doubled."""
    make, _, num_streams = KINDS[kind]
    tokenizer = make()
    text, rng, num_spaces = token_text(tokenizer), random.Random(kind), 0
    bos = [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special][:1]
    for _ in range(num_streams // 10):
        words = rng.choice(CORPUS).split()[: rng.randrange(9)]
        prompt = bos + tokenizer.encode(" ".join(words), add_special_tokens=False).ids
        answer = random_stream(tokenizer, byte_ids(tokenizer), rng)
        before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + answer)
        if not before or not whole.startswith(before):  # the answer changes the prompt's last character
            continue
        detokenizer = make_detokenizer(text, keep_special_tokens=False, after=prompt)
        pieces = [detokenizer.push([token_id]) for token_id in answer]
        assert before + "".join(pieces) + detokenizer.finish() == whole, (prompt, answer)
        num_spaces += whole[len(before) :].startswith(" ")
    assert num_spaces


def test_answer_after_special_tokens_alone_starts_a_text():
    tokenizer = sentencepiece(strip=True)
    ids = tokenizer.encode("the dog", add_special_tokens=False).ids
    bos = [tokenizer.token_to_id("<s>")]
    for keep in (False, True):
        detokenizer = make_detokenizer(token_text(tokenizer), keep_special_tokens=keep, after=bos)
        decoded = tokenizer.decode(bos + ids, skip_special_tokens=not keep)
        assert detokenizer.push(ids) + detokenizer.finish() == decoded.removeprefix("<s>")


def test_token_bytes_of_a_byte_level_answer_are_its_text():
    tokenizer = byte_level()
    text = token_text(tokenizer)
    assert isinstance(text, ByteTokenText)
    sample = CORPUS[2]
    ids = tokenizer.encode(sample, add_special_tokens=False).ids
    assert b"".join(map(text.token_bytes, ids)) == sample.encode()
    assert text.token_bytes(tokenizer.token_to_id("a tool é call")) == "a tool é call".encode()
    assert text.token_bytes(tokenizer.get_vocab_size() + 5) == b""


def test_token_bytes_of_a_sentencepiece_answer_are_its_text():
    tokenizer = sentencepiece(strip=True)
    text = token_text(tokenizer)
    ids = tokenizer.encode("the dog 🙂", add_special_tokens=False).ids
    assert b"".join(map(text.token_bytes, ids)) == " the dog 🙂".encode()  # the first ▁ is a space in mid-text
    assert text.token_bytes(tokenizer.token_to_id("<0xE2>")) == b"\xe2"
    assert text.token_bytes(tokenizer.get_vocab_size() + 5) == b""
