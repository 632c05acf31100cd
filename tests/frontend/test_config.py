import pytest

from frontend.config import FrontendConfig, parse_arguments
from frontend.errors import ConfigError


def test_defaults():
    assert parse_arguments([], {}) == FrontendConfig()
    assert FrontendConfig().port == 50051


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


def test_api_keys_are_not_shown_in_the_config(capsys):
    environ = {"CHAIRLIFT_API_KEY": "from-variable"}
    assert "from-variable" not in repr(parse_arguments([], environ))
    for argv in (["--help"], ["--port", "x"], ["--host", "0.0.0.0"]):
        with pytest.raises(SystemExit):
            parse_arguments(argv, environ)
    out, err = capsys.readouterr()
    assert "from-variable" not in out + err
    assert "prefer the variable or --api-key-file" in " ".join(out.split())


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
def test_loopback_address_needs_no_protection(where):
    parse_arguments(where, {})


@pytest.mark.parametrize("where", WIDE)
def test_other_address_needs_tls_and_a_key_or_a_flag(where, capsys):
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


def test_http_address_is_ignored_without_http():
    parse_arguments(["--http-host", "0.0.0.0", "--no-http"], {})


BAD = {
    "--port 65536": "--port is 65536, it must be a whole number between 0 and 65535",
    "--allowed-origins a.example": "--allowed-origins is a.example, it must be * or an origin such as https://",
    "--allowed-origins https://a.example/": "--allowed-origins is https://a.example/, it must be * or an origin",
    "--http-port -1": "--http-port is -1, it must be a whole number between 0 and 65535",
    "--tool-call-parser xml": "--tool-call-parser is xml, it must be one of auto, none, harmony",
    "--reasoning-parser deep": "--reasoning-parser is deep, it must be one of auto, none, granite32",
    "--engine nowhere": "--engine is nowhere, it must be HOST:PORT or unix:PATH",
    "--engine host:0": "--engine is host:0",
    "--engine unix:": "--engine is unix:",
    "--engine tgi://host:1": "--engine is tgi://host:1, it must be HOST:PORT or unix:PATH, behind vllm://,",
    "--engine vllm://host": "--engine is vllm://host, it must be",
    "--tokenizer /does/not/exist": "--tokenizer is /does/not/exist, it must be a folder that this user can read",
    "--max-queued-requests 0": "--max-queued-requests is 0, it must be a whole number, at least 1",
    "--stall-timeout 0": "--stall-timeout is 0, it must be a number, at least 0.001",
    "--max-connection-age 2147484": "--max-connection-age is 2147484, it must be a number between 1 and 2e+06",
    "--token-window 4G": "--token-window is 4G, it must be a whole number between 1 and 2147483647",
    "--heartbeat-timeout 1": "--heartbeat-timeout is 1, it must be a number between 2 and 600",
    "--log-level loud": "--log-level is loud, it must be one of debug",
    "--metrics-prefix sglang": "--metrics-prefix is sglang, it must be one of chairlift, vllm",
    "--tls-cert c": "--tls-cert and --tls-key belong together",
    "--tls-key k": "--tls-cert and --tls-key belong together",
    "--tls-client-ca ca": "--tls-client-ca needs --tls-cert",
    "--htp-port 3 --zzz": "unknown: --htp-port 3 --zzz; did you mean --http-port?",
}


@pytest.mark.parametrize("argv", BAD)
def test_invalid_setting_is_one_line_and_status_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(argv.split(), {})
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert BAD[argv] in printed
    assert printed.count("\n") == 1


def test_config_created_in_code_is_checked():
    with pytest.raises(ConfigError, match="--port is -1"):
        FrontendConfig(port=-1)


def test_default_template_kwargs_are_a_json_object(capsys):
    text = '{"enable_thinking": false, "level": [1]}'
    expected = {"enable_thinking": False, "level": [1]}
    assert parse_arguments(["--default-chat-template-kwargs", text], {}).default_chat_template_kwargs == expected
    environ = {"CHAIRLIFT_DEFAULT_CHAT_TEMPLATE_KWARGS": text}
    assert parse_arguments([], environ).default_chat_template_kwargs == expected
    for bad in ("{", "[1]", '{"tools": []}', '{\n"a": 1', '{"a": 1e999}', '{"a": NaN}'):
        with pytest.raises(SystemExit):
            parse_arguments([f"--default-chat-template-kwargs={bad}"], {})
        error = capsys.readouterr().err
        assert "--default-chat-template-kwargs is " in error
        assert "it must be a JSON object of at most 524288 bytes" in error
        assert error.count("\n") == 1
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs is "):
        FrontendConfig(default_chat_template_kwargs={"messages": []})
