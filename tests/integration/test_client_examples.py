"""The examples of docs/clients, run as a reader would run them, against the pair with the demo model: with nothing set,
and with a server that wants a key and speaks TLS.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chairlift import Client, Tls
from tests.hang import HANG_S
from tests.support.pair import PairAddress

ROOT = Path(__file__).resolve().parent.parent.parent
INSTALL_TIMEOUT_S = 45
GO_TOOLS = ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
DEBIAN_GO_PACKAGES = "/usr/share/gocode"
BUILD_TIMEOUT_S = 60
KEY = "the-key"
SAYS = [  # statuses as gRPC or as Go spells them
    r"stream: FINISH_REASON_MAX_TOKENS after 32 tokens: [\"'].{40,}[\"']",
    r"cancel: (CANCELLED|Canceled) after 3 chunks",
    r"deadline: (DEADLINE_EXCEEDED|DeadlineExceeded)",
    r"error: (INVALID_ARGUMENT|InvalidArgument): temperature is -1.*",
    r"  ErrorInfo: .*INVALID_REQUEST.*chairlift.*",
    r"  BadRequest: .*spec\.sampling\.temperature.*temperature is -1.*",
]


@dataclass(frozen=True)
class Endpoint:
    """Where an example calls, and what its environment tells it."""

    target: str
    environment: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def endpoints(
    pair: PairAddress,
    start_frontend: Callable[..., str],
    make_authority: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Endpoint]:
    """The pair's frontend, and one that requires an API key and TLS."""
    authority = make_authority("ours")
    served = authority.sign("server")
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    flags = ["--tls-cert", str(served.cert), "--tls-key", str(served.key), "--api-key-file", str(keys)]
    target = start_frontend(*flags, api_key=KEY, tls=Tls(ca=authority.ca))
    return [
        Endpoint(pair.target),
        Endpoint(target, {"CHAIRLIFT_API_KEY": KEY, "CHAIRLIFT_TLS_CA": str(authority.ca)}),
    ]


def check(command: list[str], folder: Path, endpoints: list[Endpoint]) -> None:
    """Runs an example at each endpoint and compares what it prints, line by line, and the text that it streamed."""
    with Client(endpoints[0].target) as client:
        answer = client.generate("Once upon a time", temperature=0.8, seed=7, max_tokens=32)
    for endpoint in endpoints:
        done = subprocess.run(
            [*command, endpoint.target],
            cwd=folder,
            env={**os.environ, **endpoint.environment},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == len(SAYS), done.stdout
        for line, expected in zip(lines, SAYS, strict=True):
            assert re.fullmatch(expected, line), line
        assert ast.literal_eval(lines[0].partition("tokens: ")[2]) == answer.text


def copy_with_protos(folder: Path, tmp_path: Path) -> Path:
    """A copy of an example that may be installed into, with the protos where they are in the repository."""
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    return Path(shutil.copytree(folder, tmp_path / folder.relative_to(ROOT), ignore=shutil.ignore_patterns("node_*")))


def test_python_by_reflection(endpoints: list[Endpoint]) -> None:
    folder = ROOT / "docs" / "clients" / "python"
    check([sys.executable, "-I", "example.py"], folder, endpoints)  # isolated: no stubs of ours in sight


def test_node(endpoints: list[Endpoint], tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("Node.js: no npm on this machine")
    folder = copy_with_protos(ROOT / "docs" / "clients" / "node", tmp_path)
    install = [npm, "install", "--no-audit", "--no-fund", "--prefer-offline", "--fetch-retries=0"]
    try:
        done = subprocess.run(
            install, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"Node.js: npm installs nothing within {INSTALL_TIMEOUT_S} s")
    if done.returncode != 0:
        pytest.skip(f"Node.js: npm cannot install the example's packages: {done.stderr[-300:]}")
    check([node, "example.js"], folder, endpoints)


def test_go(endpoints: list[Endpoint], tmp_path: Path) -> None:
    missing = [tool for tool in GO_TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"Go: no {', '.join(missing)} on this machine")
    folders = [*filter(None, os.environ.get("GOPATH", "").split(os.pathsep)), DEBIAN_GO_PACKAGES]
    packages = [folder for folder in folders if (Path(folder) / "src" / "google.golang.org" / "grpc").is_dir()]
    if not packages:
        pytest.skip("Go: no golang-google-grpc-dev on this machine")
    folder = copy_with_protos(ROOT / "docs" / "clients" / "go", tmp_path)
    subprocess.run(["sh", "generate.sh"], cwd=folder, check=True, timeout=HANG_S)
    workspace = tmp_path / "workspace"  # GOPATH mode: Debian's packages are sources, nothing is fetched
    (workspace / "src").mkdir(parents=True)
    (workspace / "src" / "chairlift.example").symlink_to(folder)
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": os.pathsep.join([str(workspace), *packages])}
    binary = tmp_path / "example"
    try:
        done = subprocess.run(
            ["go", "build", "-o", binary, "chairlift.example"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"Go: gRPC is not compiled within {BUILD_TIMEOUT_S} s on this machine")
    assert done.returncode == 0, done.stderr
    check([str(binary)], folder, endpoints)
