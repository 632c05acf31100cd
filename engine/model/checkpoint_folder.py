"""A checkpoint as `transformers` saves it: a folder with config.json, safetensors and the files of a tokenizer."""

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

from chairlift.service.engine_protocol import TEMPLATE_FOLDER, TOKENIZER_FILE_NAMES
from engine.errors import CheckpointError
from engine.model import modelopt
from engine.model.checkpoint_file import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES, exists, read_bytes, read_json
from engine.model.config_fields import ConfigFields
from engine.model.mlx import with_mlx_section
from engine.model.named_end_token import named_end_token_id
from engine.model.safetensors_file import read_safetensors_header
from engine.model.tensor_entry import TensorEntry
from engine.model.text_part import decoder_names

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20

_WEIGHTS_ADVICE = {
    "adapter_config.json": "a LoRA adapter: serve its base model with --lora NAME=PATH of this folder",
    "*.gguf": "in the format of llama.cpp: pass the file itself as --model",
    "pytorch_model*.bin": "pickled weights: convert them with transformers (from_pretrained, save_pretrained)",
    "consolidated*": "in the format of its publisher: download the repository's model*.safetensors too",
    "*.pth": "in the format of its publisher: serve a repository in the format of transformers",
    "*.onnx": "an exported graph: serve the repository of the original weights in safetensors",
    "*.safetensors": f"with another name: weights are {SINGLE_FILE}, or the files that {INDEX_FILE} names",
}
"""What a file without usable weights beside it is, and what to do; the first match counts."""

_CONFIG_ADVICE = _WEIGHTS_ADVICE | {
    "*.safetensors": "weights: download config.json and the other files of the repository too",
    "snapshots/*/config.json": "of a checkpoint in the hub's cache: pass the folder of that file",
    "*/config.json": "of a checkpoint in a folder below: pass that folder",
}
"""The same for a folder without config.json."""

_TOKENIZER_ADVICE = {
    "tokenizer.model": "SentencePiece: convert it with transformers (AutoTokenizer.from_pretrained, save_pretrained)",
    "*tiktoken*": "tiktoken: convert it with transformers (AutoTokenizer.from_pretrained, save_pretrained)",
    "tekken.json": "Mistral's own format: use the tokenizer.json of a repository in the format of transformers",
    "vocab.json": "a slow tokenizer: convert it with transformers (AutoTokenizer.from_pretrained, save_pretrained)",
}

_MAX_TEMPLATE_BYTES = 1 << 20
_MAX_TEMPLATES = 64


class CheckpointFolder:
    """A folder, of which no more is read than a method needs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> ConfigFields:
        """Reads config.json, with other names of `quantization_config`, and the settings of MLX or ModelOpt as one.

        Raises: CheckpointError: it is missing, with what the folder has instead; or a file cannot be read.
        """
        if not exists(self.path / "config.json"):
            raise CheckpointError(
                f"{self.path / 'config.json'}: no such file; a checkpoint is a folder with config.json"
                f"{_instead(self.path, _CONFIG_ADVICE)}"
            )
        fields = with_mlx_section(ConfigFields.from_file(self.path / "config.json"))
        if "quantization_config" not in fields and "compression_config" in fields:
            fields = fields.replaced({"quantization_config": fields.raw("compression_config")})
        if "quantization_config" not in fields and exists(self.path / modelopt.FILE):
            section = modelopt.modelopt_section(ConfigFields.from_file(self.path / modelopt.FILE))
            return fields if section is None else fields.replaced({"quantization_config": section})
        return fields

    def generation_config(self) -> ConfigFields | None:
        """Reads generation_config.json.

        Raises: CheckpointError: it cannot be read.
        """
        path = self.path / "generation_config.json"
        return ConfigFields.from_file(path) if exists(path) else None

    def description(self) -> bytes:
        """Returns config.json, and the settings of ModelOpt."""
        paths = self.path / "config.json", self.path / modelopt.FILE
        return b"".join(read_bytes(path, MAX_JSON_BYTES) for path in paths if path == paths[0] or exists(path))

    def require_tokenizer(self) -> None:
        """Checks that there is a tokenizer.json.

        Raises: CheckpointError: there is none.
        """
        if not exists(self.path / "tokenizer.json"):
            raise CheckpointError(
                f"{self.path / 'tokenizer.json'} is missing: a tokenizer in the Hugging Face format is required"
                f"{_instead(self.path, _TOKENIZER_ADVICE)}"
            )

    def tokenizer_files(self) -> dict[str, bytes]:
        """Reads the files of the tokenizer and the chat templates.

        Raises: CheckpointError: one cannot be read, or is too large.
        """
        if not exists(self.path / "tokenizer.json"):
            return {}
        names = [name for name in TOKENIZER_FILE_NAMES if exists(self.path / name)] + _template_names(self.path)
        return {name: read_bytes(self.path / name, _max_bytes(name)) for name in names}

    def named_end_token_id(self) -> int | None:
        """Reads which token the tokenizer's files call `eos_token`.

        Raises: CheckpointError: a file cannot be read.
        """
        return named_end_token_id(self.path)

    def weights_files(self) -> list[Path]:
        """Returns the one file, or those that the index names.

        Beside the one file an index is of other weights, such as those that a tool has quantised to it: `transformers`
        ignores it too.

        Raises: CheckpointError: there are none, the index cannot be read, or a file is missing.
        """
        if exists(self.path / SINGLE_FILE):
            return [self.path / SINGLE_FILE]
        index_path = self.path / INDEX_FILE
        if not exists(index_path):
            raise CheckpointError(
                f"{self.path}: has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read"
                f"{_instead(self.path, _WEIGHTS_ADVICE)}"
            )
        try:
            names = sorted(set(read_json(index_path, MAX_INDEX_BYTES)["weight_map"].values()))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index_path}: cannot be read as an index with a weight_map: {error!r}") from error
        files = []
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{index_path}: weight_map names {name!r}, expected a file beside it")
            if not exists(self.path / name):
                raise CheckpointError(
                    f"{self.path / name}: missing, one of {len(names)} files that {index_path.name} names; download it"
                )
            files.append(self.path / name)
        return files

    def tensors(self, file: Path) -> dict[str, TensorEntry]:
        """Reads the header of a file.

        Raises: CheckpointError: see `read_safetensors_header`.
        """
        return read_safetensors_header(file)

    def decoder_names(self) -> Callable[[str], str | None]:
        """Returns the names of the decoder; tensors for images have none.

        Raises: CheckpointError: config.json cannot be read.
        """
        return decoder_names(self.path)


def format_of(name: str) -> str:
    """Says what a file of this name is, and what to do; empty if the name is of no known format."""
    if fnmatch(name, "model*.safetensors"):
        return "; pass the folder that holds it"
    advice = (what for pattern, what in _WEIGHTS_ADVICE.items() if fnmatch(name, pattern))
    return f". It is {what}" if (what := next(advice, None)) else ""


def _instead(folder: Path, advice: dict[str, str]) -> str:
    """Names the first file that has another format, and says what to do; empty if there is none."""
    for pattern, what in advice.items():
        if found := sorted(folder.glob(pattern)):
            return f". The folder has {str(found[0].relative_to(folder))!r}, {what}"
    return ""


def _template_names(model_dir: Path) -> list[str]:
    folder = model_dir / TEMPLATE_FOLDER
    try:
        names = sorted(path.name for path in folder.iterdir() if path.name.endswith(".jinja"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from error
    if len(names) > _MAX_TEMPLATES:
        raise CheckpointError(f"{folder}: has {len(names)} templates, at most {_MAX_TEMPLATES} are read")
    return [f"{TEMPLATE_FOLDER}/{name}" for name in names]


def _max_bytes(name: str) -> int:
    if name.endswith(".jinja"):
        return _MAX_TEMPLATE_BYTES
    return MAX_TOKENIZER_BYTES if name == "tokenizer.json" else MAX_JSON_BYTES
