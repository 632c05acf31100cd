"""docs/tuning.md: every flag is there with its true default, and no other; metrics and figures that it names exist."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from engine.config import EngineConfig, parse_config
from engine.demo import MODEL_DIR
from engine.flags import DEFAULT_STEP_LIMITS
from frontend.cli import up
from frontend.config import FrontendConfig, parse_arguments

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "tuning.md").read_text()
FLAG = re.compile(r"`(--[a-z-]*[a-z])`")
ROW = re.compile(r"^\| (?P<flags>`--[^|]+) \| (?P<default>[^|]+) \| (?P<meaning>[^|]+) \|$", re.M)


def section(title: str) -> str:
    """What stands under a heading of the second level."""
    _, found, rest = PAGE.partition(f"\n## {title}\n")
    assert found, title
    return rest.partition("\n## ")[0]


def documented(title: str) -> dict[str, str]:
    """Flag -> default, as the tables of a section have it."""
    defaults: dict[str, str] = {}
    for row in ROW.finditer(section(title)):
        flags = FLAG.findall(row["flags"])
        values = [row["default"]] if len(flags) == 1 else row["default"].split(", ")
        assert len(values) == len(flags), row[0]
        for flag, value in zip(flags, values, strict=True):
            assert flag not in defaults, f"{flag} is there twice"
            defaults[flag] = value
    return defaults


def offered(
    capsys: pytest.CaptureFixture[str], main: Callable[[Sequence[str]], object], monkeypatch: pytest.MonkeyPatch
) -> set[str]:
    """The flags that a program's --help lists; of switches the positive form."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r"  -", line)]
    flags = {match for line in lines for match in re.findall(r"--[a-z][a-z-]*", line.split("  ")[1])}
    negative = {flag for flag in flags if flag.startswith("--no-") and f"--{flag.removeprefix('--no-')}" in flags}
    return flags - negative - {"--help"}


def shown(value: object) -> str:
    """A default as the page writes it."""
    if isinstance(value, bool):
        return "`on`" if value else "`off`"
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, tuple):
        return f"`{','.join(value)}`"
    return f"`{value:.12g}`" if isinstance(value, float) else f"`{value}`"


def field_of(flag: str, config: object) -> str:
    name = flag.removeprefix("--").replace("-", "_")
    return name if hasattr(config, name) else f"{name}_s"


def test_engine_flags_and_defaults(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    page = documented("Flags of the engine")
    assert set(page) == offered(capsys, lambda argv: parse_config(argv, {}), monkeypatch)
    config = parse_config([], {})
    assert config == EngineConfig(model=str(MODEL_DIR))
    cpu, gpu = DEFAULT_STEP_LIMITS["cpu"], DEFAULT_STEP_LIMITS["cuda"]
    in_flight = {device: config.max_steps_in_flight(device) == 2 for device in ("cpu", "cuda")}
    by_device = {
        "--max-num-seqs": (cpu.max_num_seqs, gpu.max_num_seqs),
        "--max-num-batched-tokens": (cpu.max_num_batched_tokens, gpu.max_num_batched_tokens),
        "--async-scheduling": (in_flight["cpu"], in_flight["cuda"]),
    }
    derived = {
        "--model",
        "--served-model-name",
        "--max-loras",
        "--threads",
    }  # from the machine or from other flags: said in words
    for flag, text in page.items():
        if flag in by_device:
            on_cpu, on_gpu = by_device[flag]
            assert getattr(config, field_of(flag, config)) is None
            assert re.findall("`[^`]+`", text) == [shown(on_cpu), shown(on_gpu)], flag
        elif flag == "--max-model-len":
            assert text == "`auto`"
        elif flag not in derived:
            assert text == shown(getattr(config, field_of(flag, config))), flag


def test_frontend_flags_and_defaults(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    page = documented("Flags of the frontend")
    assert set(page) == offered(capsys, lambda argv: parse_arguments(argv, {}), monkeypatch)
    config = parse_arguments([], {})
    assert config == FrontendConfig()
    assert config.http_host == ""
    for flag, text in page.items():
        assert flag == "--http-host" or text == shown(getattr(config, field_of(flag, config))), flag


def test_flags_of_up_are_its_own_and_the_frontends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = documented("Flags of `chairlift up`")
    assert set(own) == {"--model", "--smoke-test"}
    left_out = {"--engine", "--nice", "--engine-tls-ca", "--engine-tls-client-cert", "--engine-tls-client-key"}
    assert offered(capsys, up.main, monkeypatch) == set(own) | set(documented("Flags of the frontend")) - left_out
    assert all(f"`{flag}`" in section("Flags of `chairlift up`") for flag in left_out)


def test_every_named_flag_exists() -> None:
    titles = ("Flags of the engine", "Flags of the frontend", "Flags of `chairlift up`")
    known = {flag for title in titles for flag in documented(title)}
    assert set(FLAG.findall(PAGE)) - known == set()


def test_metrics_are_those_that_are_exported() -> None:
    """docs/metrics.md is held against a frontend's /metrics by tests/frontend/observability/test_names.py."""
    exported = set(re.findall(r"^\| `chairlift:(\w+)` \|", (DOCS / "metrics.md").read_text(), re.M))
    exported.add("process_cpu_seconds_total")
    named = set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", section("By symptom") + section("Two settings, explained")))
    assert named - {"cache_salt"} <= exported
    assert len(named) > 10
