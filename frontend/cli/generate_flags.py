"""The flags of `chairlift generate`, and the request options made of them."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from chairlift import GenerationOptions
from chairlift.service.flags import Flag, FlagParser, add_flag
from chairlift.service.sampling_fields import SAMPLING, STOPPING, Parameter
from frontend.cli.server_options import WAIT, add_server_arguments

_STDIN = "-"
_REPEATED = (("--stop", "stop_texts", str, "TEXT"), ("--stop-token-id", "stop_token_ids", int, "N"))


def generate_parser() -> argparse.ArgumentParser:
    """Returns the parser with all flags."""
    parser = FlagParser(
        prog="chairlift generate",
        description="Generates text from a prompt and streams it to standard output. Unset sampling flags use the "
        "model's defaults; see docs/api.md for the ranges.",
    )
    parser.add_argument("text", help="prompt; - reads it from standard input")
    parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a chat message, for models with a chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat; needs --chat")
    add_server_arguments(parser)
    text = "deadline in seconds; the request fails when it passes (default: the server's)"
    add_flag(parser, Flag("--timeout", text, WAIT))
    parser.add_argument("--model", help="name of the model (default: the one that is served)")
    parser.add_argument(
        "--num-answers",
        type=int,
        metavar="N",
        help="number of answers to the prompt, printed under headings (default: 1)",
    )
    parser.add_argument("--echo", action="store_true", help="print the prompt before its answer")
    parser.add_argument("--stats", action="store_true", help="print token counts and times to standard error")
    parser.add_argument("--json", action="store_true", help="print the whole response as JSON")

    latency = parser.add_argument_group("latency targets")
    latency.add_argument("--service-class", metavar="NAME", help="service class of the server (default: the API key's)")
    latency.add_argument("--ttft", type=float, metavar="S", help="seconds to the first token (default: the class's)")
    latency.add_argument("--inter-token", type=float, metavar="S", help="seconds between tokens (default: the class's)")
    latency.add_argument(
        "--min-tokens-per-second", type=float, metavar="X", help="the same as a rate; excludes --inter-token"
    )
    latency.add_argument(
        "--retry", action="store_true", help="if the targets cannot be met now, wait for the slot that the server books"
    )

    _add_parameters(parser.add_argument_group("sampling"), SAMPLING)

    group = parser.add_argument_group("structured output", "at most one of these")
    formats = group.add_mutually_exclusive_group()
    formats.add_argument(
        "--json-schema", metavar="FILE", help="JSON that matches the JSON Schema in this file; - reads standard input"
    )
    formats.add_argument("--json-object", action="store_true", help="any JSON object")
    formats.add_argument("--regex", metavar="REGEX", help="text that matches this regular expression")
    formats.add_argument(
        "--choice", action="append", metavar="TEXT", help="one of these texts; repeat the flag for each"
    )
    formats.add_argument(
        "--grammar", metavar="FILE", help="text of the grammar in this file, Lark or GBNF; - reads standard input"
    )

    ending = parser.add_argument_group("ending")
    _add_parameters(ending, STOPPING)
    for flag, name, kind, metavar in _REPEATED:
        row = STOPPING[name]
        ending.add_argument(
            flag, action="append", type=kind, metavar=metavar, help=f"{row.rule.doc}. May be repeated. {row.limits}"
        )
    ending.add_argument("--keep-special-tokens", action="store_true", help="include special tokens in the answer")
    ending.add_argument(
        "--priority",
        type=int,
        metavar="N",
        help="lower values run first if the engine has --scheduling-policy priority (default: 0)",
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
    """Returns the prompt.

    Raises:
        ValueError: standard input would be read twice, or the prompt is not UTF-8.
    """
    reading = [arguments.text, arguments.json_schema, arguments.grammar].count(_STDIN)
    if reading > 1:
        raise ValueError("standard input can be read only once: one of prompt, --json-schema and --grammar may be -")
    try:
        return _utf8(sys.stdin.read() if arguments.text == _STDIN else arguments.text)
    except UnicodeError:
        raise ValueError("the prompt is not UTF-8") from None


def _content(flag: str, path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return _utf8(sys.stdin.read() if path == _STDIN else Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"{flag}: {path} cannot be read: {reason}; a file, or - for standard input") from error


def _utf8(text: str) -> str:
    """Returns the text; raises UnicodeError if it has bytes that Python could not decode (surrogate escapes)."""
    text.encode()
    return text


def generation_options(arguments: argparse.Namespace, text: str) -> GenerationOptions:
    """Returns the options of the request.

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
        "service_class": arguments.service_class,
        "ttft_s": arguments.ttft,
        "inter_token_s": arguments.inter_token,
        "min_tokens_per_second": arguments.min_tokens_per_second,
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
