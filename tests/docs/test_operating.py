"""docs/operating.md names flags and services that exist."""

import dataclasses
from pathlib import Path

from engine.config import parse_config
from engine.serving.server import SERVICE_NAME as ENGINE_SERVICE_NAME
from frontend.api.grpc.server import SERVICE_NAME
from frontend.config import FrontendConfig, parse_arguments

PAGE = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()


def test_both_programs_have_the_flags_of_logs() -> None:
    shared = ["--log-format", "json", "--log-level", "warning", "--log-stats-interval", "3"]
    engine, frontend = parse_config(shared, {}), parse_arguments(shared, {})
    for config in (engine, frontend):
        assert (config.log_format, config.log_level, config.log_stats_interval_s) == ("json", "warning", 3.0)
    defaults = {field.name: field.default for field in dataclasses.fields(FrontendConfig)}
    assert (defaults["log_requests"], defaults["log_prompts"]) == (False, False)


def test_services_are_named() -> None:
    assert f"`{SERVICE_NAME}`" in PAGE
    assert f"`{ENGINE_SERVICE_NAME}`" in PAGE
