"""`chairlift generate`: streams the generated text, and nothing else, to standard output."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from google.protobuf.json_format import MessageToJson

from chairlift import Client, GenerationError, GenerationOptions, GenerationStream
from chairlift.v1 import generation_service_pb2 as pb
from frontend.cli.error_line import error_line
from frontend.cli.generate_flags import generate_parser, generation_options, prompt_text
from frontend.cli.server_options import tls_from_arguments


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 after an error of the call; exits with 2 at a bad flag."""
    parser = generate_parser()
    arguments = parser.parse_args(argv)
    if arguments.system is not None and not arguments.chat:
        parser.error("--system needs --chat")
    tls = tls_from_arguments(parser, arguments)
    try:
        text = prompt_text(arguments)
        options = generation_options(arguments, text)
        with Client(arguments.target, tls=tls) as client:
            is_collected = arguments.json or arguments.num_answers not in (None, 1)
            print_answer = _print_collected if is_collected else _print_stream
            endings = _with_retries(print_answer, client, arguments, text, options)
        for number, finished in enumerate(endings, start=1):
            whose = f"chairlift generate: answer {number}" if len(endings) > 1 else "chairlift generate"
            if arguments.max_tokens is None and finished.reason == pb.FINISH_REASON_MAX_TOKENS:
                num_tokens = finished.usage.num_output_tokens
                print(
                    f"{whose}: stopped at the limit of {num_tokens} tokens; raise --max-tokens for more",
                    file=sys.stderr,
                )
            if arguments.stats:
                print(f"{whose}: {_stats(finished)}", file=sys.stderr)
    except ValueError as error:
        parser.error(str(error))
    except GenerationError as error:
        print(f"chairlift generate: {error_line(error, arguments.target)}", file=sys.stderr)
        return 1
    return 0


def _with_retries(
    print_answer: Callable[[Client, argparse.Namespace, str, GenerationOptions], list[pb.Finished]],
    client: Client,
    arguments: argparse.Namespace,
    text: str,
    options: GenerationOptions,
) -> list[pb.Finished]:
    """Calls print_answer, with --retry again at each time for which the server has booked a slot."""
    while True:
        try:
            return print_answer(client, arguments, text, options)
        except GenerationError as error:
            if not (arguments.retry and error.retry_ticket and error.retry_delay_s is not None):
                raise
            print(f"chairlift generate: {error.message}; retrying in {error.retry_delay_s:.1f} s", file=sys.stderr)
            time.sleep(error.retry_delay_s)
            options["retry_ticket"] = error.retry_ticket


def _print_stream(
    client: Client, arguments: argparse.Namespace, text: str, options: GenerationOptions
) -> list[pb.Finished]:
    prompt = None if arguments.chat else text
    last_text = ""
    try:
        with client.stream(prompt, timeout_s=arguments.timeout, **options) as stream:
            for new_text in _texts(stream):
                sys.stdout.write(new_text)
                sys.stdout.flush()
                last_text = new_text or last_text
    except (GenerationError, KeyboardInterrupt):
        if last_text and not last_text.endswith("\n"):
            print(flush=True)  # the error, or the shell's prompt, starts a new line
        raise
    if not last_text.endswith("\n"):
        print(flush=True)
    return [] if stream.finished is None else [stream.finished]


def _texts(stream: GenerationStream) -> Iterator[str]:
    """Yields the prompt if requested, then the answer's text as it arrives."""
    has_started = False
    for chunk in stream:
        if stream.started is not None and not has_started:
            yield stream.started.prompt.text
        has_started = True
        yield chunk.text
    if stream.started is not None and not has_started:
        yield stream.started.prompt.text


def _print_collected(
    client: Client, arguments: argparse.Namespace, text: str, options: GenerationOptions
) -> list[pb.Finished]:
    prompt = None if arguments.chat else text
    response = client.generate(prompt, timeout_s=arguments.timeout, **options)
    endings = [response.finished, *(other.finished for other in response.other_answers)]
    if arguments.json:
        print(MessageToJson(response, preserving_proto_field_name=True, ensure_ascii=False), flush=True)
        return endings
    answers = [response.text, *(other.text for other in response.other_answers)]
    for number, answer in enumerate(answers, start=1):
        print(f"==> answer {number} of {len(answers)} <==")  # the separator of head and tail
        print(response.prompt.text + answer, end="" if answer.endswith("\n") else "\n", flush=True)
    return endings


def _stats(finished: pb.Finished) -> str:
    usage, timing = finished.usage, finished.timing
    reason = pb.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
    moved_s = timing.moved.ToTimedelta().total_seconds()
    moved = f" ({moved_s:.3f} s of it in failover)" if moved_s else ""
    return (
        f"{usage.num_prompt_tokens} prompt tokens ({usage.num_cached_tokens} cached), {usage.num_output_tokens} output "
        f"tokens, first after {timing.first_token.ToTimedelta().total_seconds():.3f} s, "
        f"all after {timing.total.ToTimedelta().total_seconds():.3f} s{moved}, ended by {reason}"
    )
