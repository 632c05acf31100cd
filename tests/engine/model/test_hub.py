"""Resolves names to folders, with a fake hub."""

import gc
import warnings
from fnmatch import fnmatch
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from chairlift.service.engine_protocol import TOKENIZER_FILE_NAMES
from engine.errors import CheckpointError
from engine.model import hub
from engine.model.hub import resolve_model


def allow(folder):
    """Checks nothing."""


def refused(error_class):
    response = SimpleNamespace(headers={}, request=None)
    return error_class("401 Client Error\nmore lines", response=response)


@pytest.fixture
def fetch(monkeypatch):
    """Makes the fake hub return a folder or raise an error; records the calls."""
    asked = []

    def set_answer(answer):
        def snapshot_download(repo_id, *, allow_patterns, tqdm_class):
            bar = tqdm_class(total=0, unit="B", name="huggingface_hub.snapshot_download", desc="Reconstructing")
            bar.total = 4_000_000_000
            bar.update(1_000_000_000)
            bar.close()
            asked.append((repo_id, allow_patterns))
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
        return asked

    return set_answer


def test_a_folder_is_returned_without_asking_the_hub(tmp_path, fetch):
    asked = fetch(AssertionError("the hub was asked for a folder that is here"))
    assert resolve_model(str(tmp_path), allow) == tmp_path
    assert not asked


def test_progress_is_reported_and_no_bar_is_drawn(tmp_path, fetch, capfd):
    fetch(str(tmp_path))
    told = []
    resolve_model("owner/name", allow, told.append)
    assert told[-1] == "fetching the model 25 % (1.00 of 4.00 GB)"
    assert capfd.readouterr().err == ""


def test_a_failed_download_reports_no_progress_afterwards(tmp_path, monkeypatch):
    told, bars = [], []

    def snapshot_download(repo_id, *, allow_patterns, tqdm_class):
        bars.append(tqdm_class(total=100, unit="B"))
        warnings.warn("Not enough free disk space", UserWarning, stacklevel=1)  # pytest makes an error of it
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="No space left on device"):
        resolve_model("owner/name", allow, told.append)
    told.clear()
    bars.clear()
    gc.collect()
    assert told == []


def test_hub_id_is_fetched_without_other_weight_formats(tmp_path, fetch):
    asked = fetch(str(tmp_path))
    assert resolve_model("owner/name", allow) == tmp_path
    (_, (repo_id, patterns)) = asked
    assert repo_id == "owner/name"
    fetched = [
        "config.json",
        "generation_config.json",
        "hf_quant_config.json",
        "model.safetensors",
        "model-00002-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    not_fetched = ["pytorch_model.bin", "consolidated.safetensors", "original/model.pth", "model.gguf", "README.md"]
    assert [name for name in fetched + not_fetched if any(fnmatch(name, each) for each in patterns)] == fetched


def test_a_model_that_cannot_be_served_costs_no_download_of_its_weights(tmp_path, fetch):
    def refuse(folder):
        assert folder == tmp_path
        raise CheckpointError("Mamba")

    asked = fetch(str(tmp_path))
    with pytest.raises(CheckpointError, match="Mamba"):
        resolve_model("owner/name", refuse)
    ((_, patterns),) = asked
    described = [*TOKENIZER_FILE_NAMES, "config.json", "model.safetensors.index.json"]
    weights = ["model.safetensors", "model-00002-of-00003.safetensors"]
    assert [name for name in described + weights if any(fnmatch(name, each) for each in patterns)] == described


def test_every_file_of_the_tokenizer_is_fetched(tmp_path, fetch):
    """Without one of them, a hub model would have another digest than the same model in a folder."""
    asked = fetch(str(tmp_path))
    resolve_model("owner/name", allow)
    (_, (_, patterns)) = asked
    left_out = [name for name in TOKENIZER_FILE_NAMES if not any(fnmatch(name, pattern) for pattern in patterns)]
    assert left_out == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (HFValidationError("bad"), r"x/y/z: no such file or folder, and not a Hugging Face hub id \(owner/name\)$"),
        (refused(RepositoryNotFoundError), "x/y/z: no such file or folder, and no such model on the Hugging Face hub"),
        (refused(HfHubHTTPError), "x/y/z: .* cannot be fetched from the Hugging Face hub: 401 Client Error$"),
        (
            LocalEntryNotFoundError("no route\nmore lines"),
            "x/y/z: .* cannot be fetched from the Hugging Face hub: no route$",
        ),
        (
            LocalEntryNotFoundError("Got: ConnectError: no such host"),
            "from the Hugging Face hub: ConnectError: no such host; check the network and HF_ENDPOINT, or pass",
        ),
        (HTTPError("refused"), "x/y/z: .* cannot be fetched from the Hugging Face hub: refused$"),
        (OSError("disk full"), "x/y/z: .* cannot be fetched from the Hugging Face hub: disk full$"),
    ],
)
def test_a_failed_download_is_an_error_with_the_reason(fetch, error, message):
    fetch(error)
    with pytest.raises(CheckpointError, match=message):
        resolve_model("x/y/z", allow)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors", "; pass the folder that holds it$"),
        ("model-00001-of-00002.safetensors", "; pass the folder that holds it$"),
        ("consolidated.safetensors", ". It is in the format of its publisher: download"),
        ("pytorch_model.bin", ". It is pickled weights: convert them with transformers"),
        ("notes.txt", "$"),
    ],
)
def test_a_file_is_rejected_with_its_format(tmp_path, name, words):
    file = tmp_path / name
    file.touch()
    with pytest.raises(
        CheckpointError, match=rf"{name}: is a file, expected a checkpoint folder or a GGUF file{words}"
    ):
        resolve_model(str(file), allow)


GGUF_FILES = [
    "model-Q4_K_M.gguf",
    "model-q8_0.gguf",
    "model-F16.gguf",
    "model-BF16.gguf",
    "mmproj-F16.gguf",
    "Q6_K/model-Q6_K-00001-of-00002.gguf",
    "Q6_K/model-Q6_K-00002-of-00002.gguf",
    "a-Q2_K.gguf",
    "b-Q2_K.gguf",
    "model-UD-IQ1_S.gguf",
    "model-IQ1_S.gguf",
]


@pytest.fixture
def repository(tmp_path, fetch):
    """A folder with GGUF files, which the fake hub returns; -> the calls."""
    for name in GGUF_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return fetch(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "fetched"),
    [
        ("Q4_K_M", GGUF_FILES[:1]),
        ("q4_k_m", GGUF_FILES[:1]),
        ("Q8_0", GGUF_FILES[1:2]),
        ("F16", [GGUF_FILES[2], GGUF_FILES[4]]),
        ("BF16", GGUF_FILES[3:4]),
        ("Q6_K", GGUF_FILES[5:7]),
        ("UD-IQ1_S", GGUF_FILES[9:10]),
    ],
)
def test_one_gguf_file_of_a_repository_is_fetched(tmp_path, repository, kind, fetched):
    assert resolve_model(f"owner/name:{kind}", allow) == tmp_path / fetched[0]
    ((repo_id, patterns),) = repository
    assert repo_id == "owner/name"
    assert [name for name in GGUF_FILES if any(fnmatch(name, pattern) for pattern in patterns)] == fetched


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Q5_K", "found none"),
        ("K_M", "found none"),
        ("Q2_K", r"found 2 files: a-Q2_K\.gguf, b-Q2_K\.gguf"),
    ],
)
@pytest.mark.usefixtures("repository")
def test_other_than_one_gguf_file_is_refused(kind, words):
    message = f"^owner/name:{kind}: expected one GGUF file with {kind} at the end of its name, {words}$"
    with pytest.raises(CheckpointError, match=message):
        resolve_model(f"owner/name:{kind}", allow)


def test_what_is_no_type_is_no_id():
    with pytest.raises(CheckpointError, match=r"owner/name:\*: no such file or folder, and not a Hugging Face hub id"):
        resolve_model("owner/name:*", allow)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (PermissionError(13, "Permission denied", "/cache/token"), "Permission denied: '/cache/token'"),
    ],
)
def test_a_cache_folder_that_cannot_be_written_is_a_one_line_error(fetch, error, words):
    fetch(error)
    with pytest.raises(CheckpointError, match=f"owner/name: no such file or folder, and cannot be fetched .*{words}"):
        resolve_model("owner/name", allow)


def test_a_folder_without_permission_is_an_error(monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.is_dir", refuse)
    with pytest.raises(CheckpointError, match=r"^/secret/model: cannot be accessed: Permission denied$"):
        resolve_model("/secret/model", allow)
