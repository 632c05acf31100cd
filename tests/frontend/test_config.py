from dataclasses import fields

import pytest

from frontend import config
from frontend.config import FrontendConfig, parse_arguments
from frontend.errors import ConfigError


def test_defaults():
    assert parse_arguments([], {}) == FrontendConfig()
    assert FrontendConfig().port == 50051


def test_every_flag_has_a_help_text():
    assert set(config._HELP) == {option.name for option in fields(FrontendConfig)}


def test_help_shows_short_names_and_no_default_that_is_none(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--help"], {"CHAIRLIFT_HTTP_PORT": "81"})
    text = " ".join(capsys.readouterr().out.split())
    assert "--stall-timeout S " in text
    assert "--tls-cert PATH " in text
    assert "--log-level LEVEL " in text
    assert "[CHAIRLIFT_UVLOOP] (default: off)" in text
    assert "[CHAIRLIFT_HTTP_PORT] (default: 81)" in text
    assert "(default: )" not in text
    assert "None" not in text


def test_flags_are_parsed():
    argv = [
        "--port",
        "0",
        "--engine",
        "unix:/run/e.sock",
        "--engine",
        "dns:engines:50052",
        "--stall-timeout",
        "2.5",
        "--no-reflection",
        "--uvloop",
        "--max-queued-tokens",
        "9",
    ]
    parsed = parse_arguments(argv, {})
    assert (parsed.port, parsed.stall_timeout_s) == (0, 2.5)
    assert parsed.engine == ("unix:/run/e.sock", "dns:engines:50052")
    assert (parsed.reflection, parsed.uvloop, parsed.max_queued_tokens) == (False, True, 9)


def test_every_flag_is_an_environment_variable_too(tmp_path):
    values = {
        "host": "0.0.0.0",
        "api_key_file": tmp_path / "keys",
        "tls_cert": tmp_path / "cert",
        "tls_key": tmp_path / "key",
        "tls_client_ca": tmp_path / "ca",
        "insecure_bind": True,
        "port": 1234,
        "http": False,
        "http_host": "::1",
        "http_port": 4321,
        "tokenizer": tmp_path,
        "max_queued_requests": 3,
        "max_queued_tokens": 4,
        "token_window": 5,
        "stall_timeout_s": 6.5,
        "shutdown_timeout_s": 7.5,
        "heartbeat_timeout_s": 8.5,
        "failover_timeout_s": 9.5,
        "max_moves": 7,
        "reuse_port": True,
        "reflection": False,
        "uvloop": True,
        "tool_call_parser": "hermes",
        "reasoning_parser": "none",
        "metrics_prefix": "vllm",
        "log_level": "debug",
    }
    environ = {"CHAIRLIFT_" + name.removesuffix("_s").upper(): str(value) for name, value in values.items()}
    environ["CHAIRLIFT_API_KEY"] = "one,key"
    environ["CHAIRLIFT_ENGINE"] = "there:1,[::1]:2"
    environ["CHAIRLIFT_ALLOWED_ORIGINS"] = "https://a.example,http://b.example:8080"
    origins = ("https://a.example", "http://b.example:8080")
    lists = {"api_key": ("one,key",), "engine": ("there:1", "[::1]:2"), "allowed_origins": origins}
    expected = FrontendConfig(**values, **lists)
    assert parse_arguments([], environ) == expected


def test_flag_wins_over_its_variable():
    assert parse_arguments(["--port", "1"], {"CHAIRLIFT_PORT": "2"}).port == 1
    assert parse_arguments(["--no-uvloop"], {"CHAIRLIFT_UVLOOP": "1"}).uvloop is False


def test_keys_are_collected_and_win_over_the_variable():
    environ = {"CHAIRLIFT_API_KEY": "from-variable"}
    assert parse_arguments([], environ).api_key == ("from-variable",)
    assert parse_arguments(["--api-key", "a", "--api-key", "b"], environ).api_key == ("a", "b")


def test_keys_are_in_no_text_about_the_config(capsys):
    environ = {"CHAIRLIFT_API_KEY": "from-variable"}
    assert "from-variable" not in repr(parse_arguments([], environ))
    for argv in (["--help"], ["--port", "x"], ["--host", "0.0.0.0"]):
        with pytest.raises(SystemExit):
            parse_arguments(argv, environ)
    out, err = capsys.readouterr()
    assert "from-variable" not in out + err
    assert "the variable or the file" in " ".join(out.split())


LOCAL = [["--host", host] for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost")]
PROTECTED = [
    ["--tls-cert", "c", "--tls-key", "k", "--api-key", "a"],
    ["--tls-cert", "c", "--tls-key", "k", "--api-key-file", "f"],
    ["--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "ca"],
    ["--insecure-bind"],
]
HALF_PROTECTED = [[], ["--api-key", "a"], ["--tls-cert", "c", "--tls-key", "k"]]
WIDE = [["--host", "0.0.0.0"], ["--host", "::"], ["--host", "192.0.2.7"], ["--host="], ["--http-host", "example.org"]]


@pytest.mark.parametrize("where", LOCAL)
def test_this_machine_alone_needs_no_protection(where):
    parse_arguments(where, {})


@pytest.mark.parametrize("where", WIDE)
def test_address_beyond_this_machine_needs_tls_and_a_key_or_a_word(where, capsys):
    for flags in PROTECTED:
        parse_arguments([*where, *flags], {})
    for flags in HALF_PROTECTED:
        with pytest.raises(SystemExit) as caught:
            parse_arguments([*where, *flags], {})
        assert caught.value.code == 2
        printed = capsys.readouterr().err
        assert "is open to other machines: add --tls-cert, --tls-key and an API key" in printed
        assert "--insecure-bind" in printed
        assert printed.count("\n") == 1


def test_address_of_http_does_not_matter_without_http():
    parse_arguments(["--http-host", "0.0.0.0", "--no-http"], {})


def test_empty_variable_counts_as_unset():
    names = ["CHAIRLIFT_" + name.removesuffix("_s").upper() for name in FrontendConfig.__dataclass_fields__]
    assert parse_arguments([], dict.fromkeys(names, "")) == FrontendConfig()


BAD = {
    "--port 65536": "--port is 65536, it must be between 0 and 65535",
    "--port x": "--port",
    "--allowed-origins a.example": "--allowed-origins is a.example, it must be * or an origin such as https://",
    "--allowed-origins https://a.example/": "--allowed-origins is https://a.example/, it must be * or an origin",
    "--http-port -1": "--http-port is -1, it must be between 0 and 65535",
    "--tool-call-parser xml": "--tool-call-parser is xml, it must be one of auto, none, harmony",
    "--reasoning-parser deep": "--reasoning-parser is deep, it must be one of auto, none, granite32",
    "--engine nowhere": "--engine is nowhere, it must be HOST:PORT or unix:PATH",
    "--engine host:0": "--engine is host:0",
    "--engine unix:": "--engine is unix:",
    "--tokenizer /does/not/exist": "--tokenizer is /does/not/exist, it must be a folder that exists",
    "--max-queued-requests 0": "--max-queued-requests is 0, it must be at least 1",
    "--max-queued-tokens 0": "at least 1",
    "--token-window 0": "at least 1",
    "--stall-timeout 0": "--stall-timeout is 0.0",
    "--stall-timeout nan": "--stall-timeout is nan",
    "--shutdown-timeout -1": "--shutdown-timeout is -1.0",
    "--heartbeat-timeout 1": "--heartbeat-timeout is 1.0, it must be between 2 and 600 seconds",
    "--log-level loud": "--log-level is loud, it must be one of debug",
    "--metrics-prefix sglang": "--metrics-prefix is sglang, it must be one of chairlift, vllm",
    "--tls-cert c": "--tls-cert and --tls-key belong together",
    "--tls-key k": "--tls-cert and --tls-key belong together",
    "--tls-client-ca ca": "--tls-client-ca needs --tls-cert",
    "--unheard-of": "unknown: --unheard-of\n",
    "--htp-port 3 --zzz": "unknown: --htp-port 3 --zzz; did you mean --http-port?",
}


@pytest.mark.parametrize("argv", BAD)
def test_mistake_is_one_line_and_status_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(argv.split(), {})
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert BAD[argv] in printed
    assert printed.count("\n") == 1


def test_bad_variable_is_named(capsys):
    with pytest.raises(SystemExit):
        parse_arguments([], {"CHAIRLIFT_UVLOOP": "maybe"})
    assert "CHAIRLIFT_UVLOOP is 'maybe'" in capsys.readouterr().err


def test_config_made_in_code_is_checked_too():
    with pytest.raises(ConfigError, match="--port is -1"):
        FrontendConfig(port=-1)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("PORT", "abc", "CHAIRLIFT_PORT is 'abc', it must be a whole number"),
        ("STALL_TIMEOUT", "soon", "CHAIRLIFT_STALL_TIMEOUT is 'soon', it must be a number"),
        ("HTTP_PORT", "99999", "--http-port is 99999, it must be between 0 and 65535 (from CHAIRLIFT_HTTP_PORT)"),
        ("LOG_FORMAT", "xml", "--log-format is xml, it must be one of text, json (from CHAIRLIFT_LOG_FORMAT)"),
        ("ENGINE", "nowhere", "--engine is nowhere, it must be HOST:PORT or unix:PATH (from CHAIRLIFT_ENGINE)"),
    ],
)
def test_a_bad_variable_is_named(capsys, variable, value, words):
    with pytest.raises(SystemExit):
        parse_arguments([], {f"CHAIRLIFT_{variable}": value})
    assert capsys.readouterr().err == f"chairlift-frontend: error: {words}\n"


@pytest.mark.parametrize("argv", [["--http-port", "70000"], ["--http-port=70000"]])
def test_a_variable_that_a_flag_overrides_is_not_blamed(capsys, argv):
    with pytest.raises(SystemExit):
        parse_arguments(argv, {"CHAIRLIFT_HTTP_PORT": "8000"})
    assert "CHAIRLIFT_HTTP_PORT" not in capsys.readouterr().err
