"""The tokenizer as files: what a frontend needs to turn text into this model's ids, and the digest by which both
sides know it is the same.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from engine.errors import CheckpointError

TOKENIZER_FILE_NAMES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files that are there, sorted by name: pairs of name and content."""

    files: tuple[tuple[str, bytes], ...]

    @classmethod
    def from_dir(cls, model_dir: Path, *, is_required: bool = True) -> "TokenizerFiles":
        """Reads them from a model folder.

        Args:
            model_dir: the folder.
            is_required: whether there must be a tokenizer; without one a model serves token ids, and no text.
        Raises: CheckpointError: tokenizer.json is missing, or a file cannot be read, or is no JSON though it should be.
        """
        try:
            files = tuple(
                (name, (model_dir / name).read_bytes()) for name in TOKENIZER_FILE_NAMES if (model_dir / name).is_file()
            )
        except OSError as error:
            raise CheckpointError(f"{error.filename}: {error.strerror}") from error
        if "tokenizer.json" not in dict(files):
            if not is_required:
                return cls(())
            raise CheckpointError(
                f"{model_dir / 'tokenizer.json'} is missing: a tokenizer in the Hugging Face format is needed"
            )
        for name, data in files:
            if name.endswith(".json"):
                _check_json(model_dir / name, data)
        return cls(files)

    def sha256(self) -> bytes:
        """The digest of EngineInfo.tokenizer_sha256: for each file its name, a zero byte, its length as u64
        little-endian, its data.
        """
        digest = hashlib.sha256()
        for name, data in self.files:
            digest.update(name.encode() + b"\0" + len(data).to_bytes(8, "little") + data)
        return digest.digest()


def _check_json(path: Path, data: bytes) -> None:
    """What a download left unfinished is found here, and not by every frontend for itself."""
    try:
        json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}; fetch the file again") from error
