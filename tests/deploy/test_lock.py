"""Lock files of the images: complete, hashed, within the ranges of pyproject.toml; and who reads them."""

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.requirements import requirements

ENTRY = re.compile(
    r"^([a-z0-9.\-_]+)==(\S+)( ; [^\\\n]+)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE
)
ENGINE = "engine-engines-gguf-transformers"
FRONTEND = "frontend-engines-otel"
LOCKS = ("build", ENGINE, f"{ENGINE}-gpu", "torch", FRONTEND, "loadgen")


def versions(root: Path, *names: str) -> dict[str, str]:
    """What pip installs in an image, whose Python is 3.11."""
    environment = {"python_version": "3.11", "python_full_version": "3.11.9", "sys_platform": "linux"}
    found: dict[str, str] = {}
    for name in names:
        for match in ENTRY.finditer((root / "deploy" / "lock" / f"{name}.txt").read_text()):
            if match[3] is None or Marker(match[3].removeprefix(" ; ")).evaluate(environment):
                assert match[1] not in found, f"{match[1]} has two versions"
                found[canonicalize_name(match[1])] = match[2]
    return found


def test_a_package_may_have_a_version_for_each_version_of_python(lock: ModuleType) -> None:
    text = "".join(
        f"numpy=={version} ; python_full_version {bound} '3.12' \\\n    --hash=sha256:{version[-1] * 64}\n"
        for version, bound in (("2.4.4", "<"), ("2.5.5", ">="))
    )
    assert "".join(f"{entry}\n" for entry in lock.entries(text)) == text


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_is_versions_and_hashes_and_names_no_index(root: Path, name: str) -> None:
    text = (root / "deploy" / "lock" / f"{name}.txt").read_text()
    assert text.startswith("# Written by `make lock`.\n")
    assert ENTRY.sub("", text) == "# Written by `make lock`.\n", "something has no version, no hash, or is no package"
    assert "://" not in text


@pytest.mark.parametrize(
    ("extras", "locks"),
    [
        (ENGINE.split("-"), [ENGINE, f"{ENGINE}-gpu", "torch"]),
        (FRONTEND.split("-"), [FRONTEND]),
        (["loadgen"], ["loadgen"]),
    ],
)
def test_what_an_image_asks_for_is_locked_within_its_range(root: Path, extras: list[str], locks: list[str]) -> None:
    locked = versions(root, *locks)
    for line in requirements(root / "pyproject.toml", extras):
        wanted = Requirement(line)
        assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), f"{line}: run `make lock`"


def test_the_engine_image_for_cpus_has_nothing_of_gpus(root: Path) -> None:
    names = versions(root, ENGINE)
    assert not [name for name in names if name.startswith(("torch", "triton", "nvidia", "cuda"))]


def test_every_image_has_a_lock_file_and_all_share_one_base(root: Path) -> None:
    services = yaml.safe_load((root / "compose.yaml").read_text())["services"]
    builds = [service["build"]["args"] for service in services.values() if "build" in service]
    for args in builds:
        assert (root / "deploy" / "lock" / f"{args['EXTRA'].replace(',', '-')}.txt").exists()
    dockerfile = (root / "deploy" / "Dockerfile").read_text()
    (base,) = re.findall(r"^ARG BASE=(python:3\.11-slim@sha256:[0-9a-f]{64})$", dockerfile, re.MULTILINE)
    assert {args["BASE"] for args in builds} == {f"${{BASE_IMAGE:-{base}}}"}


def test_the_dockerfile_installs_nothing_without_a_hash(root: Path) -> None:
    text = (root / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip [^\n&;|]*\binstall\b[^\n&;|]*", text)
    assert len(installs) == 4
    for install in installs:
        assert "--require-hashes" in install or "--no-index" in install, install


class Answer:
    """Of urlopen."""

    def __init__(self, body: bytes, **headers: str) -> None:
        self.headers = headers
        self._body = body

    def read(self) -> bytes:
        return self._body

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def wheel(build: str, python: str, system: str, digest: str) -> str:
    name = f"torch-2.13.0%2B{build}-{python}-{python}-{system}.whl"
    return f'<a href="/whl/{build}/{name}#sha256={digest}" data-x="y">{name}</a>\n'


@pytest.fixture
def lock(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """deploy/lock.py, which writes into a folder of the test's."""
    monkeypatch.syspath_prepend(str(root / "deploy"))
    module = importlib.import_module("deploy.lock")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    return module


def test_hashes_of_the_cpu_builds_are_added_to_those_of_the_package_index(
    lock: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (
        wheel("cpu", "cp311", "manylinux_2_28_x86_64", "a" * 64)
        + wheel("cpu", "cp312", "manylinux_2_28_x86_64", "b" * 64)
        + wheel("cpu", "cp311", "win_amd64", "c" * 64)
        + wheel("cpu", "cp311", "manylinux_2_28_aarch64", "d" * 64)
    )
    monkeypatch.setattr(lock.urllib.request, "urlopen", lambda *_, **__: Answer(page.encode()))
    block = f"torch==2.13.0 \\\n    --hash=sha256:{'e' * 64}"
    unreached: list[str] = []
    hashes = lock.torch_hashes(block, [lock.TORCH_CPU_INDEX], unreached)
    assert (hashes, unreached) == ([f"sha256:{'a' * 64}", f"sha256:{'d' * 64}"], [])
    assert [lock.with_hashes(block, hashes).count(letter * 64) for letter in "aed"] == [1, 1, 1]


def test_an_index_that_does_not_answer_is_named_and_its_hashes_are_kept(
    lock: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(lock.urllib.request, "urlopen", refuse)
    (tmp_path / "torch.txt").write_text(f"torch==2.13.0 \\\n    --hash=sha256:{'a' * 64}\n")
    unreached: list[str] = []
    assert lock.torch_hashes("torch==2.13.0 \\", ["https://index.example/cpu"], unreached) == [f"sha256:{'a' * 64}"]
    assert lock.torch_hashes("torch==2.14.0 \\", ["https://index.example/cpu"], unreached) == [], "another version's"
    lock.pin_base_image(unreached)
    assert unreached == [
        *["hashes of torch from https://index.example/cpu: no network"] * 2,
        "digest of library/python:3.11-slim: no network",
    ]


def test_the_digest_of_the_base_image_is_written_wherever_it_is_named(
    lock: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old, new = f"python:3.11-slim@sha256:{'0' * 64}", f"sha256:{'1' * 64}"
    answers = [Answer(json.dumps({"token": "t"}).encode()), Answer(b"", **{"Docker-Content-Digest": new})]
    monkeypatch.setattr(lock.urllib.request, "urlopen", lambda *_, **__: answers.pop(0))
    (tmp_path / "deploy").mkdir()
    for path in (tmp_path / "deploy" / "Dockerfile", tmp_path / "compose.yaml"):
        path.write_text(f"ARG BASE={old}\nBASE: ${{BASE_IMAGE:-{old}}}\n")
    lock.pin_base_image([])
    for path in (tmp_path / "deploy" / "Dockerfile", tmp_path / "compose.yaml"):
        assert path.read_text() == f"ARG BASE=python:3.11-slim@{new}\nBASE: ${{BASE_IMAGE:-python:3.11-slim@{new}}}\n"
