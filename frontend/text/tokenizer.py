"""Tokenizes text with the tokenizer files from the engine or from a folder.

Encoding runs in a small thread pool and uses the library's `encode_batch`, which releases the GIL. Its `encode` does
not and would block the event loop: 6.2 s for 10^6 characters, against at most 76 ms for half as many.
"""

import asyncio
import os
import stat
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from chairlift.service.engine_protocol import TOKENIZER_FILE_NAMES, tokenizer_sha256
from frontend.errors import RequestTooLong
from frontend.limits import MAX_TOKEN_IDS
from frontend.text.chat_template_files import ADDITIONAL_TEMPLATES, ChatFiles, load_object
from frontend.text.detokenizer import NO_MARKS, Detokenizer, make_detokenizer
from frontend.text.token_text import token_text

_WINDOW = 1 << 13  # tokens converted to a list at once without blocking the event loop


MAX_VOCAB_SIZE = 2**24
"""Limits the size of tables with a row for each token id."""

MAX_FILES_BYTES = 256 << 20
"""Maximum size of all files of a tokenizer together."""


def read_folder(folder: Path) -> dict[str, bytes]:
    """Reads the tokenizer files in a folder: `TOKENIZER_FILE_NAMES` and additional chat templates.

    Raises:
        ValueError: they are larger than `MAX_FILES_BYTES`, or one is not a regular file.
        OSError: one cannot be read.
    """
    templates = sorted(path.name for path in (folder / ADDITIONAL_TEMPLATES).glob("*.jinja"))
    names = [name for name in TOKENIZER_FILE_NAMES if os.path.lexists(folder / name)]
    paths = {name: folder / name for name in [*names, *(ADDITIONAL_TEMPLATES + name for name in templates)]}
    statuses = {name: path.stat() for name, path in paths.items()}
    for name, status in statuses.items():
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{name} is not a regular file")
    if (num_bytes := sum(status.st_size for status in statuses.values())) > MAX_FILES_BYTES:
        raise ValueError(f"the tokenizer's files have {num_bytes} bytes, at most {MAX_FILES_BYTES} are read")
    return {name: path.read_bytes() for name, path in paths.items()}


class Tokenizer:
    """One model's tokenizer and chat templates. `close` ends its threads.

    Args:
        files: contents by file name, see `TOKENIZER_FILE_NAMES`.

    Raises:
        ValueError: tokenizer.json is missing, or a file cannot be read.

    Attributes:
        vocab_size: one more than the largest token id; the model may have more rows.
        sha256: digest of the files, `tokenizer_sha256`.
        chat: the chat templates; `ChatRenderer` removes templates that cannot be compiled.
        special_tokens: texts of the special tokens, which answers omit.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        if "tokenizer.json" not in files:
            raise ValueError(f"the model has no tokenizer.json, only: {', '.join(sorted(files)) or 'nothing'}")
        with _library_errors():
            self._backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        # The file may contain settings of a training run; prompts are neither truncated nor padded.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.sha256 = tokenizer_sha256(files)
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(
                f"tokenizer.json has the token id {self.vocab_size - 1}, the largest is {MAX_VOCAB_SIZE - 1}"
            )
        self.special_tokens = frozenset(
            token.content for token in self._backend.get_added_tokens_decoder().values() if token.special
        )
        # As in transformers: special tokens that are spelled out in a text are then text.
        self._backend.encode_special_tokens = bool(
            load_object(files, "tokenizer_config.json").get("split_special_tokens")
        )
        with _library_errors():  # it decodes tokens
            self._text = token_text(self._backend)
        self.chat = ChatFiles.from_files(files)
        num_threads = min(4, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")

    @classmethod
    def absent(cls) -> "Tokenizer":
        """Returns a tokenizer without tokens, for a model without a tokenizer."""
        tokenizer = cls({"tokenizer.json": tokenizers.Tokenizer(tokenizers.models.BPE()).to_str().encode()})
        tokenizer.sha256 = tokenizer_sha256({})
        return tokenizer

    @property
    def has_tokens(self) -> bool:
        """Whether the model has a tokenizer."""
        return self.vocab_size > 0

    @property
    def has_chat_template(self) -> bool:
        """Whether chat prompts can be served."""
        return self.chat.plain is not None

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Returns the token ids of a prompt.

        As in `transformers`, a special token that is spelled out in the text becomes that token.

        Args:
            add_special_tokens: whether the tokenizer adds its special tokens, such as a leading bos. Rendered chat
                templates contain them already.
        """
        return (await self._encode([text], add_special_tokens=add_special_tokens))[0]

    async def encode_words(self, words: Sequence[str]) -> list[Sequence[int]]:
        """Returns the token ids of texts in the middle of other text, without added special tokens."""
        return await self._encode(list(words), add_special_tokens=False)

    def special_token_id(self, text: str) -> int | None:
        """Returns the id of a special token; None if the text is not one."""
        token_id: int | None = self._backend.token_to_id(text) if text in self.special_tokens else None
        return token_id

    def to_json(self) -> str:
        """Returns the tokenizer in Hugging Face's format."""
        text: str = self._backend.to_str()
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the raw bytes of one token, which may be part of a character; empty for an id without a token."""
        return self._text.token_bytes(token_id)

    def detokenizer(
        self, *, keep_special_tokens: bool, marks: frozenset[int] = NO_MARKS, after: Sequence[int] = ()
    ) -> Detokenizer:
        """Returns a detokenizer for one answer; see `make_detokenizer`."""
        return make_detokenizer(self._text, keep_special_tokens=keep_special_tokens, marks=marks, after=after)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, including special ones. Call it in a thread."""
        detokenizer = self.detokenizer(keep_special_tokens=True)
        windows = range(0, len(token_ids), _WINDOW)
        parts = [detokenizer.push(token_ids[start : start + _WINDOW]) for start in windows]
        return "".join([*parts, detokenizer.finish()])

    def close(self) -> None:
        """Ends the threads; drops queued work."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _encode(self, texts: list[str], *, add_special_tokens: bool) -> list[Sequence[int]]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._encode_batch, texts, add_special_tokens)

    def _encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Sequence[int]]:
        try:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except BaseException as error:
            if _is_panic(error):  # it is not an Exception, which callers would expect
                raise RuntimeError(f"the tokenizer fails: {error}") from error
            raise
        if (num_tokens := sum(map(len, encodings))) > MAX_TOKEN_IDS:  # before they are converted to objects
            encodings.clear()  # frees the memory before the error is handled
            raise RequestTooLong(f"the prompt has {num_tokens} tokens, at most {MAX_TOKEN_IDS} are accepted")
        return [_compact(encoding.ids) for encoding in encodings]


def _compact(ids: list[int]) -> Sequence[int]:
    return ids if len(ids) <= _WINDOW else array("I", ids)


@contextmanager
def _library_errors() -> Iterator[None]:
    """Raises errors of the library as ValueError: it raises bare Exception, and panics as a BaseException."""
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, Exception) or _is_panic(error)):
            raise
        raise ValueError(f"tokenizer.json cannot be read: {error}") from error


def _is_panic(error: BaseException) -> bool:
    """Returns whether Rust code panicked; the exception's class cannot be imported."""
    return type(error).__name__ == "PanicException"
