"""Generates the committed gRPC stubs: `python protos/generate.py [OUT]`.

Run with the oldest supported grpcio-tools (pinned in pyproject.toml), so that the stubs import under every protobuf we
allow. `tests/test_architecture.py` fails when the committed stubs differ from what this writes.
"""

import sys
import sysconfig
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent


def generate(out: Path) -> None:
    """Writes messages, their types and the services of every .proto under `protos/` to `out`, laid out as packages.

    Raises: RuntimeError: protoc refused; its message is on stderr.
    """
    sources = sorted(str(path) for path in PROTOS.rglob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--plugin=protoc-gen-mypy_grpc={Path(sysconfig.get_path('scripts')) / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_grpc_out=quiet:{out}",
            *sources,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS)
