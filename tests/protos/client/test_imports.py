"""The public package works with the base install: `from chairlift import Client` needs grpcio and protobuf alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import chairlift

ROOT = Path(__file__).parents[3]
FORBIDDEN = (
    "engine frontend kernels loadgen aiohttp grpc_health grpc_reflection grpc_status jinja2 llguidance numpy "
    "prometheus_client pydantic starlette tokenizers torch tqdm uvicorn"
)
FORBID = """
import sys
from importlib.abc import MetaPathFinder

class Forbid(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split():
            raise ImportError(f"{name} is not in the base install")

sys.meta_path.insert(0, Forbid())
"""
USE = """
from chairlift import AsyncClient, Client, GenerationError, Tls
with Client("127.0.0.1:1") as client:
    try:
        client.generate("x")
    except GenerationError as error:
        print(error.status.name)
    try:
        client.generate_many(["x"], progress=False)
    except GenerationError as error:
        print(error.__notes__)
"""


def run(code: str) -> str:
    path = str(ROOT / "protos")
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{FORBID}sys.path.insert(0, {path!r})\n{code}", FORBIDDEN],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_client_works_without_the_other_packages() -> None:
    assert run(USE).split("\n") == ["UNAVAILABLE", "['prompt 0 of 1']", ""]


def test_stubs_are_imported_without_the_client() -> None:
    loaded = run("import chairlift.v1.generation_service_pb2\nprint('chairlift.client' in sys.modules)")
    assert loaded == "False\n"


def test_every_exported_name_exists() -> None:
    declared = ast.parse((ROOT / "protos/chairlift/__init__.py").read_text())
    imports = [node for node in ast.walk(declared) if isinstance(node, ast.ImportFrom)]
    known_to_type_checkers = {alias.name for node in imports for alias in node.names} - {"TYPE_CHECKING", "Any"}
    assert known_to_type_checkers == set(chairlift.__all__) <= set(dir(chairlift))
    for name in chairlift.__all__:
        assert getattr(chairlift, name).__module__.startswith("chairlift.client") or name == "Prompt"
    with pytest.raises(AttributeError, match="has no attribute 'Clientt'"):
        chairlift.Clientt  # noqa: B018
