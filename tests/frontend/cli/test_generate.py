"""`chairlift generate`: text alone on standard output, errors as one line on standard error."""

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys

import grpc
import pytest

from chairlift import GenerationError
from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from frontend.cli import generate
from frontend.cli.error_line import error_line
from frontend.cli.generate_flags import generate_parser, generation_options
from frontend.cli.main import main


def run(*argv):
    return asyncio.to_thread(main, ["generate", *argv])


def command(*argv):
    return [sys.executable, "-m", "frontend.cli.main", "generate", *argv]


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
ENVIRONMENT.pop("PYTHONUNBUFFERED", None)  # flushing is our own business


async def test_prints_the_text_alone(target, capsys):
    assert await run("hello wörld 🙂", "--target", target) == 0
    assert capsys.readouterr() == ("hello wörld 🙂\n", "")


async def test_characters_that_the_locale_lacks_are_replaced(target):
    process = await asyncio.create_subprocess_exec(
        *command("wörld 🙂!", "--target", target),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=ENVIRONMENT | {"PYTHONIOENCODING": "latin-1"},  # as in the locale de_DE.ISO-8859-1
    )
    assert await process.communicate() == ("wörld ?!\n".encode("latin-1"), b"")


async def test_api_key_of_the_environment_is_sent_over_tls(make_pair, make_authority, monkeypatch, capsys):
    authority = make_authority("ours")
    served, mine = authority.sign("server"), authority.sign("client")
    pair = await make_pair(
        tls_cert=served.cert, tls_key=served.key, tls_client_ca=authority.ca, api_key=("other", "the-key")
    )
    flags = ["--target", f"127.0.0.1:{pair.app.port}", "--tls-ca", str(authority.ca)]
    flags += ["--tls-cert", str(mine.cert), "--tls-key", str(mine.key)]
    monkeypatch.setenv("CHAIRLIFT_API_KEY", "the-key")
    assert await run("abc", *flags) == 0
    assert capsys.readouterr().out == "abc\n"
    monkeypatch.setenv("CHAIRLIFT_API_KEY", "wrong-key")
    assert await run("abc", *flags) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "UNAUTHENTICATED" in err
    assert "CHAIRLIFT_API_KEY" in err
    assert "wrong-key" not in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tls-ca", "no-such-file"], "no-such-file cannot be read: No such file"),
        (["--tls-cert", "no-such-file"], "--tls-cert and --tls-key belong together"),
    ],
)
async def test_unusable_files_are_named_in_the_error(flags, says, capsys):
    with pytest.raises(SystemExit) as caught:
        await run("abc", *flags)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


async def test_invalid_key_of_the_environment_is_not_quoted(target, monkeypatch, capsys):
    monkeypatch.setenv("CHAIRLIFT_API_KEY", "hidden\nkey")
    with pytest.raises(SystemExit):
        await run("abc", "--target", target)
    err = capsys.readouterr().err
    assert "the API key has other characters than printable ASCII" in err
    assert "hidden" not in err


async def test_answer_that_ends_with_a_line_break_gets_no_second_one(target, capsys):
    assert await run("a line\nand one more\n", "--target", target) == 0
    assert capsys.readouterr().out == "a line\nand one more\n"


async def test_flags_reach_the_engine(target, engine, capsys):
    flags = (
        "--max-tokens 9 --temperature 0 --seed 1 --top-p 0.5 --top-k 3 --min-p 0.25 --stop-token-id 7 --min-tokens 2"
    )
    assert await run("hello", "--target", target, *flags.split(), "--ignore-end-token", "--priority", "-3") == 0
    submission = engine.submissions[0]
    sampling, stops = submission.sampling, submission.stops
    assert (sampling.temperature, sampling.seed, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 1, 0.5, 3, 0.25)
    assert (stops.max_tokens, stops.min_tokens, list(stops.stop_token_ids)) == (9, 2, [7])
    assert stops.ignore_end_token
    assert submission.priority == -3


async def test_latency_targets_reach_the_engine(target, engine):
    flags = ["--ttft", "2.5", "--min-tokens-per-second", "25", "--service-class", "none-here"]
    assert await run("hello", "--target", target, *flags) == 0
    submission = engine.submissions[0]
    assert 0 < submission.ttft_remaining_ms <= 2500
    assert submission.inter_token_us == 40_000


def test_with_retry_the_request_comes_back_with_its_ticket(monkeypatch, capsys):
    slept_s, seen = [], []
    refusal = GenerationError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "too late", retry_delay_s=3.25, retry_ticket=b"ticket"
    )

    def answer(client, arguments, text, options):
        seen.append(options.get("retry_ticket"))
        if len(seen) == 1:
            raise refusal
        return []

    monkeypatch.setattr(generate, "_print_stream", answer)
    monkeypatch.setattr("time.sleep", slept_s.append)
    assert main(["generate", "hello", "--retry"]) == 0
    assert (slept_s, seen) == ([3.25], [None, b"ticket"])
    assert capsys.readouterr().err == "chairlift generate: too late; retrying in 3.2 s\n"
    seen.clear()
    assert main(["generate", "hello"]) == 1
    assert slept_s == [3.25]


async def test_stop_text(target, capsys):
    assert await run("one two three", "--target", target, "--stop", "tw", "--stop", "thr") == 0
    assert capsys.readouterr().out == "one \n"
    assert await run("one two three", "--target", target, "--stop", "tw", "--include-stop-text") == 0
    assert capsys.readouterr().out == "one tw\n"


async def test_chat(target, capsys):
    assert await run("hi", "--chat", "--system", "be brief", "--target", target) == 0
    assert capsys.readouterr().out == "<system>be brief<user>hi<assistant>\n"


async def test_several_answers_have_numbered_headings(target, engine, capsys):
    assert await run("ab", "--num-answers", "2", "--target", target) == 0
    assert capsys.readouterr().out == "==> answer 1 of 2 <==\nab\n==> answer 2 of 2 <==\nab\n"
    assert len(engine.submissions) == 2


async def test_echo_prints_the_prompt_first(target, capsys):
    assert await run("ab ", "--echo", "--target", target) == 0
    assert await run("ab ", "--echo", "--max-tokens", "0", "--target", target) == 0
    assert await run("ab ", "--echo", "--num-answers", "2", "--target", target) == 0
    assert capsys.readouterr().out == ("ab ab \nab \n==> answer 1 of 2 <==\nab ab \n==> answer 2 of 2 <==\nab ab \n")


async def test_json_contains_the_whole_response(target, capsys):
    assert await run("ab", "--json", "--echo", "--seed", "5", "--target", target) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["prompt"]["text"], answer["effective_sampling"]["seed"]) == ("ab", "ab", "5")
    assert answer["finished"]["reason"] == "FINISH_REASON_END_TOKEN"


async def test_stats_go_to_stderr(target, capsys):
    assert await run("ab", "--stats", "--target", target) == 0
    out, err = capsys.readouterr()
    assert out == "ab\n"
    pattern = (
        r"chairlift generate: 2 prompt tokens \(1 cached\), 3 output tokens, first after \d+\.\d{3} s, "
        r"all after \d+\.\d{3} s, ended by end_token\n"
    )
    assert re.fullmatch(pattern, err)


def test_stats_show_the_time_of_a_failover():
    finished = pb.Finished(reason=pb.FINISH_REASON_MAX_TOKENS)
    finished.timing.total.FromMilliseconds(7810)
    assert "all after 7.810 s, ended" in generate._stats(finished)
    finished.timing.moved.FromMilliseconds(4400)
    assert "all after 7.810 s (4.400 s of it in failover), ended by max_tokens" in generate._stats(finished)


async def test_target_may_have_the_load_generators_format(target, capsys):
    assert await run("ab", "--target", f"grpc://{target}") == 0
    assert capsys.readouterr().out == "ab\n"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://there:8000", "argument --target: http://there:8000 must be HOST:PORT or unix:PATH (see"),
        ("grpcs://there:1", "argument --target: grpcs://there:1 must be HOST:PORT or unix:PATH, with --tls (see"),
    ],
)
def test_target_in_another_format_is_refused_with_the_right_one(url, says, capsys):
    with pytest.raises(SystemExit):
        generate.main(["hello", "--target", url])
    assert says in capsys.readouterr().err


async def test_stats_of_several_answers_name_the_answer(target, capsys):
    flags = ("--num-answers", "2", "--ignore-end-token", "--stats")
    assert await run("ab", *flags, "--target", target) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(", ")[0] for line in lines] == [
        "chairlift generate: answer 1: stopped at the limit of 256 tokens; raise --max-tokens for more",
        "chairlift generate: answer 1: 2 prompt tokens (1 cached)",
        "chairlift generate: answer 2: stopped at the limit of 256 tokens; raise --max-tokens for more",
        "chairlift generate: answer 2: 2 prompt tokens (1 cached)",
    ]


class Said(io.StringIO):
    """Standard output that is waited for."""

    def __init__(self, awaited):
        super().__init__()
        self.has_come = asyncio.Event()
        self._awaited = awaited
        self._loop = asyncio.get_running_loop()

    def write(self, text):
        super().write(text)
        if self._awaited in self.getvalue():
            self._loop.call_soon_threadsafe(self.has_come.set)


async def test_error_in_the_middle_of_a_line_starts_a_new_one(target, engine, capsys, monkeypatch):
    def late(step):
        for completion in step.completions:
            completion.reason = engine_pb.COMPLETION_REASON_DEADLINE
        return [step]

    engine.pause()
    engine.rewrite_step = late
    said = Said("ab")
    monkeypatch.setattr(sys, "stdout", said)
    call = run("ab", "--ignore-end-token", "--max-tokens", "3", "--timeout", "50", "--target", target)
    status = asyncio.create_task(call)
    await engine.wait_for(lambda: engine.num_open == 1)
    assert 0 < engine.submissions[0].remaining_ms <= 50_500  # gRPC rounds it
    await engine.step()
    await engine.step()
    await said.has_come.wait()
    await engine.step()
    assert await status == 1
    assert said.getvalue() == "ab\n"
    assert capsys.readouterr().err.startswith("chairlift generate: DEADLINE_EXCEEDED: ")
    engine.resume()


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("failed to connect to all addresses; last error: Connection refused", "(no server at there:1? `chairlift up`"),
        ("failed to connect to all addresses; Tls handshake failed", "(does the server at there:1 use TLS, and"),
        ("failed to connect to all addresses; Socket closed", "(does the server at there:1 require TLS? Try --tls"),
        ("failed to connect to all addresses; Socket closed", "; for mutual TLS also --tls-cert)"),
        ("Stream removed (Socket closed)", "(the connection broke: "),
        (
            "failed to connect: Trying to connect an http1.x server",
            "(there:1 is an HTTP port; gRPC is usually on 50051)",
        ),
        ("failed to connect; Failed parsing HTTP/2 (Expected SETTINGS frame", "(there:1 is an HTTP port; gRPC is "),
        ("errors resolving there:1: Misformatted domain name", "(unknown host: is there:1 the HOST:PORT"),
    ],
)
def test_connection_error_suggests_a_cause(message, says):
    assert says in error_line(GenerationError(grpc.StatusCode.UNAVAILABLE, message), "there:1")
    assert says not in error_line(GenerationError(grpc.StatusCode.UNAVAILABLE, message, reason="DRAINING"), "there:1")


def test_flags_of_structured_output_and_time_budget_become_options(tmp_path, monkeypatch):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "string"}')
    grammar.write_text('start: "é"', encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("{}"))

    def options(*argv):
        arguments = generate_parser().parse_args(["x", *argv])
        return {name: value for name, value in generation_options(arguments, "x").items() if value is not None}

    unset = options()
    for flags, expected in (
        (["--json-schema", str(schema)], {"json_schema": '{"type": "string"}'}),
        (["--json-schema", "-"], {"json_schema": "{}"}),
        (["--grammar", str(grammar)], {"grammar": 'start: "é"'}),
        (["--json-object"], {"json_object": True}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--choice", "yes", "--choice", "no"], {"choice": ["yes", "no"]}),
        (["--time-budget", "1.5"], {"time_budget_s": 1.5}),
    ):
        assert options(*flags) == unset | expected


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "--json-schema no-such-file",
            "--json-schema: no-such-file cannot be read: No such file or directory; a file, or -",
        ),
        ("--regex a --json-object", "argument --json-object: not allowed with argument --regex"),
        ("--time-budget nan", "time_budget_s is nan"),
        ("--num-answers -1", "num_answers is -1"),
        ("--max-tokens many", "argument --max-tokens: invalid int value: 'many'"),
        ("--max-tokens -1", "max_tokens is -1"),
        ("--seed -1", "seed is -1"),
        ("--system x", "--system needs --chat"),
        ("--timeout 0", "--timeout is 0, it must be above 0 and at most 1,000,000 seconds"),
        ("--timeout inf", "--timeout is inf, it must be above 0 and at most 1,000,000 seconds"),
        ("--target=", "argument --target: is empty, it must be HOST:PORT or unix:PATH"),
    ],
)
async def test_bad_flag_is_one_line_and_status_2(target, capsys, flags, says):
    with pytest.raises(SystemExit, match="2"):
        await run("x", "--target", target, *flags.split())
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"chairlift generate: error: {says}")
    assert err.count("\n") == 1


async def test_answer_cut_at_the_default_length_is_reported_on_stderr(target, capsys):
    assert await run("ab", "--ignore-end-token", "--target", target) == 0
    out, err = capsys.readouterr()
    assert out.startswith("abab")
    assert err == "chairlift generate: stopped at the limit of 256 tokens; raise --max-tokens for more\n"


async def test_dash_reads_standard_input(target, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert await run("-", "--target", target) == 0
    assert capsys.readouterr().out == "from a pipe\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # of standard input, by the locale
@pytest.mark.parametrize(
    ("flags", "says"),
    [("-", "the prompt is not UTF-8"), ("x --grammar -", "--grammar: - cannot be read: not UTF-8")],
)
async def test_input_that_is_not_utf8_is_named(capsys, monkeypatch, errors, flags, says):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once \xff"), "utf-8", errors))
    with pytest.raises(SystemExit, match="2"):
        await run(*flags.split())
    assert capsys.readouterr().err.startswith(f"chairlift generate: error: {says}")


async def test_target_from_the_environment(target, capsys, monkeypatch):
    monkeypatch.setenv("CHAIRLIFT_TARGET", target)
    assert await run("hello") == 0
    assert capsys.readouterr().out == "hello\n"


async def test_error_of_the_call_is_one_line_and_status_1(target, capsys):
    assert await run("hello", "--temperature", "-1", "--target", target) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("chairlift generate: INVALID_ARGUMENT: ")
    assert "temperature" in err
    assert err.count("\n") == 1


async def test_standard_input_is_read_once(capsys):
    with pytest.raises(SystemExit):
        await run("-", "--json-schema", "-")
    assert "standard input can be read only once" in capsys.readouterr().err


async def test_unreachable_server_is_explained(capsys):
    assert await run("hello", "--target", "127.0.0.1:1") == 1
    assert capsys.readouterr().err.endswith("(no server at 127.0.0.1:1? `chairlift up` starts one)\n")


async def test_text_is_streamed_and_ctrl_c_cancels_the_call(target, engine):
    engine.step_interval_s = 0.01
    process = await asyncio.create_subprocess_exec(
        *command("ab", "--ignore-end-token", "--max-tokens", "4000", "--target", target),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert await process.stdout.readexactly(4) == b"abab"  # long before the end
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert (process.returncode, err) == (130, b"")
    await engine.wait_for(lambda: engine.num_open == 0)
    assert engine.num_steps < 4000


async def test_closed_output_ends_the_call_quietly(target, engine):
    engine.step_interval_s = 0.005
    process = await asyncio.create_subprocess_exec(
        *command("ab", "--ignore-end-token", "--max-tokens", "4000", "--target", target),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    await process.stdout.readexactly(2)
    process._transport.get_pipe_transport(1).close()
    assert await process.stderr.read() == b""
    assert await process.wait() == 1
    await engine.wait_for(lambda: engine.num_open == 0)
