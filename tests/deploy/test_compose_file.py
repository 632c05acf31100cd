"""What compose.yaml promises, read without Docker. tests/deploy/containers tries the same with containers."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import parse_config
from frontend.config import parse_arguments
from frontend.routing.resolver import name_and_port

BUILT = ["engine", "engine-gpu", "frontend", "loadgen"]  # here, by deploy/Dockerfile
PULLED = ["prometheus", "grafana"]
SERVICES = BUILT + PULLED
# Variables of the programs that are not for .env: compose.yaml gives the flag itself, or a container has no use for it.
ENGINE_KEEPS = {
    "DEVICE", "ENGINE_HOST", "ENGINE_PORT", "ENGINE_INSECURE_BIND", "UDS", "EXIT_ON_STDIN_CLOSE", "STEP_LOG",
    "ENGINE_TLS_CERT", "ENGINE_TLS_KEY", "ENGINE_TLS_CLIENT_CA",  # files: with a mount, in an override
    "NNODES", "NODE_RANK", "MASTER_ADDR",  # a project of compose is one machine
}  # fmt: skip
FRONTEND_KEEPS = {
    "HOST", "PORT", "HTTP_HOST", "HTTP_PORT", "INSECURE_BIND", "ENGINE", "REUSE_PORT",
    "TOKENIZER", "API_KEY_FILE", "ADMIN_API_KEY_FILE", "TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA",
    "ENGINE_TLS_CA", "ENGINE_TLS_CLIENT_CERT", "ENGINE_TLS_CLIENT_KEY",  # files: with a mount, in an override
    "CHAT_TEMPLATE", "SERVICE_CLASSES", "RETRY_TICKET_KEY_FILE",
}  # fmt: skip


@pytest.fixture
def compose(root: Path) -> dict[str, Any]:
    """compose.yaml with its defaults filled in."""
    text = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", (root / "compose.yaml").read_text())
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def variables_in_help(parse: Any, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        parse(["--help"])
    words = re.sub(r"\s", "", capsys.readouterr().out)
    return set(re.findall(r"\[CHAIRLIFT_([A-Z_]+)(?:=0\|1)?\]", words))


def test_both_generations_of_compose_can_read_it(compose: dict[str, Any]) -> None:
    assert set(compose) == {"x-common", "x-engine", "services", "networks", "volumes"}  # no `name`, no `version`
    assert list(compose["services"]) == SERVICES


@pytest.mark.parametrize("name", SERVICES)
def test_service_is_locked_down(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert service["pids_limit"] <= 1024
    assert re.fullmatch(r"\d+g", service["mem_limit"])
    assert service["tmpfs"]
    assert all("size=" in mount for mount in service["tmpfs"])
    assert not {"privileged", "cap_add", "pid", "ipc", "network_mode"} & set(service)
    assert "docker.sock" not in str(service)


@pytest.mark.parametrize("name", SERVICES)
def test_logs_cannot_fill_the_disk(compose: dict[str, Any], name: str) -> None:
    assert compose["services"][name]["logging"] == {"driver": "local"}  # the one that is bounded by itself


def test_frontend_takes_every_address_of_the_name_and_asks_no_other_domain(compose: dict[str, Any]) -> None:
    (flag,) = [word for word in compose["services"]["frontend"]["command"] if word.startswith("--engine")]
    assert name_and_port(flag.removeprefix("--engine=")) == ("engine.", 50052)


def test_no_service_runs_as_root(compose: dict[str, Any]) -> None:
    assert not any("user" in compose["services"][name] for name in BUILT)  # the Dockerfile says it
    users = {name: compose["services"][name]["user"].partition(":")[0] for name in PULLED}
    assert users == {"prometheus": "65534", "grafana": "472"}  # those of the images, whose volumes belong to them


@pytest.mark.parametrize("name", BUILT)
def test_image_that_is_built_is_the_projects_own(compose: dict[str, Any], name: str) -> None:
    assert compose["services"][name]["build"]
    assert "image" not in compose["services"][name]  # a fixed name would be another checkout's too


@pytest.mark.parametrize("name", PULLED)
def test_images_of_others_have_a_version(compose: dict[str, Any], name: str) -> None:
    assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+(-\w+)?", compose["services"][name]["image"])


@pytest.mark.parametrize("name", PULLED)
def test_monitoring_reads_its_settings_and_writes_its_own_volume_alone(
    compose: dict[str, Any], root: Path, name: str
) -> None:
    mounts = compose["services"][name]["volumes"]
    assert [mount.partition(":")[0] for mount in mounts if isinstance(mount, str)] == [name]
    for mount in mounts:
        if isinstance(mount, dict):
            assert mount["read_only"] is True
            assert (root / mount["source"]).is_dir()


def test_watching_does_not_wait_for_what_is_watched(compose: dict[str, Any]) -> None:
    assert not any("depends_on" in compose["services"][name] for name in PULLED)


@pytest.mark.parametrize("name", ["engine", "engine-gpu", "frontend", *PULLED])
def test_failing_service_stops_restarting(compose: dict[str, Any], name: str) -> None:
    assert re.fullmatch(r"on-failure:\d", compose["services"][name]["restart"])


def test_key_of_administrators_reaches_the_frontend_alone(compose: dict[str, Any]) -> None:
    holders = {
        name
        for name, service in compose["services"].items()
        if any("ADMIN_API_KEY" in variable for variable in service.get("environment", ()))
    }
    assert holders == {"frontend"}


def test_engines_have_no_port_and_meet_frontends_on_an_internal_network(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert compose["networks"]["backend"] == {"internal": True}
    for name in ("engine", "engine-gpu"):
        assert not {"ports", "expose"} & set(services[name])
        assert set(services[name]["networks"]) == {"backend", "egress"}
    assert services["engine-gpu"]["networks"]["backend"]["aliases"] == ["engine"]
    assert set(services["frontend"]["networks"]) & {"backend", "egress"} == {"backend"}
    assert services["loadgen"]["networks"] == ["public"]


def test_ports_are_published_on_loopback_alone(compose: dict[str, Any]) -> None:
    assert compose["services"]["frontend"]["ports"] == ["127.0.0.1:50051:50051", "127.0.0.1:8000:8000"]
    assert compose["services"]["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]
    assert compose["services"]["grafana"]["ports"] == ["127.0.0.1:3000:3000"]
    assert [name for name in SERVICES if "ports" in compose["services"][name]] == ["frontend", *PULLED]


def test_profiles_add_to_the_pair(compose: dict[str, Any]) -> None:
    profiles = {name: service.get("profiles", []) for name, service in compose["services"].items()}
    assert profiles == {
        "engine": [], "engine-gpu": ["gpu"], "frontend": [], "loadgen": ["load"],
        "prometheus": ["monitoring"], "grafana": ["monitoring"],
    }  # fmt: skip
    (device,) = compose["services"]["engine-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert "gpu" in device["capabilities"]


def test_drain_ends_before_docker_kills(compose: dict[str, Any]) -> None:
    longest_s = max(parse_config([], {}).shutdown_timeout_s, parse_arguments([], {}).shutdown_timeout_s)
    for name in SERVICES:
        assert int(compose["services"][name]["stop_grace_period"].removesuffix("s")) >= longest_s + 5


@pytest.mark.parametrize("name", ["engine", "engine-gpu"])
def test_every_flag_of_the_engine_can_be_set(
    compose: dict[str, Any], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {f"CHAIRLIFT_{flag}" for flag in variables_in_help(parse_config, capsys) - ENGINE_KEEPS}
    assert {key for key in compose["services"][name]["environment"] if key.startswith("CHAIRLIFT_")} == wanted


def test_every_flag_of_the_frontend_can_be_set(compose: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {f"CHAIRLIFT_{flag}" for flag in variables_in_help(parse_arguments, capsys) - FRONTEND_KEEPS}
    assert set(compose["services"]["frontend"]["environment"]) == wanted


def test_no_key_stands_twice(root: Path) -> None:
    """YAML's parser here keeps the last one; Compose may refuse the file."""

    def check(node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), f"line {node.start_mark.line + 1}: {sorted(keys)}"
            for _, value in node.value:
                check(value)
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                check(item)

    check(yaml.compose((root / "compose.yaml").read_text()))


def test_every_variable_of_the_example_is_one_that_compose_reads(compose: dict[str, Any], root: Path) -> None:
    shown = set(re.findall(r"^#([A-Z_]+)=", (root / ".env.example").read_text(), re.MULTILINE))
    text = (root / "compose.yaml").read_text()
    interpolated = set(re.findall(r"\$\{([A-Z_]+):-", text))
    passed_on = {
        key for name in SERVICES for key, value in compose["services"][name].get("environment", {}).items() if not value
    }
    assert shown <= interpolated | passed_on
    assert interpolated <= shown


def test_frontend_image_has_no_part_that_computes(compose: dict[str, Any]) -> None:
    extras = {name: compose["services"][name]["build"]["args"]["EXTRA"] for name in BUILT}
    engine = "engine,engines,gguf,transformers"
    assert extras == {"engine": engine, "engine-gpu": engine, "frontend": "frontend,engines,otel", "loadgen": "loadgen"}


def test_dockerfile_needs_no_buildkit(root: Path) -> None:
    text = (root / "deploy" / "Dockerfile").read_text()
    assert not re.search(r"^#\s*syntax|^RUN --|^COPY --(?!from=)|<<", text, re.MULTILINE)
    assert text.index("\nUSER 10001:10001\n") > text.rindex("\nFROM ")
