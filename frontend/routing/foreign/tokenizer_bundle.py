"""Reads the archive that other engines send for GetTokenizer."""

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import AsyncIterable, Mapping
from typing import Any

from chairlift.service.engine_protocol import TOKENIZER_FILE_NAMES
from frontend.errors import ConfigError
from frontend.text.chat_template_files import ADDITIONAL_TEMPLATES
from frontend.text.tokenizer import MAX_FILES_BYTES

_END_TOKEN_FILES = ("config.json", "generation_config.json")
_USE_FLAG = "give --tokenizer a folder with the model's tokenizer files"


async def fetch_archive(chunks: AsyncIterable[Any]) -> bytes:
    """Joins the chunks of GetTokenizer.

    Raises:
        ConfigError: the archive is larger than a tokenizer may be, or has another digest than announced.
    """
    archive, sha256 = bytearray(), ""
    async for chunk in chunks:
        archive += chunk.data
        sha256 = chunk.sha256 or sha256
        if len(archive) > MAX_FILES_BYTES:
            raise ConfigError(f"the engine's tokenizer archive has more than {MAX_FILES_BYTES} bytes")
    if sha256 and sha256.lower() != hashlib.sha256(archive).hexdigest():
        raise ConfigError(f"the engine's tokenizer archive does not have the SHA-256 that it announced, {sha256[:12]}")
    return bytes(archive)


def tokenizer_files(archive: bytes) -> tuple[dict[str, bytes], tuple[int, ...]]:
    """Unpacks the files that a tokenizer consists of; others are ignored.

    Returns: contents by file name, the same names as of a folder, and the model's end tokens.

    Raises:
        ConfigError: the archive cannot be used; the message says what to do.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as bundle:
            sizes = {info.filename: info.file_size for info in bundle.infolist()}
            names = [name for name in sizes if name in TOKENIZER_FILE_NAMES or _is_template(name)]
            wanted = [*names, *(name for name in _END_TOKEN_FILES if name in sizes and name not in names)]
            if sum(sizes[name] for name in wanted) > MAX_FILES_BYTES:
                raise ConfigError(f"the engine's tokenizer files have more than {MAX_FILES_BYTES} bytes")
            contents = {name: bundle.read(name) for name in wanted}
    except (zipfile.BadZipFile, zlib.error, OSError, RuntimeError, ValueError, EOFError) as error:
        raise ConfigError(f"the engine's tokenizer archive cannot be read ({error}): {_USE_FLAG}") from error
    if "tokenizer.json" not in names:
        held = ", ".join(sorted(sizes)[:10]) or "nothing"
        raise ConfigError(f"the engine's tokenizer archive has no tokenizer.json, only {held}: {_USE_FLAG}")
    return {name: contents[name] for name in names}, end_tokens(contents)


def end_tokens(contents: Mapping[str, bytes]) -> tuple[int, ...]:
    """Returns the end tokens that the model's files name; of the tokenizer's configuration only if no other does."""
    token_ids = {token_id for name in _END_TOKEN_FILES for token_id in _listed(contents.get(name, b""))}
    return tuple(sorted(token_ids or _named(contents)))


def _is_template(name: str) -> bool:
    base = name.removeprefix(ADDITIONAL_TEMPLATES)
    return name.startswith(ADDITIONAL_TEMPLATES) and base.endswith(".jinja") and "/" not in base


def _named(contents: Mapping[str, bytes]) -> set[int]:
    try:
        token = json.loads(contents["tokenizer_config.json"])["eos_token"]
        text = token["content"] if isinstance(token, dict) else token
        added = json.loads(contents["tokenizer.json"])["added_tokens"]
        return {int(one["id"]) for one in added if one["content"] == text}
    except (ValueError, KeyError, TypeError, RecursionError):
        return set()


def _listed(content: bytes) -> list[int]:
    try:
        ids = json.loads(content)["eos_token_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    ids = ids if isinstance(ids, list) else [ids]
    return [token_id for token_id in ids if isinstance(token_id, int) and not isinstance(token_id, bool)]
