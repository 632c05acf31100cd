"""What a folder lacks is said by name, with what to do, before torch is imported."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import CheckpointError
from engine.model.checkpoint_file import open_regular
from engine.model.model_folder import check_folder, local_model
from engine.model.shapes import find_shape
from tests.hang import HANG_S
from tests.support.engine.process import ENVIRONMENT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the config.json of a supported model, and nothing else."""
    shape = find_shape("llama-3.2-1b")
    assert shape is not None
    (tmp_path / "config.json").write_bytes((shape / "config.json").read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "config.json: no such file; a checkpoint is a folder with config.json$"),
        (
            ["llama-q4.gguf"],
            "with config.json. The folder has 'llama-q4.gguf', in the format of llama.cpp: pass the file",
        ),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            "has 'adapter_config.json', a LoRA adapter: serve its base",
        ),
        (["params.json", "consolidated.00.pth"], "has 'consolidated.00.pth', in the format of its publisher"),
        (["model.safetensors"], "has 'model.safetensors', weights: download config.json and the other files"),
        (["snapshots/1f/config.json"], "has 'snapshots/1f/config.json', of a checkpoint in the hub's cache: pass the"),
        (["llama/config.json"], "has 'llama/config.json', of a checkpoint in a folder below: pass that folder"),
    ],
)
def test_a_folder_without_config_says_what_it_has(tmp_path: Path, names: list[str], words: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=words):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("README.md", "only safetensors are read$"),
        ("pytorch_model-00001-of-00002.bin", "has 'pytorch_model-00001-of-00002.bin', pickled weights: convert them"),
        ("consolidated.safetensors", "has 'consolidated.safetensors', in the format of its publisher: download"),
        ("weights.safetensors", "has 'weights.safetensors', with another name: weights are model.safetensors, or"),
        ("model-q8_0.gguf", "has 'model-q8_0.gguf', in the format of llama.cpp"),
    ],
)
def test_missing_weights_name_the_format_found(folder: Path, name: str, words: str) -> None:
    (folder / name).touch()
    with pytest.raises(CheckpointError, match=f"has neither model.safetensors nor .*{words}"):
        check_folder(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("README.md", "is required$"),
        ("tokenizer.model", "has 'tokenizer.model', SentencePiece: convert it with transformers"),
        ("tekken.json", "has 'tekken.json', Mistral's own format"),
        ("vocab.json", "has 'vocab.json', a slow tokenizer: convert it"),
    ],
)
def test_missing_tokenizer_names_the_format_found(folder: Path, name: str, words: str) -> None:
    (folder / "model.safetensors").touch()
    (folder / name).touch()
    with pytest.raises(CheckpointError, match=f"tokenizer.json is missing: .*{words}"):
        check_folder(folder)


def test_random_weights_need_neither_weights_nor_tokenizer(folder: Path) -> None:
    assert check_folder(folder, is_dummy=True).num_layers == 16


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_called_so(folder: Path, name: str) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").touch()
    (folder / name).write_text(pointer)
    with pytest.raises(CheckpointError, match=f"{name}: is a pointer of Git LFS, not the file itself: run `git lfs"):
        open_regular(folder / name)


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "../none", "~/none"])
def test_a_path_that_does_not_exist_is_looked_up_nowhere_else(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name}: no such file or folder$"):
        local_model(name)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("config.json", {"architectures": ["MambaForCausalLM"]}, "architectures is MambaForCausalLM: its layers keep"),
        ("config.json", {"quantization_config": {"quant_method": "exl2"}}, "quant_method is 'exl2', supported are fp8"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "MXFP8"}}, "quant_algo is 'MXFP8', supported of"),
    ],
)
def test_an_engine_refuses_without_importing_torch(
    folder: Path, tmp_path: Path, file: str, fields: dict[str, object], message: str
) -> None:
    """Their imports take longer than the rest of a refusal."""
    config = json.loads((folder / "config.json").read_text()) if file == "config.json" else {}
    (folder / file).write_text(json.dumps(config | fields))
    code = (
        "import sys; from engine.__main__ import main; status = main(sys.argv[1:]);"
        "print(status, sorted({'torch', 'numba', 'triton', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--model", str(tmp_path), "--uds", str(tmp_path / "engine.sock")],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.stdout == "2 []\n", done.stderr
    assert message in done.stderr.splitlines()[-1]


def test_a_folder_that_cannot_be_searched_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:  # root may search every folder
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "lstat", refuse)
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read: Permission denied"):
        check_folder(tmp_path)
