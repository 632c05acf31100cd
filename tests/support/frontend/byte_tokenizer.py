"""A tokenizer small enough to make in code, for tests: one token per byte, so that every text makes the round trip."""

import functools
import json

import tokenizers

END_TOKEN_ID = 256
VOCAB_SIZE = 258  # one row more than the tokenizer has tokens, as in padded models
_CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def byte_tokenizer_files(chat_template: str = _CHAT_TEMPLATE) -> dict[str, bytes]:
    """Files of a tokenizer with one token per byte (ids 0..255, in no particular order) and an end token."""
    config = {"eos_token": "<|end|>", "chat_template": chat_template}
    return {"tokenizer.json": _tokenizer_json(), "tokenizer_config.json": json.dumps(config).encode()}


@functools.cache
def _tokenizer_json() -> bytes:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({char: number for number, char in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer.to_str().encode()
