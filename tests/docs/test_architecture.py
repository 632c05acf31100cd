"""docs/architecture.md names only files, classes and threads that exist, and all threads."""

import re
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from engine.core.config import SchedulingPolicyName

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
CODE = sorted(set(re.findall(r"`([^`\n]+)`", PAGE)))
THREAD = re.compile(r'(?:Thread\(.*name=|thread_name_prefix=|create_task\(.*name=)"([\w-]+)"')
PROGRAMS = {"chairlift-engine", "chairlift-frontend", "chairlift up"}


@cache
def sources() -> dict[Path, str]:
    """The programs' code, without what only tests and benchmarks use."""
    paths = [path for package in ("engine", "frontend", "kernels") for path in (ROOT / package).rglob("*.py")]
    return {path: path.read_text() for path in paths if "bench" not in path.parts and "testing" not in str(path)}


def threads() -> set[str]:
    """Names of threads, pools and tasks."""
    return {name for text in sources().values() for name in THREAD.findall(text)}


def is_defined(name: str, text: str) -> bool:
    """Whether there is a class, function, field, argument or file of that name."""
    return re.search(rf"(?:class|def) {name}\b|^\s+{name}: |\b{name}=", text, re.M) is not None


def is_there(word: str) -> bool:
    """Whether what the page names in backticks exists."""
    if word in {*PROGRAMS, *threads(), *get_args(SchedulingPolicyName)} or word.startswith(
        "--"
    ):  # flags: tests/docs/test_inline.py
        return True
    if "/" in word or (ROOT / word).is_dir() or re.search(r"\.(toml|md|py|proto)$", word):
        return (ROOT / word).exists()
    module = ROOT / (word.replace(".", "/") + ".py")
    if module.exists() or any((ROOT / package / word).exists() for package in ("kernels", "frontend", "engine")):
        return True
    if "." in word:
        owner, _, member = word.partition(".")
        return any(
            re.search(rf"^class {owner}\b", text, re.M) and is_defined(member, text) for text in sources().values()
        )
    return any(is_defined(word, text) for text in sources().values())


@pytest.mark.parametrize("word", CODE)
def test_what_is_named_exists(word: str) -> None:
    assert is_there(word)


def test_the_check_finds_what_does_not_exist() -> None:
    missing = ("engine/core/schedular.py", "Scheduler.plan_it", "engine.followers", "NoSuchThing", "grpc-oi", "x.toml")
    assert [word for word in missing if is_there(word)] == []


def test_every_thread_and_task_with_a_name_is_told() -> None:
    short_lived = {"engine-leaving", "compile-grammar", "http-connection", "last-spans"}
    assert threads() - set(CODE) == short_lived
