"""`chairlift generate`: the generated text alone on standard output, as it comes, and the end of its last line."""

import argparse
import sys
from collections.abc import Sequence

from chairlift.v1 import generation_service_pb2 as pb
from frontend.cli.complaint import complaint
from frontend.cli.server_options import add_server_arguments, tls_from_arguments
from frontend.client import ChairliftClient, GenerationError, GenerationOptions
from frontend.config import OneLineParser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, 1 after an error of the call, 130 after Ctrl-C; exits with 2 at a bad flag."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.system is not None and not arguments.chat:
        parser.error("--system is part of a chat: add --chat")
    if arguments.timeout is not None and not arguments.timeout > 0:
        parser.error(f"--timeout is {arguments.timeout:g} seconds, it must be above 0")
    tls = tls_from_arguments(parser, arguments)
    try:
        text = sys.stdin.read() if arguments.text == "-" else arguments.text
        with (
            ChairliftClient(arguments.target, tls=tls) as client,
            client.stream(
                None if arguments.chat else text, timeout_s=arguments.timeout, **_options(arguments, text)
            ) as stream,
        ):
            ends_a_line = False
            for chunk in stream:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
                ends_a_line = chunk.text.endswith("\n") if chunk.text else ends_a_line
        if not ends_a_line:
            print(flush=True)
        if arguments.max_tokens is None and stream.finished and stream.finished.reason == pb.FINISH_REASON_MAX_TOKENS:
            num_tokens = stream.finished.usage.num_output_tokens
            print(f"chairlift generate: cut off after {num_tokens} tokens; --max-tokens allows more", file=sys.stderr)
    except ValueError as error:
        parser.error(str(error))
    except GenerationError as error:
        print(f"chairlift generate: {complaint(error, arguments.target)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _options(arguments: argparse.Namespace, text: str) -> GenerationOptions:
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
    }
    if arguments.chat:
        system = [] if arguments.system is None else [("system", arguments.system)]
        options["chat"] = [*system, ("user", text)]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="chairlift generate", description="Prints the text that the model generates, as it comes."
    )
    parser.add_argument("text", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a chat message, for models with a chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    add_server_arguments(parser)
    parser.add_argument("--timeout", type=float, metavar="S", help="deadline, seconds (default: none)")
    parser.add_argument("--model", help="model to use (default: the only one)")

    sampling = parser.add_argument_group("sampling", "what is not given is the model's own default")
    sampling.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    sampling.add_argument("--top-p", type=float, metavar="X", help="smallest set of tokens of this probability")
    sampling.add_argument("--top-k", type=int, metavar="N", help="the N most probable tokens; 0: all")
    sampling.add_argument("--min-p", type=float, metavar="X", help="tokens at least X times as probable as the best")
    sampling.add_argument("--repetition-penalty", type=float, metavar="X", help="of tokens seen; 1 is off")
    sampling.add_argument("--presence-penalty", type=float, metavar="X", help="of tokens in the answer; 0 is off")
    sampling.add_argument("--frequency-penalty", type=float, metavar="X", help="the same, per occurrence; 0 is off")
    sampling.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same tokens")

    ending = parser.add_argument_group("ending")
    ending.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate (default: 256)")
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
