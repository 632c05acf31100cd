"""Makes the parts of tokenizer.json from a SentencePiece vocabulary in a GGUF file.

`tokenizer.ggml.model` is "llama" or "gemma4".

SentencePiece (arXiv:1808.06226) has no list of merges: of all neighbours whose concatenation is a token, those with the
highest score are merged first. `tokenizers` merges the same in the order of a list, which is derived here: all
divisions of each token into two others, sorted by its score. Gemma 4's files have the list. Characters that are no
token become one token per byte.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from engine.model.gguf_file import GgufHeader

SCORES = "tokenizer.ggml.scores"
TOKENS = "tokenizer.ggml.tokens"

SPACE = "▁"
"""What SentencePiece has in place of a space."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of tokenizer.ggml.token_type."""

# The largest vocabularies have 262,144 tokens with 2 million characters, none with more than 31, and 600,000 merges.
_MAX_TOKEN_LENGTH = 128
_MAX_CHARACTERS = 16_000_000
_MAX_MERGES = 2_000_000

Json = dict[str, Any]


def spelled(token: str, kind: int) -> str:
    """Returns a token as the normalizer writes it: in files, runs of spaces that are user-defined are real spaces."""
    return SPACE * len(token) if kind == USER_DEFINED and not token.strip(" ") else token


def sentencepiece_parts(
    header: GgufHeader, vocabulary: dict[str, int], merges: Sequence[Sequence[str]], unknown: str | None
) -> Json:
    """Returns normalizer, pre-tokenizer, decoder and model.

    Args:
        header: the file.
        vocabulary: ids of tokens, as `spelled`.
        merges: pairs of tokens, see `merges_by_score`.
        unknown: the token for bytes without one; None: they are left out.
    """
    replace: Json = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if header.metadata.flag("tokenizer.ggml.add_space_prefix", True):
        replace = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": replace,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": list(merges),
        },
    }


def merges_by_score(header: GgufHeader, vocabulary: dict[str, int], types: Sequence[int]) -> list[tuple[str, str]]:
    """Returns all divisions of tokens into two others: the best score first, and of a token the longest first half.

    Runs of spaces that are user-defined come first: SentencePiece does not divide them, and their score is no rank.
    Other user-defined tokens are found in a text before anything is merged.

    Args:
        header: the file, with a score per token.
        vocabulary: ids of tokens, as `spelled`.
        types: of all ids.
    Raises: CheckpointError: scores are missing, no numbers, or of another number; or tokens are too long to divide.
    """
    scores = header.numbers(SCORES)
    if len(scores) != len(types):
        raise header.metadata.error(SCORES, f"has {len(scores)} entries, {TOKENS} has {len(types)}")
    bad = next((index for index, score in enumerate(scores) if not isfinite(score)), None)
    if bad is not None:
        raise header.metadata.error(SCORES, f"has {scores[bad]} at {bad}, expected numbers")
    merged = [
        (types[index] == NORMAL, -scores[index], index, token)
        for token, index in vocabulary.items()
        if types[index] == NORMAL or (types[index] == USER_DEFINED and not token.strip(SPACE))
    ]
    longest, total = max((len(token) for *_, token in merged), default=0), sum(len(token) for *_, token in merged)
    if longest > _MAX_TOKEN_LENGTH or total > _MAX_CHARACTERS:
        raise header.metadata.error(
            TOKENS,
            f"has {total} characters, and {longest} in one token; the maxima are {_MAX_CHARACTERS} and "
            f"{_MAX_TOKEN_LENGTH}",
        )
    merges = []
    for *_, token in sorted(merged):
        for length in range(len(token) - 1, 0, -1):
            left, right = token[:length], token[length:]
            if left in vocabulary and right in vocabulary:
                merges.append((left, right))
        if len(merges) > _MAX_MERGES:
            raise header.metadata.error(TOKENS, f"can be divided in more than {_MAX_MERGES} ways, the maximum")
    return merges
