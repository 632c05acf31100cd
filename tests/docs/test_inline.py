"""Code in sentences and tables is code that there is: commands, flags, variables, files."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from frontend.cli.main import COMMANDS
from loadgen.cli.main import VERBS
from tests.docs.pages import ROOT, Inline, inline_code
from tests.docs.programs import COMPOSE_VERBS, flags, knows

FOLDERS = ("protos", "frontend", "engine", "kernels", "loadgen", "tests", "docs", "deploy", ".ci")
OURS = ("chairlift", "chairlift-engine", "chairlift-frontend", "chairlift-loadgen", "make", "docker-compose")
# Flags of programs that the parsers above do not know -> whose they are.
FOREIGN_FLAGS = {
    "--no-": "any switch",
    "--help": "any program",
    "--local-dir": "hf",
    "--revision": "hf",
    **dict.fromkeys(
        ("--ctx-size", "--parallel", "--batch-size", "--tensor-split", "--rpc", "--jinja", "--metrics", "--spec-type"),
        "llama.cpp",
    ),
    **dict.fromkeys(("--max-total-tokens", "--max-batch-size", "--max-batch-prefill-tokens"), "TGI"),
    **dict.fromkeys(("--model-id", "--max-concurrent-requests", "--num-shard", "--quantize", "--speculate"), "TGI"),
    **dict.fromkeys(
        (
            "--enable-auto-tool-choice",
            "--lora-modules",
            "--structured-outputs-config",
            "--master-port",
            "--kv-events-config",
        ),
        "vLLM",
    ),
    "--grammar-backend": "SGLang",
    **dict.fromkeys(("--cpunodebind", "--membind", "--interleave"), "numactl"),
}
# Files and folders that come to be when something runs.
MADE = {"bench-results", "loadgen-results", "compose.override.yaml"}
INLINE = sorted({(code.page, code.text): code for code in inline_code()}.values(), key=str)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
VARIABLE = re.compile(r"\bCHAIRLIFT_[A-Z_]+\b")
FILE = re.compile(r"[\w.-]+(/[\w.-]+)*(/|\.(py|proto|yml|yaml|sh|go|js))")


def words_of(code: Inline) -> list[str]:
    """As the shell splits it; what stands for a number is one."""
    try:
        words = [word.removeprefix(".venv/bin/") for word in shlex.split(code.text)]
    except ValueError:  # no shell's
        return []
    stand_ins = [(r"[A-Z]", "1"), (r"(NAME=)?(NAME|\.\.\.)", r"\1list")]
    for pattern, value in stand_ins:
        words = [re.sub(rf"^{pattern}$", value, word) for word in words]
    return words


def is_command(code: Inline) -> bool:
    match words_of(code):
        case ["docker", "compose", _, *_]:
            return True
        case ["python", "-m", module, *_]:
            return module.split(".")[0] in FOLDERS
        case [program, _, *_]:
            return program in OURS
    return False


def those_with(pattern: re.Pattern[str]) -> dict[str, Inline]:
    """What matches, and one place where it is said."""
    return {match: code for code in INLINE for match in pattern.findall(code.text)}


@pytest.mark.parametrize("code", [code for code in INLINE if is_command(code)], ids=str)
def test_a_command_has_the_verbs_and_flags_that_it_is_said_to_have(code: Inline) -> None:
    words = words_of(code)
    for choices in [word for word in words if re.fullmatch(r"(\w+=)?\w+(\|\w+)+", word)] or [""]:
        name, _, values = choices.rpartition("=")
        for value in values.split("|"):
            knows([f"{name}={value}".lstrip("=") if word == choices else word for word in words])


@cache
def all_flags() -> set[str]:
    """Of our programs, as their parsers know them; of the small ones beside them, as their source adds them."""
    known = flags(["chairlift-engine"]) | flags(["chairlift-frontend"])
    known = known.union(*(flags(["chairlift", command]) for command in COMMANDS))
    known = known.union(*(flags(["chairlift-loadgen", verb]) for verb in VERBS))
    assert {"--max-num-seqs", "--max-queued-requests", "--smoke-test", "--num-answers", "--bisect"} <= known
    for folder in (
        "engine/bench",
        "loadgen/experiments",
        "protos/chairlift/bench",
        "tests/support/demo_model",
        "kernels/bench",
    ):
        for path in (ROOT / folder).rglob("*.py"):
            known |= set(re.findall(r'"(--[a-z][a-z0-9-]+)"', path.read_text()))
    for switches, values in COMPOSE_VERBS.values():
        known |= {flag for names in (*switches, *values) for flag in names.split("/")}
    return known | {"--profile", "--project-name"}  # of docker compose itself


@pytest.mark.parametrize("flag", sorted(those_with(FLAG)))
def test_a_flag_exists(flag: str) -> None:
    assert flag in FOREIGN_FLAGS or flag in all_flags(), those_with(FLAG)[flag]


@cache
def sources() -> str:
    """All that reads variables."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".js", ".go")]
    return "\n".join(path.read_text() for path in [*paths, ROOT / "compose.yaml"] if "docs" not in path.parts[:-3])


@pytest.mark.parametrize("name", sorted(those_with(VARIABLE)))
def test_a_variable_is_read(name: str) -> None:
    flag = "--" + name.removeprefix("CHAIRLIFT_").lower().replace("_", "-")
    assert flag in all_flags() or f'"{name}"' in sources() or f".{name}" in sources(), those_with(VARIABLE)[name]


@cache
def names() -> set[str]:
    """Of all files and folders of the repository."""
    return {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*")} | {*FOLDERS, "compose.yaml"}


@pytest.mark.parametrize("code", [code for code in INLINE if FILE.fullmatch(code.text)], ids=str)
def test_a_file_is_where_it_is_said_to_be(code: Inline) -> None:
    path = Path(code.text)
    if path.parts[0] in FOLDERS and len(path.parts) > 1:
        assert (ROOT / path).exists()
    elif len(path.parts) == 1 or code.text.endswith(".py"):
        assert path.name in names() | MADE
