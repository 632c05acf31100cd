"""Loads the tokenizer from the engine (GetTokenizer) or a folder (`--tokenizer`). Its hash must match the engine's."""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.engine_protocol import tokenizer_sha256
from frontend.errors import ConfigError, TokenizerMismatch
from frontend.text.sampling_defaults import API_DEFAULTS, SamplingDefaults, sampling_defaults
from frontend.text.tokenizer import MAX_FILES_BYTES, Tokenizer, read_folder

if TYPE_CHECKING:
    from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceAsyncStub

logger = logging.getLogger(__name__)

_FETCH_TIMEOUT_S = 60.0
_MAX_TEMPLATE_BYTES = 1 << 20


class TokenizerSource:
    """Keeps the tokenizer across reconnects, so that it is fetched again only if the model changed.

    Args:
        folder: the operator's files; None fetches them from the engine.
        chat_template: file with a chat template instead of the model's.

    Raises:
        ConfigError: the folder contains no usable tokenizer, or the chat template cannot be read.

    Attributes:
        own_files: the operator's files by name; empty without a folder.
    """

    def __init__(self, folder: Path | None, chat_template: Path | None = None) -> None:
        self._folder = folder
        self._chat_template = _read_template(chat_template) if chat_template is not None else None
        self.own_files: Mapping[str, bytes] = {}
        self._tokenizer: Tokenizer | None = None
        self._defaults = API_DEFAULTS
        if folder is not None:
            try:
                files = read_folder(folder)
                self._tokenizer = self._make(files)
                self.own_files = files
            except OSError as error:
                raise ConfigError(f"--tokenizer: {error.filename} cannot be read: {error.strerror}") from error
            except ValueError as error:
                raise ConfigError(f"--tokenizer {folder}: {error}") from error
            self._defaults = sampling_defaults(files)

    @property
    def own_sha256(self) -> bytes:
        """Hash of the operator's files; empty without a folder."""
        return self._tokenizer.sha256 if self._folder is not None and self._tokenizer is not None else b""

    async def get(self, stub: "EngineServiceAsyncStub", sha256: bytes) -> tuple[Tokenizer, SamplingDefaults]:
        """Returns the tokenizer with this hash, and the model's sampling defaults.

        Raises:
            TokenizerMismatch: the files have another hash.
            grpc.aio.AioRpcError: the engine was lost.
        """
        if self._tokenizer is not None and self._tokenizer.sha256 == sha256:
            return self._tokenizer, self._defaults
        if self._folder is not None:
            raise TokenizerMismatch(
                f"--tokenizer {self._folder} has SHA-256 {self.own_sha256.hex()}, the engine's model {sha256.hex()}: "
                "point --tokenizer at the served model's own files, or leave it out to take them from the engine"
            )
        files = await _fetch(stub)
        if tokenizer_sha256(files) != sha256:
            raise TokenizerMismatch(
                f"the engine announces a tokenizer with SHA-256 {sha256.hex()}, it sent one with "
                f"{tokenizer_sha256(files).hex()}"
            )
        loop = asyncio.get_running_loop()
        try:
            # The previous tokenizer is not closed, because prompts may use it; its threads end with the last one.
            make = partial(self._make, files) if files else Tokenizer.absent
            self._tokenizer = await loop.run_in_executor(None, make)
        except ValueError as error:
            raise TokenizerMismatch(f"the engine's tokenizer cannot be read here: {error}") from error
        self._defaults = sampling_defaults(files)
        if files:
            logger.info("tokenizer: %d files, SHA-256 %s", len(files), sha256.hex()[:12])
        else:
            logger.warning("the engine's model has no tokenizer: prompts must be token ids, and answers have no text")
        return self._tokenizer, self._defaults

    def _make(self, files: Mapping[str, bytes]) -> Tokenizer:
        tokenizer = Tokenizer(files)
        if self._chat_template is not None:
            tokenizer.chat = tokenizer.chat.with_template(self._chat_template)
        return tokenizer

    def close(self) -> None:
        """Ends the tokenizer's threads."""
        if self._tokenizer is not None:
            self._tokenizer.close()


def _read_template(path: Path) -> str:
    try:
        if not path.is_file():  # reading a named pipe would not end
            raise ConfigError(f"--chat-template {path} is not a file")
        if (num_bytes := path.stat().st_size) > _MAX_TEMPLATE_BYTES:
            raise ConfigError(f"--chat-template {path} has {num_bytes} bytes, at most {_MAX_TEMPLATE_BYTES} are read")
        return path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {path} is not UTF-8: {error.reason} at byte {error.start}") from error


async def _fetch(stub: "EngineServiceAsyncStub") -> Mapping[str, bytes]:
    files: dict[str, bytearray] = {}
    num_bytes = 0
    async for part in stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=_FETCH_TIMEOUT_S):
        files.setdefault(part.file_name, bytearray()).extend(part.data)
        num_bytes += len(part.data)
        if num_bytes > MAX_FILES_BYTES:
            raise TokenizerMismatch(f"the engine's tokenizer files have more than {MAX_FILES_BYTES} bytes")
    return {name: bytes(data) for name, data in files.items()}
