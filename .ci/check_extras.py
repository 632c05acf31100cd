"""Installs each extra alone into an environment of its own and imports everything it promises.

`PROMISES` is the one list of what each extra must be able to import; tests/test_extras.py holds the same list against
the declared requirements without installing anything.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_NO_SERVICE = "-chairlift.service.health"  # needs grpcio-health-checking, which the two services alone have
_NO_GRAMMARS = [  # need llguidance, which the two services alone have
    "-chairlift.service.structured.grammars",
    "-chairlift.service.structured.grammar_tokenizer",
    "-chairlift.service.structured.parser_limits",
]
_NO_NUMPY = "-chairlift.bench.workload"  # benchmarks run with [engine] or [loadgen]

NEEDS_TRANSFORMERS = [
    f"-engine.model.transformers_{name}"
    for name in ("config", "experts", "head", "model", "packing", "probe", "states")
]

NEEDS_ENGINES = [f"-engine.serving.vllm.{name}" for name in ("cache_log", "call", "description", "messages", "service")]

# Packages (whole) and modules that each extra must import; "" is the distribution without extras. Names behind "-" are
# left out: they are run with [dev].
PROMISES = {
    "": ["chairlift", _NO_SERVICE, *_NO_GRAMMARS, _NO_NUMPY, "engine.core", "chairlift.client"],
    "frontend": [
        "chairlift",
        "frontend",
        _NO_NUMPY,
        "-frontend.observability.otlp",  # with [otel]
    ],
    "otel": [
        "chairlift",
        _NO_SERVICE,
        *_NO_GRAMMARS,
        _NO_NUMPY,
        "frontend.observability.otlp",
        "frontend.observability.request_trace",
        "frontend.observability.trace_context",
    ],
    "engines": ["chairlift", _NO_SERVICE, *_NO_GRAMMARS, _NO_NUMPY, "smg_grpc_proto"],
    "engine": [
        "chairlift",
        "engine",
        "kernels",
        *NEEDS_TRANSFORMERS,
        *NEEDS_ENGINES,
    ],
    "transformers": [name.removeprefix("-") for name in NEEDS_TRANSFORMERS],
    "loadgen": [
        "chairlift",
        _NO_SERVICE,
        *_NO_GRAMMARS,
        "chairlift.client",
        "loadgen",
        "-loadgen.experiments.peers.llama_cpp.worker",  # these run in environments of their own
        "-loadgen.experiments.peers.openvino.worker",
        "-loadgen.experiments.gateways.direct",  # with [engines]
    ],
}

# Run inside the environment under test; argv: the promise.
IMPORT_ALL = """
import importlib, pkgutil, sys
wanted = [name for name in sys.argv[1:] if not name.startswith("-")]
left_out = {name[1:] for name in sys.argv[1:] if name.startswith("-")}
count = 0
for name in wanted:
    package = importlib.import_module(name)
    names = [name] + [m.name for m in pkgutil.walk_packages(getattr(package, "__path__", []), name + ".")]
    for module in names:
        if module not in left_out and not module.endswith("__main__"):
            importlib.import_module(module)
            count += 1
print(f"{count} modules imported")
"""


def check(extra: str, wheel: Path) -> str:
    """Installs `chairlift[extra]` into a fresh environment and imports what it promises; returns what was printed.

    Raises: CalledProcessError: a command failed; `stdout` has what it printed.
    """

    def run(command: list[str], **options: Any) -> None:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        printed.append(subprocess.run(command, check=True, **pipes, **options).stdout)

    printed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "venv"
        python = environment / "bin" / "python"
        target = ".torch" if extra in ("engine", "transformers") else ".python"
        make = ["make", "--no-print-directory", f"VENV={environment}", f"PYTHON={sys.executable}"]
        run([*make, f"{environment}/{target}"], cwd=ROOT)
        run([str(python), "-m", "pip", "install", "--quiet", f"{wheel}[{extra}]" if extra else str(wheel)])
        run(
            [str(python), "-W", "error::ImportWarning", "-c", IMPORT_ALL, *PROMISES[extra]],
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
    return "".join(printed)


def main(extras: Sequence[str]) -> int:
    """Checks extras, two at a time, because pip uses one core; returns the exit status."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        for extra, result in [(extra, pool.submit(check, extra, wheel)) for extra in extras]:
            print(f"-- chairlift[{extra}]", flush=True)
            try:
                print(result.result(), end="", flush=True)
            except subprocess.CalledProcessError as error:
                print(error.stdout, error, sep="\n", flush=True)
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(PROMISES)))
