"""Opens a model's tokenizer for llguidance.

The library reads tokenizer.json itself, unlike `tokenizers`. It takes the number of tokens for the largest id plus one,
which leaves out the last tokens if ids have gaps, and refuses end tokens from there on. It does not read the decoder
Metaspace, which writes a space for each "▁". It refuses a tokenizer that is larger than its model, such as by a padding
token.
"""

import json
from collections.abc import Collection
from typing import Any

from llguidance import LLTokenizer

Json = dict[str, Any]


def grammar_tokenizer(tokenizer_json: str, vocab_size: int, end_token_ids: Collection[int]) -> LLTokenizer:
    """Returns llguidance's view of a tokenizer.

    Args:
        tokenizer_json: in the Hugging Face format.
        vocab_size: vocabulary of the model, which may be larger; no grammar allows the additional ids.
        end_token_ids: end tokens of the model. Those beyond its vocabulary are ignored.
    Raises: ValueError: the tokenizer cannot be used for grammars.
    """
    ends = sorted(token_id for token_id in end_token_ids if token_id < vocab_size)
    if not ends:
        raise ValueError("the model has no end token")
    adapted = _adapted(tokenizer_json, vocab_size, ends)
    return LLTokenizer(adapted, n_vocab=vocab_size, eos_token=ends)


def _adapted(tokenizer_json: str, vocab_size: int, ends: Collection[int]) -> str:
    """Returns tokenizer.json as the library must see it; malformed files are left to its errors."""
    tokenizer = json.loads(tokenizer_json)
    decoder, model, added = (tokenizer.get(name) for name in ("decoder", "model", "added_tokens"))
    steps = decoder.get("decoders") if isinstance(decoder, dict) else None
    has_changed = isinstance(steps, list) and _write_spaces(steps)
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict) and isinstance(added, list):  # ids of a list have no gaps
        has_changed |= _drop_beyond(vocabulary, added, vocab_size) | _fill_gaps(vocabulary, added, vocab_size, ends)
    return json.dumps(tokenizer, ensure_ascii=False) if has_changed else tokenizer_json


def _write_spaces(steps: list[Json]) -> bool:
    """Replaces Metaspace by the step that the library reads; returns whether there was one."""
    places = [index for index, step in enumerate(steps) if step.get("type") == "Metaspace"]
    for index in places:
        steps[index] = {"type": "Replace", "pattern": {"String": steps[index].get("replacement", "▁")}, "content": " "}
    return bool(places)


def _drop_beyond(vocabulary: dict[str, int], added: list[Json], vocab_size: int) -> bool:
    """Removes added tokens that the model cannot draw; returns whether there were any."""
    beyond = [token["content"] for token in added if token["id"] >= vocab_size]
    for content in beyond:
        vocabulary.pop(content, None)
    added[:] = [token for token in added if token["id"] < vocab_size]
    return bool(beyond)


def _fill_gaps(vocabulary: dict[str, int], added: list[Json], vocab_size: int, ends: Collection[int]) -> bool:
    """Gives each id up to the last token a token, special and with the library's name, which no text has."""
    declared = {token["content"]: token["id"] for token in added}
    used = {*vocabulary.values(), *declared.values()}
    num_ids = 1 + max({*used, *ends})
    gaps = [token_id for token_id in range(min(num_ids, vocab_size)) if token_id not in used]
    if gaps:  # an added token outside the vocabulary would get the next id, whichever its file gives it
        fillers = {f"<[{token_id}]>": token_id for token_id in gaps}
        vocabulary |= declared | fillers
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        added += [{"id": token_id, "content": name, **flags} for name, token_id in fillers.items()]
    return bool(gaps)
