"""Stages of the check on a GPU, and the commands of each. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.bench.dims import MODELS

_KERNEL_TESTS = "tests/kernels/gpu"
_ENGINE_TESTS = "tests/engine/test_gpu_serving.py"
_REHEARSED_TESTS = "tests/kernels/gpu/test_rms_norm.py"
_TEST_TIMEOUT_S = 120
_MARKERS = "gpu: needs a GPU\nslow: takes more than ten seconds\nsampled: has many cases"
_TESTS_SHARE = 0.45
_VERSIONS_SHARE = 0.1
_JUDGE_SHARE = 0.4
_JUDGED_SHAPE = "0.6B"  # of many layers, yet small: its weights are made and saved for every mode
_RESERVE_S = 15.0  # reserved for stopping a command in time

JUDGE_MODES = ("eager", "graphs", "in-flight", "alone")
STAGES = {
    "kernels": "tests of kernels and engines on the device, then bandwidth and FLOP/s against copy and matrix products",
    "decode": "steps of an 8B model as fractions of the floor, bf16 and fp8, and what the GPU idles between them",
    "mix": "tokens/s with all slots taken, continuous and static (--precision fp8 for fp8)",
    "pair": "frontend, gRPC and load generator: 100 users and Poisson arrivals",
    "invariance": "--batch-invariant: the same bits alone, at once, in chunks and with cached prefixes; its cost",
    "peers": "transformers' generate and its continuous batching on the same weights",
}
FIRST_CONTACT = "first-contact"
"""The first ten minutes on a new machine, `--first-contact`: a little of everything."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Options of the commands of a stage: on a GPU, or small and on a CPU.

    Attributes:
        device: "cuda" or "cpu".
        shape: model shape; None is the default.
        quick: tiny sizes.
        threads: CPU threads.
    """

    device: str = "cuda"
    shape: str | None = None
    quick: bool = False
    threads: int = 1

    def flags(self) -> list[str]:
        """Flags of a benchmark of the engine."""
        flags = ["--device", self.device, "--threads", str(self.threads)]
        if self.shape is not None:
            flags += ["--shape", self.shape]
        return [*flags, "--quick"] if self.quick else flags


@dataclass(frozen=True, slots=True)
class Command:
    """A Python module to run in a process.

    Attributes:
        title: name in the output.
        arguments: arguments of the interpreter.
        share: largest share of the time left at its start.
        environ: variables to set; an empty value removes one.
        reports: whether it takes --journal and --budget.
    """

    title: str
    arguments: tuple[str, ...]
    share: float = 1.0
    environ: tuple[tuple[str, str], ...] = ()
    reports: bool = True

    def full_arguments(self, journal: Path, seconds: float) -> list[str]:
        """Returns the arguments with journal and budget."""
        if not self.reports:
            return list(self.arguments)
        arguments = [*self.arguments, "--journal", str(journal), "--budget", f"{max(1.0, seconds - _RESERVE_S):.0f}"]
        return [*arguments, "--out", str(journal.with_suffix(".out"))]


def commands_of(
    stage: str, rehearsal: Rehearsal, extra: Sequence[str], *, num_processes: int, seed: int
) -> tuple[Command, ...]:
    """Returns the commands of a stage, in order.

    Args:
        stage: name in STAGES, or FIRST_CONTACT.
        rehearsal: options of the commands.
        extra: more flags of its benchmark, such as ("--precision", "fp8").
        num_processes: of the tests on a GPU, most of whose time is compiling; more than 1 needs pytest-xdist.
        seed: random seed of the tests' inputs.
    """
    if stage == "kernels":
        bench = ["--device", rehearsal.device, *(["--quick"] if rehearsal.quick else [])]
        if rehearsal.shape in MODELS:
            bench += ["--model", rehearsal.shape]
        return (
            _tests(rehearsal, num_processes=num_processes, seed=seed),
            Command("kernels.bench", ("-m", "kernels.bench", *bench, *extra)),
        )
    bench = [*rehearsal.flags(), *extra]
    if stage == FIRST_CONTACT:
        return _first_contact(rehearsal, bench, num_processes=num_processes, seed=seed)
    if stage == "decode" and "--precision" not in extra:
        return tuple(
            Command(
                f"gpu-decode, {precision}",
                ("-m", "engine.bench", "gpu-decode", *bench, "--precision", precision),
                share=share,
            )
            for precision, share in (("bf16", 0.65), ("fp8", 1.0))
        )
    return (Command(f"gpu-{stage}", ("-m", "engine.bench", f"gpu-{stage}", *bench)),)


def _first_contact(rehearsal: Rehearsal, bench: Sequence[str], *, num_processes: int, seed: int) -> tuple[Command, ...]:
    """Returns every kind of check once; each mode is judged in its own process, because a GPU error ends a process."""
    judged = [] if rehearsal.shape is not None or rehearsal.quick else ["--shape", _JUDGED_SHAPE]
    point = [] if rehearsal.quick else ["--batches", "64", "--contexts", "512"]
    versions = ("-m", "engine.bench.gpu.versions", "--device", rehearsal.device)
    return (
        Command("versions", versions, share=_VERSIONS_SHARE, reports=False),
        _tests(rehearsal, num_processes=num_processes, seed=seed),
        *(
            Command(
                f"gpu-judge, {mode}",
                ("-m", "engine.bench", "gpu-judge", *bench, *judged, "--mode", mode),
                share=_JUDGE_SHARE,
            )
            for mode in JUDGE_MODES
        ),
        Command("gpu-decode", ("-m", "engine.bench", "gpu-decode", *bench, *point)),
    )


def _tests(rehearsal: Rehearsal, *, num_processes: int, seed: int) -> Command:
    """Returns the tests of kernels and engines with only pytest and pytest-timeout, without the project's settings."""
    arguments = ["-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider", "-q"]
    arguments += ["--import-mode=importlib", "-p", "pytest_timeout", "-o", f"timeout={_TEST_TIMEOUT_S}"]
    arguments += ["-o", f"markers={_MARKERS}", "--maxfail=20"]
    is_gpu = rehearsal.device == "cuda"
    if is_gpu and num_processes > 1:
        arguments += ["-p", "xdist.plugin", "-n", str(num_processes)]
    arguments += [_REHEARSED_TESTS] if rehearsal.quick else [_ENGINE_TESTS, _KERNEL_TESTS]
    # Compiling for other targets needs no GPU: CI does it.
    arguments += [f"--ignore={_KERNEL_TESTS}/{name}.py" for name in ("test_compile", "test_launch")]
    environ = (
        ("CHAIRLIFT_TEST_SEED", str(seed)),
        ("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1"),  # regardless of other installed plugins
        ("TRITON_INTERPRET", "" if is_gpu else "1"),
    )
    return Command("tests", tuple(arguments), share=_TESTS_SHARE, environ=environ, reports=False)
