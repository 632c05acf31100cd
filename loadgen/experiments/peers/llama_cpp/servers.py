"""llama.cpp on one GGUF file, with one slot and with several, as systems under test; and its quantiser."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from chairlift.bench.benchmark import Settings
from loadgen.experiments.peers.formats import NumberFormat, Terms
from loadgen.experiments.peers.llama_cpp.environment import llama_python
from loadgen.experiments.peers.worker import Worker, WorkerSystem
from loadgen.experiments.systems import System

_SCRIPT = Path(__file__).with_name("worker.py")
LLAMA_CPP = "llama.cpp"
LLAMA_CPP_ALONE = "llama.cpp, 1 slot"


@contextlib.contextmanager
def open_llama_cpp(
    number_format: NumberFormat, model: Path, terms: Terms, settings: Settings
) -> Iterator[dict[str, System]]:
    """Loads a GGUF file with as many slots as the terms say, and with one, for the length of a `with` block.

    Steps have at most 512 tokens, as `n_ubatch` is by default and the terms are.

    Args:
        number_format: of the file; names the log.
        model: the file.
        terms: slots, and tokens that each has room for.
        settings: threads and scratch folder.
    Raises: BenchmarkError: no environment, or the load fails.
    """
    with llama_worker(settings, number_format.name) as worker:
        systems: dict[str, System] = {}
        for name, num_slots in ((LLAMA_CPP, terms.num_slots), (LLAMA_CPP_ALONE, 1)):
            worker.call(
                "load",
                name=name,
                model=str(model),
                slots=num_slots,
                context=terms.slot_tokens,
                threads=settings.threads,
                cache="F16",
            )
            systems[name] = WorkerSystem(worker, name=name)
        yield systems


def quantize_gguf(source: Path, out: Path, number_format: NumberFormat, settings: Settings) -> None:
    """Has llama.cpp quantise a GGUF file, without an importance matrix, as its `llama-quantize` does.

    Raises: BenchmarkError: no environment, or it fails.
    """
    with llama_worker(settings, f"quantize-{number_format.name}") as worker:
        kind = number_format.gguf_type
        worker.call("quantize", source=str(source), out=str(out), type=kind, threads=settings.threads)


def llama_worker(settings: Settings, name: str) -> Worker:
    """Starts a worker; see `worker.py` for its calls.

    Args:
        settings: scratch folder.
        name: of the log.
    Raises: BenchmarkError: no environment.
    """
    python = llama_python(settings.progress)
    # -I: neither our packages nor this folder, which is called llama_cpp, are on its path.
    return Worker([python, "-I", _SCRIPT], settings.scratch / f"llama-cpp-{name}.log")
