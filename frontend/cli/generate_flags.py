"""The flags of `chairlift generate`, and the options of the request that they say."""

import argparse
import sys
from pathlib import Path

from chairlift import GenerationOptions
from chairlift.service.flags import FlagParser
from frontend.cli.server_options import add_server_arguments

_STDIN = "-"


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

    sampling = parser.add_argument_group("sampling", "what is not given is the model's own default")
    sampling.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    sampling.add_argument("--top-p", type=float, metavar="X", help="smallest set of tokens of this probability")
    sampling.add_argument("--top-k", type=int, metavar="N", help="the N most probable tokens; 0: all")
    sampling.add_argument("--min-p", type=float, metavar="X", help="tokens at least X times as probable as the best")
    sampling.add_argument("--repetition-penalty", type=float, metavar="X", help="of tokens seen; 1 is off")
    sampling.add_argument("--presence-penalty", type=float, metavar="X", help="of tokens in the answer; 0 is off")
    sampling.add_argument("--frequency-penalty", type=float, metavar="X", help="the same, per occurrence; 0 is off")
    sampling.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same tokens")

    form = parser.add_argument_group("form of the answer", "at most one")
    forms = form.add_mutually_exclusive_group()
    forms.add_argument("--json-schema", metavar="FILE", help="JSON of this schema; - reads it from standard input")
    forms.add_argument("--json-object", action="store_true", help="any JSON object")
    forms.add_argument("--regex", metavar="REGEX", help="a text that this matches")
    forms.add_argument("--choice", action="append", metavar="TEXT", help="this text; may be repeated: one of them")
    forms.add_argument("--grammar", metavar="FILE", help="what this grammar makes, Lark or GBNF; - reads it too")

    ending = parser.add_argument_group("ending")
    ending.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate (default: 256)")
    ending.add_argument("--time-budget", type=float, metavar="S", help="end after so many seconds, with what there is")
    ending.add_argument("--min-tokens", type=int, metavar="N", help="no end before this many tokens")
    ending.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    ending.add_argument(
        "--stop-token-id", action="append", type=int, metavar="N", help="end at this token; may be repeated"
    )
    ending.add_argument("--include-stop-text", action="store_true", help="print the stop text too")
    ending.add_argument("--ignore-end-token", action="store_true", help="do not end at the model's end token")
    ending.add_argument("--keep-special-tokens", action="store_true", help="print special tokens too")
    ending.add_argument(
        "--priority", type=int, metavar="N", help="lower runs first, where the engine schedules by priority"
    )
    return parser


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
    options: GenerationOptions = {
        "model": arguments.model,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "top_k": arguments.top_k,
        "min_p": arguments.min_p,
        "repetition_penalty": arguments.repetition_penalty,
        "presence_penalty": arguments.presence_penalty,
        "frequency_penalty": arguments.frequency_penalty,
        "seed": arguments.seed,
        "max_tokens": arguments.max_tokens,
        "min_tokens": arguments.min_tokens,
        "stop_texts": arguments.stop,
        "stop_token_ids": arguments.stop_token_id,
        "include_stop_text": arguments.include_stop_text,
        "ignore_end_token": arguments.ignore_end_token,
        "keep_special_tokens": arguments.keep_special_tokens,
        "priority": arguments.priority,
        "num_answers": arguments.num_answers,
        "time_budget_s": arguments.time_budget,
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
