"""Whether a command line means something to the program it is for: our programs are asked themselves, without running.

`accepts` wants a whole command; `knows` also takes the beginnings that sentences are content with.
"""

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import yaml

from engine.config import parse_config
from frontend.cli.main import main as chairlift
from frontend.config import parse_arguments
from loadgen.cli.main import main as loadgen
from tests.docs.pages import ROOT

_INCOMPLETE = re.compile(r"the following arguments are required|which (command|verb)\?")


class RefusedError(Exception):
    """A program has no such flag, value or verb."""


def accepts(words: Sequence[str]) -> None:
    """Returns if the program would begin to work.

    Raises: RefusedError: with what the program says.
    """
    _ask(list(words), whole=True)


def knows(words: Sequence[str]) -> None:
    """Returns if all verbs and flags exist, whatever is missing.

    Raises: RefusedError: with what the program says, or the flag that it does not have.
    """
    _ask(list(words), whole=False)


def _ask(words: list[str], *, whole: bool) -> None:
    match words:
        case ["chairlift-engine", *rest]:
            _parse(lambda: parse_config(rest, {}), whole, rest)
        case ["chairlift-frontend", *rest]:
            _parse(lambda: parse_arguments(rest, {}), whole, rest)
        case ["chairlift", *rest]:
            unknown = _parse(lambda: chairlift(rest), whole, rest if rest[:1] != ["up"] else [])
            if unknown:  # `up` hands them on
                _ask(["chairlift-engine", *unknown], whole=whole)
        case ["chairlift-loadgen", *rest]:
            _parse(lambda: loadgen(rest), whole, rest)
        case [python, "-m", module, *rest] if python.rpartition("/")[2].startswith("python"):
            with mock.patch.object(sys, "argv", [module, *rest]):
                _parse(lambda: _run_module(module), whole, rest)
        case ["make", *rest]:
            for line in make_lines(rest):
                if re.match(r"(chairlift(-\w+)?|python -m (engine|loadgen|kernels)\S*)( |$)", line):
                    _ask(shlex.split(line), whole=whole)
        case ["docker", "compose", *rest] | ["docker-compose", *rest]:
            _compose(rest, whole)
        case _:
            raise RefusedError(f"unknown program: {words[0]}")


def _run_module(module: str) -> None:
    """Runs a module; one without a parser of its own would do its work, so it is only looked up."""
    path = ROOT / (module.replace(".", "/") + ".py")
    if path.exists() and "argparse" not in path.read_text():
        return
    with warnings.catch_warnings():  # another test may have imported it: it runs anew all the same
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def flags(words: Sequence[str]) -> set[str]:
    """Those of a program or of one of its verbs."""
    seen: set[str] = set()
    with mock.patch.object(argparse.ArgumentParser, "exit", _note(seen)), contextlib.suppress(_ParsedError, SystemExit):
        _ask([*words, "--help"], whole=True)
    return seen


def _note(seen: set[str]) -> Callable[..., None]:
    def exit_(self: argparse.ArgumentParser, *_: object) -> None:
        seen.update(name for action in self._actions for name in action.option_strings)
        raise _ParsedError([])

    return exit_


class _ParsedError(Exception):
    """Stops a program behind its parser; holds what the parser did not know."""


def _parse(run: Callable[[], object], whole: bool, words: Sequence[str]) -> list[str]:
    """Runs a program until its command line is parsed; returns the words that its parser leaves to others."""
    parse, depth = argparse.ArgumentParser.parse_known_args, 0
    flags: set[str] = set()

    def parse_and_stop(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        nonlocal depth
        depth += 1
        flags.update(name for action in self._actions for name in action.option_strings)
        try:
            options, unknown = parse(self, args, namespace)
        finally:
            depth -= 1
        if depth == 0:
            raise _ParsedError(unknown)
        return options, unknown

    said = io.StringIO()
    status: object = 0
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", parse_and_stop),
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            status = run()
        except _ParsedError as parsed:
            unknown: list[str] = list(parsed.args[0])
            if unknown and words:
                raise RefusedError(f"unknown: {unknown}") from None
            return unknown
        except SystemExit as end:
            status = end.code
    complaint = said.getvalue()
    if status not in (0, None) and (whole or not _INCOMPLETE.search(complaint)):
        raise RefusedError(complaint.strip())
    strange = [word for word in words if word.startswith("--") and word.partition("=")[0] not in flags]
    if status not in (0, None) and strange and flags:
        raise RefusedError(f"unknown: {strange}")
    return []


def make_lines(arguments: Sequence[str]) -> list[str]:
    """The commands that `make` would run, installation aside, with programs by their bare names.

    Raises: RefusedError: there is no such target.
    """
    variables = [word for word in arguments if not word.startswith("-") and word != "&"]
    stamps = [word for name in (".installed", ".installed-dev") for word in ("-o", f".venv/{name}")]
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", *stamps, *variables],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "ARGS")},
    )
    if done.returncode != 0:
        raise RefusedError(done.stderr.strip())
    lines = [line.removeprefix("exec ").strip() for line in done.stdout.splitlines()]
    return [re.sub(r"^(\.venv/bin/|python3 )", lambda hit: "" if "/" in hit[0] else "python ", line) for line in lines]


def _compose(words: Sequence[str], whole: bool) -> None:
    """Compose's command line, as far as the pages use it, held against compose.yaml."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    profiles = {profile for service in services.values() for profile in service.get("profiles", ())}
    parser = _ComposeParser(prog="docker compose", allow_abbrev=False)
    parser.add_argument("--profile", action="append", choices=sorted(profiles), default=[])
    parser.add_argument("-f", "--file", action="append")
    parser.add_argument("-p", "--project-name")
    verbs = parser.add_subparsers(dest="verb", required=whole)
    for verb, (switches, values) in COMPOSE_VERBS.items():
        sub = verbs.add_parser(verb, allow_abbrev=False)
        for switch in switches:
            sub.add_argument(*switch.split("/"), action="store_true")
        for value in values:
            sub.add_argument(*value.split("/"), action="append")
        known = [*services, "SERVICE"]
        if verb in ("run", "exec"):
            sub.add_argument("service", choices=known)
            sub.add_argument("command", nargs=argparse.REMAINDER)
        else:
            sub.add_argument("services", nargs="*", type=_one_of(known))
    options = parser.parse_args(words)
    for scaled in getattr(options, "scale", None) or ():
        if scaled.partition("=")[0] not in services:
            raise RefusedError(f"no service {scaled}")
    if options.verb == "run" and options.service == "loadgen":
        _ask(["chairlift-loadgen", *options.command], whole=whole)


COMPOSE_VERBS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "up": (
        ("-d/--detach", "--build", "--wait", "--no-build", "--no-deps", "--force-recreate"),
        ("--scale", "-t/--timeout", "--wait-timeout"),
    ),
    "down": (("-v/--volumes", "--remove-orphans"), ("-t/--timeout",)),
    "run": (("--rm", "--no-deps", "-T"), ("-v/--volume", "--user", "-e/--env", "--entrypoint")),
    "exec": (("-T",), ("--user", "-e/--env")),
    "build": (("--no-cache", "--pull"), ("--build-arg",)),
    "kill": ((), ("-s/--signal",)),
    "logs": (("-f/--follow", "--no-log-prefix"), ("--tail", "--since")),
    "ps": (("-a/--all", "-q/--quiet"), ("--format",)),
    **dict.fromkeys(("start", "stop", "restart"), ((), ("-t/--timeout",))),
    "pull": (("-q/--quiet",), ()),
    "config": (("-q/--quiet", "--services", "--profiles"), ()),
}


class _ComposeParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise RefusedError(f"{self.prog}: {message}")


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"no service {text!r}")
        return text

    return check


def calls(words: Sequence[str]) -> Iterator[tuple[str, object]]:
    """What a command line of grpcurl asks for: (method or symbol, the request's JSON or None)."""
    parser = _ComposeParser(prog="grpcurl")
    parser.add_argument("-plaintext", action="store_true", required=True)
    parser.add_argument("-d", type=json.loads)
    parser.add_argument("-H", action="append")
    parser.add_argument("address")
    parser.add_argument("rest", nargs="+")
    options = parser.parse_args(list(words[1:]))
    match options.rest:
        case ["describe", symbol]:
            yield symbol, None
        case [method]:
            yield method, options.d if options.d is not None else {}
        case _:
            raise RefusedError(f"grpcurl: {options.rest}")
