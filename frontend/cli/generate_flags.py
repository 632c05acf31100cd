"""The flags of `chairlift generate`, and the options of the request that they say."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from chairlift import GenerationOptions
from chairlift.service.flags import FlagParser
from chairlift.service.sampling_fields import SAMPLING, STOPPING, Parameter
from frontend.cli.server_options import add_server_arguments

_STDIN = "-"
_REPEATED = (("--stop", "stop_texts", str, "TEXT"), ("--stop-token-id", "stop_token_ids", int, "N"))


def generate_parser() -> argparse.ArgumentParser:
    """Knows all flags."""
    parser = FlagParser(prog="chairlift generate", description="Prints the text that the model generates, as it comes.")
    parser.add_argument("text", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a chat message, for models with a chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    add_server_arguments(parser)
    parser.add_argument("--timeout", type=float, metavar="S", help="deadline, seconds (default: the server's)")
    parser.add_argument("--model", help="model to use (default: the only one)")
    parser.add_argument(
        "--num-answers", type=int, metavar="N", help="answers to the prompt, each under a line of its own"
    )
    parser.add_argument("--echo", action="store_true", help="print the prompt before its answer")
    parser.add_argument("--stats", action="store_true", help="say on standard error what it took")
    parser.add_argument("--json", action="store_true", help="print everything that is known of the answer, as JSON")

    _add_parameters(parser.add_argument_group("sampling"), SAMPLING)

    form = parser.add_argument_group("form of the answer", "at most one")
    forms = form.add_mutually_exclusive_group()
    forms.add_argument("--json-schema", metavar="FILE", help="JSON of this schema; - reads it from standard input")
    forms.add_argument("--json-object", action="store_true", help="any JSON object")
    forms.add_argument("--regex", metavar="REGEX", help="a text that this matches")
    forms.add_argument("--choice", action="append", metavar="TEXT", help="this text; may be repeated: one of them")
    forms.add_argument("--grammar", metavar="FILE", help="what this grammar makes, Lark or GBNF; - reads it too")

    ending = parser.add_argument_group("ending")
    _add_parameters(ending, STOPPING)
    for flag, name, kind, metavar in _REPEATED:
        row = STOPPING[name]
        ending.add_argument(
            flag, action="append", type=kind, metavar=metavar, help=f"{row.rule.doc}. May be repeated. {row.limits}"
        )
    ending.add_argument("--keep-special-tokens", action="store_true", help="print special tokens too")
    ending.add_argument(
        "--priority", type=int, metavar="N", help="lower runs first, where the engine schedules by priority"
    )
    return parser


def _add_parameters(group: argparse._ArgumentGroup, table: Mapping[str, Parameter]) -> None:
    """Adds a flag for each number and switch of a table."""
    for row in table.values():
        flag, text = "--" + row.public_name.replace("_", "-"), f"{row.rule.doc}. {row.limits}".replace("%", "%%")
        if row.kind is bool:
            group.add_argument(flag, dest=row.name, action="store_true", default=None, help=text)
        elif row.kind in (int, float):
            unit = "S" if row.rule.unit else "N" if row.kind is int else "X"
            group.add_argument(flag, dest=row.name, type=row.kind, metavar=unit, help=text)


def prompt_text(arguments: argparse.Namespace) -> str:
    """The prompt.

    Raises:
        ValueError: standard input is to be read twice.
    """
    reading = [arguments.text, arguments.json_schema, arguments.grammar].count(_STDIN)
    if reading > 1:
        raise ValueError("standard input can be read once only: one of prompt, --json-schema and --grammar may be -")
    return sys.stdin.read() if arguments.text == _STDIN else arguments.text


def _content(flag: str, path: str | None) -> str | None:
    if path is None or path == _STDIN:
        return None if path is None else sys.stdin.read()
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise ValueError(f"{flag}: {path} cannot be read: {reason}; a file, or - for standard input") from error


def generation_options(arguments: argparse.Namespace, text: str) -> GenerationOptions:
    """The options of the request.

    Args:
        text: the prompt.

    Raises:
        ValueError: a file cannot be read; names the flag.
    """
    set_flags = {name: getattr(arguments, name) for name in (*SAMPLING, *STOPPING) if hasattr(arguments, name)}
    options: GenerationOptions = {
        **cast(GenerationOptions, set_flags),
        "model": arguments.model,
        "stop_texts": arguments.stop,
        "stop_token_ids": arguments.stop_token_id,
        "keep_special_tokens": arguments.keep_special_tokens,
        "priority": arguments.priority,
        "num_answers": arguments.num_answers,
        "echo": arguments.echo or None,
        "json_schema": _content("--json-schema", arguments.json_schema),
        "json_object": arguments.json_object or None,
        "regex": arguments.regex,
        "choice": arguments.choice,
        "grammar": _content("--grammar", arguments.grammar),
    }
    if arguments.chat:
        system = [] if arguments.system is None else [("system", arguments.system)]
        options["chat"] = [*system, ("user", text)]
    return options
