"""One engine and one frontend: up in order, locked down, both ports open, loaded and watched."""

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hang import HANG_S

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[3]


def test_compose_reads_the_file(generation: tuple[str, ...]) -> None:
    profiles = [word for profile in ("gpu", "load", "monitoring") for word in ("--profile", profile)]
    done = subprocess.run(
        [*generation, *profiles, "config", "--services"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert set(done.stdout.split()) == {"engine", "engine-gpu", "frontend", "loadgen", "prometheus", "grafana"}


def test_engine_was_healthy_before_the_frontend_started(stack: Any) -> None:
    started = datetime.fromisoformat(stack.inspect("frontend")["State"]["StartedAt"])
    checks = stack.health("engine")
    assert min(datetime.fromisoformat(check["End"]) for check in checks if check["ExitCode"] == 0) <= started
    assert "SERVING" in checks[-1]["Output"]


def test_answers_stream_through_both_doors(stack: Any) -> None:
    token_ids = stack.tokens()
    assert len(token_ids) == 8
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "stream": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{stack.settings['HTTP_PORT']}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=HANG_S) as response:
        events = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [token_id for choice in choices for token_id in choice.get("token_ids") or []] == token_ids
    assert chunks[0]["model"] == "from-the-env-file"


@pytest.mark.parametrize("service", ["engine", "frontend"])
def test_container_can_change_nothing_but_its_caches(stack: Any, docker: Callable[..., str], service: str) -> None:
    look = "id -u; grep -E 'CapEff|NoNewPrivs' /proc/1/status; cat /proc/1/mounts"
    uid, *status = docker("exec", stack.container(service), "sh", "-c", look).splitlines()
    assert uid == "10001"
    assert status[:2] == ["CapEff:\t0000000000000000", "NoNewPrivs:\t1"]
    mounts = {line.split()[1]: line.split()[3].split(",") for line in status[2:]}
    assert mounts["/"][0] == "ro"
    # Docker's own files are root's; everything else that may be written is sized, or a cache.
    writable = {path for path, flags in mounts.items() if flags[0] == "rw" and not path.startswith(("/proc", "/dev"))}
    caches = {"/var/cache/chairlift/kernels", "/var/cache/chairlift/huggingface"} if service == "engine" else set()
    assert writable - {"/etc/resolv.conf", "/etc/hostname", "/etc/hosts", "/sys/fs/cgroup"} == {"/tmp", *caches}
    assert any(flag.startswith("size=") for flag in mounts["/tmp"])
    limits = stack.inspect(service)["HostConfig"]
    assert limits["PidsLimit"] > 0
    assert limits["Memory"] > 0
    assert limits["LogConfig"]["Type"] == "local"


def test_engine_has_no_port_on_this_machine(stack: Any, docker: Callable[..., str]) -> None:
    assert not stack.inspect("engine")["HostConfig"]["PortBindings"]
    bindings = stack.inspect("frontend")["HostConfig"]["PortBindings"]
    assert {
        (port, binding["HostIp"], binding["HostPort"]) for port, bound in bindings.items() for binding in bound
    } == {
        ("50051/tcp", "127.0.0.1", stack.settings["GRPC_PORT"]),
        ("8000/tcp", "127.0.0.1", stack.settings["HTTP_PORT"]),
    }
    networks = json.loads(docker("network", "inspect", f"{stack.name}_backend", f"{stack.name}_public"))
    assert [network["Internal"] for network in networks] == [True, False]
    assert stack.container("engine") not in networks[1]["Containers"]


@pytest.mark.parametrize("service", ["frontend", "loadgen"])
def test_image_of_what_does_not_compute_has_no_part_that_does(
    project: Any, docker: Callable[..., str], image: Callable[[str], str], service: str
) -> None:
    names = ("torch", "triton", "numba")
    find = f"from importlib.util import find_spec; print([bool(find_spec(n)) for n in {names}])"
    assert docker("run", "--rm", image(service), "python", "-c", find) == "[False, False, False]\n"


def test_load_generator_replays_a_trace(stack: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": 0.1 * i, "input_tokens": 20 + i, "output_tokens": 8} for i in range(10)]
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = stack.compose(
        "--profile", "load", "run", "--rm", "-v", f"{trace}:/trace.jsonl:ro", "loadgen",
        "replay", "--trace", "/trace.jsonl",
    )  # fmt: skip
    words = " ".join(done.stdout.split())
    assert "Errors: 0" in words
    assert "Output tokens: 80 of 80" in words


def start_watcher(stack: Any, service: str) -> None:
    """Starts a service of the profile monitoring and waits for it; skips where its image cannot be had."""
    image = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"][service]["image"]
    for how in (["image", "inspect"], ["pull"]):
        if subprocess.run(["docker", *how, image], capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip(f"{image} is not here and cannot be pulled")
    stack.compose("--profile", "monitoring", "up", "--detach", "--no-deps", service)
    stack.wait_healthy(service)


def test_prometheus_watches_the_frontend(stack: Any) -> None:
    start_watcher(stack, "prometheus")

    def targets() -> list[tuple[str, str]]:
        active = json.loads(stack.get("/api/v1/targets", "PROMETHEUS_PORT"))["data"]["activeTargets"]
        return [(target["labels"]["job"], target["health"]) for target in active]

    stack.wait_until(lambda: targets() == [("chairlift", "up")], "prometheus")


def test_grafana_shows_the_dashboard_read_only(stack: Any) -> None:
    start_watcher(stack, "grafana")
    shown = json.loads(stack.get("/api/dashboards/uid/chairlift", "GRAFANA_PORT"))
    assert shown["meta"]["provisioned"] is True
    assert shown["meta"]["canSave"] is False
    assert len(shown["dashboard"]["panels"]) > 10
    with pytest.raises(urllib.error.HTTPError, match=r"40[13]"):
        stack.get("/api/admin/settings", "GRAFANA_PORT")
