"""Every block that is no shell's: programs run, settings are taken by what they are for, logs are what is logged."""

import json
import re
import shutil
import subprocess
import tomllib
import urllib.request
from functools import cache
from pathlib import Path

import grpc
import jsonschema
import pytest
import yaml

from chairlift.service.service_classes import parse_service_classes
from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from loadgen.comparison.servers import read_servers
from tests.docs.pages import ROOT, Block, blocks, commands
from tests.docs.programs import accepts
from tests.docs.reader import Reader, Server
from tests.hang import HANG_S, START_HANG_S

pytestmark = pytest.mark.timeout(2 * START_HANG_S)  # both programs start first

BLOCKS = [block for block in blocks() if not commands(block)]
PICTURE = re.compile("[\u2500-\u257f\u2190-\u21ff\u25a0-\u25ff]")  # boxes, arrows, triangles
LOG_LINE = re.compile(r"(INFO|WARNING|ERROR) \w+")
# Lines that the servers of these tests have no reason to write -> the test that has them written.
LOGGED_ELSEWHERE = {
    "compiling CPU kernels": "tests/engine/startup/test_progress.py",  # a first start
    "Compiling 66 CPU kernels": "tests/engine/startup/test_progress.py",
}
# Text that is no code -> the test that holds it to be true.
TEXTS = {
    "2 (keys, values) * num_hidden_layers": "tests/docs/test_models.py",
    "step_s = a + b * max(tokens, knee)": "tests/engine/core/latency/test_step_time.py",
    "requests_received = requests_refused + request_success": "tests/frontend/observability/test_endings.py",
}


def kind(block: Block) -> str:
    """Returns how the block is tested; empty: unknown."""
    if block.language in ("python", "json", "toml", "yaml"):
        return block.language
    if block.language in ("", "text") and PICTURE.search(block.text):
        return "picture"
    if all(LOG_LINE.match(line) for line in block.text.splitlines()):
        return "log"
    return "text" if any(block.text.strip().startswith(text) for text in TEXTS) else ""


def of_kind(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", [block for block in BLOCKS if kind(block) == name], ids=str)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_is_of_a_kind_that_is_proven(block: Block) -> None:
    assert kind(block), "a new kind of block: say in tests/docs what proves it"


@pytest.mark.parametrize("path", [*LOGGED_ELSEWHERE.values(), *TEXTS.values()])
def test_what_is_proven_elsewhere_is_proven_there(path: str) -> None:
    assert (ROOT / path).exists()


@of_kind("python")
def test_a_program_runs(block: Block, reader: Reader) -> None:
    """Blocks of a page build on each other, as a reader's session does."""
    printed, error = run_page(block.page, reader)[block.line]
    assert not error, error
    assert printed.strip() or "print" not in block.text


def run_page(page: str, reader: Reader) -> dict[int, tuple[str, str]]:
    """All programs of a page, in one interpreter -> by line, what each printed and its error."""
    if page not in reader.programs:
        programs = [block for block in BLOCKS if block.page == page and block.language == "python"]
        done = subprocess.run(
            [".venv/bin/python", Path(__file__).with_name("run_blocks.py")],
            cwd=reader.folder,
            env=reader.environment(),
            input=json.dumps([[block.page, block.line, reader.translate(block.text)] for block in programs]),
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results = [(printed, error) for printed, error in json.loads(done.stdout)]
        reader.programs[page] = dict(zip([block.line for block in programs], results, strict=True))
    return reader.programs[page]


@of_kind("json")
def test_a_service_config_is_taken_and_names_what_there_is(block: Block, reader: Reader) -> None:
    config = json.loads(block.text)
    for method in config["methodConfig"]:
        assert {name["service"] for name in method["name"]} <= {
            service.full_name for service in pb.DESCRIPTOR.services_by_name.values()
        }
        codes = method["retryPolicy"]["retryableStatusCodes"]
        assert all(hasattr(grpc.StatusCode, code) for code in codes)
        assert "CANCELLED" in codes  # of calls that gRPC drops because they reach a server that stops
    options = [("grpc.service_config", block.text), ("grpc.enable_retries", 1)]
    with grpc.insecure_channel(reader.target, options=options) as channel:
        assert GenerationServiceStub(channel).GetModel(pb.GetModelRequest(), timeout=HANG_S).model


@of_kind("toml")
def test_a_file_is_read_by_its_program(block: Block, tmp_path: Path) -> None:
    if "classes" in tomllib.loads(block.text):
        assert parse_service_classes(block.text, block.page)
        return
    path = tmp_path / "servers.toml"
    path.write_text(block.text)
    assert len(read_servers(path)) == 2
    for server in tomllib.loads(block.text).values():
        accepts(server["command"])


@of_kind("yaml")
def test_settings_are_those_of_the_chart_or_of_the_repositorys_prometheus(block: Block, tmp_path: Path) -> None:
    settings = yaml.safe_load(block.text)
    if block.page == "docs/kubernetes.md":
        schema = json.loads((ROOT / "deploy/helm/chairlift/values.schema.json").read_text())
        jsonschema.validate(settings, schema)
        return
    ours = yaml.safe_load((ROOT / "deploy/monitoring/prometheus/prometheus.yml").read_text())
    (job,) = settings["scrape_configs"]
    assert job["job_name"] in [known["job_name"] for known in ours["scrape_configs"]]
    assert set(settings) <= set(ours)
    if shutil.which("promtool"):
        path = tmp_path / "prometheus.yml"
        path.write_text(block.text)
        subprocess.run(["promtool", "check", "config", "--syntax-only", path], check=True, capture_output=True)


@cache
def looks_like(line: str) -> re.Pattern[str]:
    """Lines that say the same of other numbers, names and addresses."""
    text = re.escape(line)
    text = re.sub(r"=('[^']*'|\S+)", r"=('[^']*'|\\S+)", text)
    text = re.sub(r"127\\\.0\\\.0\\\.1:\d+", r"\\S+", text)
    text = re.sub(r"from\\ \S+$", r"from\\ \\S+", text)
    # The first start with these kernels checks them, a later one only if its model needs others.
    text = re.sub(r"kernel\\ check\\ \S+\\ ", lambda found: f"({found[0]})?", text)
    return re.compile(re.sub(r"\d[\d,]*(\\\.\d+)?", r"[\\d.,]+", text))


@of_kind("log")
def test_lines_of_a_log_are_logged(block: Block, reader: Reader, servers: list[Server]) -> None:
    """By the engine and the frontend that serve these tests, once there was work."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{reader.ports['8000']}/v1/completions",
        data=b'{"prompt": "Once upon a time", "max_tokens": 8}',
        headers={"content-type": "application/json"},
    )
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=HANG_S).close()
    for line in block.text.splitlines():
        if any(text in line for text in LOGGED_ELSEWHERE):
            continue
        pattern = looks_like(line)
        if line.split()[1].startswith("frontend"):
            servers[1].wait_for(pattern.pattern, timeout_s=HANG_S)  # it may be about to write it
        else:
            assert pattern.search(servers[0].output), line
