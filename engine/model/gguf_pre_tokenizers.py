"""How byte-level BPE splits a text into words, which a GGUF file only names (`tokenizer.ggml.pre`).

llama.cpp has a table of the names (llama-vocab.cpp). Here each has the parts of the tokenizer.json that the name stands
for, so that token ids are those of the original checkpoint.
"""

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_BYTES: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2_WORDS: Json = {**_BYTES, "use_regex": True}
_DIGITS: Json = {"type": "Digits", "individual_digits": True}


def _sequence(*parts: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def _splits(*patterns: str) -> Json:
    """Returns a pre-tokenizer that splits by one regular expression after the other."""
    words = ({"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns)
    return _sequence(*words, _BYTES)


def _cl100k(digits: str, marks: str = "", *, ends_lines: bool = True) -> Json:
    """Returns the words of tiktoken's cl100k_base, with other digits in a word, and marks that count as letters.

    ends_lines: whether the ends of lines behind other characters are in one word with them.
    """
    letters = rf"[\p{{L}}{marks}]" if marks else r"\p{L}"
    others, ends = (rf"[^\s\p{{L}}{marks}\p{{N}}]+", r"[\r\n]*") if ends_lines else (r"[^\s\p{L}\p{N}\r\n]+", "")
    return _splits(
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}"
        rf"| ?{others}{ends}|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _o200k(digits: str, contractions: str, *, before: str = "", has_ideographs_apart: bool = False) -> Json:
    """Returns the words of tiktoken's o200k_base, in which capitals begin one, with other digits and contractions.

    before: splits a text before that; "": nothing does.
    has_ideographs_apart: whether they are words of their own, as of Kimi, whose other words end with no slash.
    """
    start, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first, ends = "", r"[\r\n/]*"
    if has_ideographs_apart:
        upper, lower = (rf"[{letters}&&[^\p{{Han}}]]" for letters in (upper, lower))
        first, ends = r"\p{Han}+|", r"[\r\n]*"
    words = (
        f"{first}{start}{upper}*{lower}+{contractions}|{start}{upper}+{lower}*{contractions}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{ends}|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return _splits(before, words) if before else _splits(words)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What a value of tokenizer.ggml.pre stands for.

    Attributes:
        words: the pre-tokenizer.
        normalizer: None: texts stay as they are.
        ignores_merges: whether a word that is a token is not merged from its bytes.
        adds_bos: whether prompts begin with the bos token, unless the file says something else.
    """

    words: Json
    normalizer: Json | None = None
    ignores_merges: bool = False
    adds_bos: bool = False


def _deepseek3() -> Json:
    """Returns the words of DeepSeek-V3, which has ideographs and kana apart from other letters."""
    marks = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
    return _splits(
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        rf"{marks}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    )


def _deepseek() -> Json:
    """Returns the words of DeepSeek-V2, whose letters are those with cases, without some scripts of newer Unicode."""
    unknown = "ՠ-ֈჇ-ჿᲀ-ᲈⴀ-ⴭꞐ-ꭨ\U00010570-\U000105bc\U00016e40-\U0001df1e"
    *splits, to_bytes = _splits(
        r"[\r\n]",
        rf"\s?[[\p{{Lu}}\p{{Ll}}\p{{Lt}}]&&[^{unknown}]]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        r"[一-龥ࠀ-一가-퟿]+",
    )["pretokenizers"]
    return _sequence(*splits, _DIGITS, to_bytes)


_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
_EAST_ASIAN = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+"
_GPT2 = PreTokenizer(_GPT2_WORDS)
_LLAMA3 = PreTokenizer(_cl100k(r"\p{N}{1,3}"), ignores_merges=True, adds_bos=True)
_CL100K = PreTokenizer(_cl100k(r"\p{N}{1,3}"))
_QWEN2 = PreTokenizer(_cl100k(r"\p{N}"), normalizer={"type": "NFC"})
_QWEN35 = PreTokenizer(_cl100k(r"\p{N}", r"\p{M}"), normalizer={"type": "NFC"})
_STARCODER = PreTokenizer(_sequence(_DIGITS, _GPT2_WORDS))

PRE_TOKENIZERS = {
    "default": PreTokenizer(
        _splits(
            r"[\p{P}\$\+<=>\^~\|]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"\p{N}+",
            r"[0-9][0-9][0-9]",
        )
    ),
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "gigachat": _GPT2,
    "exaone4": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "pixtral": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "glm4": _CL100K,
    "chatglm-bpe": _CL100K,
    "stablelm2": PreTokenizer(_cl100k(r"\p{N}")),
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "minerva-7b": _STARCODER,
    "command-r": PreTokenizer(_sequence(_DIGITS, _GPT2_WORDS), normalizer={"type": "NFC"}),
    "seed-coder": PreTokenizer(_cl100k(r"\p{N}{1}", ends_lines=False)),
    "deepseek-llm": PreTokenizer(_deepseek()),
    "kimi-k2": PreTokenizer(_o200k(r"\p{N}{1,3}", _CONTRACTIONS, has_ideographs_apart=True)),
    "youtu": PreTokenizer(
        _o200k(
            r"\p{N}", _CONTRACTIONS, before="[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+"
        ),
        ignores_merges=True,
    ),
    "deepseek-v3": PreTokenizer(_deepseek3()),
    "hunyuan-dense": PreTokenizer(_deepseek3()),
    "tekken": PreTokenizer(_o200k(r"\p{N}", ""), ignores_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer(_o200k(r"\p{N}{1,3}", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?")),
    "deepseek-coder": PreTokenizer(_splits(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}
"""By their names, those of models with a supported architecture."""
