"""docs/architecture.md: every file, name and thread that it has is in the code, and the code has no other threads."""

import re
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from engine.commands import Inbox
from engine.config import EngineConfig
from engine.core.config import SchedulerConfig, SchedulingPolicyName
from engine.grammar_compiler import NUM_THREADS
from engine.outgoing import MAX_UNSENT_TOKENS, STEP_WINDOW
from engine.step_log import MAX_QUEUED_STEPS
from frontend.child_process import LONGEST_PAUSE_S
from frontend.cli.engine_process import _FIRST_PAUSE_S
from frontend.config import FrontendConfig
from frontend.structured.compiler import _NUM_WORKERS

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
    short_lived = {"engine-leaving", "compile-grammar", "last-spans"}
    assert threads() - set(CODE) == short_lived


def test_numbers_are_the_codes() -> None:
    scheduler = SchedulerConfig(num_blocks=1, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1)
    pages = " ".join(PAGE.split())
    for words in (
        f"After `max_preemptions` ({scheduler.max_preemptions})",
        f"blocks of {scheduler.block_size} |",
        f"every {EngineConfig(model='').integrity_check_interval_s:g} s in live traffic",
        f"| {STEP_WINDOW} messages, 2^20 tokens |",
        f"| {Inbox.MAX_PENDING_COMMANDS:,} |",
        f"| {MAX_QUEUED_STEPS:,} steps, ",
        f"or {FrontendConfig().heartbeat_timeout_s:g} s of silence",
        f"after {_FIRST_PAUSE_S} s, doubled up to {LONGEST_PAUSE_S:g} s",
    ):
        assert words in pages, words
    assert MAX_UNSENT_TOKENS == 2**20
    assert (NUM_THREADS, _NUM_WORKERS) == (2, 2)  # "two"


def test_figures_are_those_of_the_page_on_performance() -> None:
    performance = (ROOT / "docs" / "performance.md").read_text()
    citations = re.findall(r"((?:(?!; |\(C|\||\)).)*)\((C\d+)\)", PAGE)
    assert len(citations) >= 9
    for text, number in citations:
        rows = set(re.findall(r"\d[\d.,]*\d", "".join(re.findall(rf"^\| {number} \|.*$", performance, re.M))))
        figures = re.findall(r"(\d[\d.,]*\d)(?=x| %| ms| tokens/s)", text)
        assert figures, f"{number} is named without a figure: {text}"
        assert [figure for figure in figures if figure not in rows] == [], f"{number}: {text}"


def test_an_afternoon_is_enough() -> None:
    """A minute is 15 to 35 lines."""
    rows = re.findall(r"^\| (`[^|]+) \| (\d+) \| [^|]+ \|$", PAGE.partition("## Reading order")[2], re.M)
    assert len(rows) >= 15
    for cells, minutes in rows:
        files = re.findall(r"`([^`]+)`", cells)
        num_lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
        assert num_lines / 35 <= int(minutes) <= num_lines / 15, f"{files}: {num_lines} lines"
    assert sum(int(minutes) for _, minutes in rows) <= 5 * 60
