"""The files of a tokenizer, which frontends download to convert text to token ids, and their digest."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.service.engine_protocol import tokenizer_sha256
from engine.errors import CheckpointError
from engine.model.checkpoint import open_checkpoint
from engine.model.checkpoint_file import parse_json
from engine.model.template_nesting import check_nesting
from engine.model.tokenizer_json import complete


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The tokenizer files of a checkpoint: pairs of name and content, sorted by name."""

    files: tuple[tuple[str, bytes], ...]

    @classmethod
    def from_dir(cls, model_dir: Path, *, is_required: bool = True) -> "TokenizerFiles":
        """Reads the files of a model folder. Tokens that tokenizer.json lacks are added to it; see `complete`.

        Args:
            model_dir: the folder.
            is_required: whether a missing tokenizer is an error; without one a model serves token ids, but no text.
        Raises: CheckpointError: tokenizer.json is missing or unusable, a file cannot be read or is not JSON, or a
            setting is not supported.
        """
        checkpoint = open_checkpoint(model_dir)
        if is_required:
            checkpoint.require_tokenizer()
        files = checkpoint.tokenizer_files()
        if not files:
            return cls(())
        objects = {name: _object(model_dir / name, data) for name, data in files.items() if name.endswith(".json")}
        for name, data in files.items():
            if name.endswith(".jinja"):
                check_nesting(model_dir / name, _text(model_dir / name, data))
        for name in ("chat_template.json", "tokenizer_config.json"):
            for text in _templates_in(objects.get(name, {}).get("chat_template")):
                check_nesting(model_dir / name, text)
        completed = complete(model_dir, objects)
        if completed is not None:
            try:
                files["tokenizer.json"] = json.dumps(completed, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                raise CheckpointError(
                    f"{model_dir / 'tokenizer.json'}: a text in it, or in another file of the tokenizer, is half of a "
                    f"surrogate pair, {error.object[error.start]!a}"
                ) from error
        return cls(tuple(sorted(files.items())))

    def sha256(self) -> bytes:
        """Returns the digest that frontends compare, `EngineInfo.tokenizer_sha256`."""
        return tokenizer_sha256(dict(self.files))


def _object(path: Path, data: bytes) -> dict[str, Any]:
    """Parses a JSON object, so that an incomplete download is detected before frontends fetch the file."""
    value = parse_json(str(path), data)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, expected an object")
    return value


def _text(path: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from error


def _templates_in(value: Any) -> list[str]:
    """Returns the sources in a `chat_template` field: one, or a list of named ones."""
    if isinstance(value, list):
        value = [entry.get("template") for entry in value if isinstance(entry, dict)]
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
