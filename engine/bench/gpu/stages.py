"""The stages of a check on a GPU, and the commands each is made of. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.bench.dims import MODELS

_KERNEL_TESTS = "tests/kernels/gpu"
_REHEARSED_TESTS = "tests/kernels/gpu/test_rms_norm.py"
_TEST_TIMEOUT_S = 120
_MARKERS = "gpu: needs a GPU\nslow: takes more than ten seconds"
_TESTS_SHARE = 0.45
_RESERVE_S = 15.0  # for ending a command that was told to stop in time

STAGES = {
    "kernels": "the kernels' tests on the device, then their bandwidth and FLOP/s against copy and matrix products",
    "decode": "steps of an 8B model as fractions of the floor, bf16 and fp8, and what the GPU idles between them",
    "mix": "tokens/s with full seats, continuous and static (--precision fp8 for fp8)",
    "pair": "frontend, gRPC and load generator: 100 users and Poisson arrivals",
    "peers": "transformers' generate and its continuous batching on the same weights",
}


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """How the commands of a stage are to run: as they are meant to, or small and on a CPU.

    Attributes:
        device: "cuda" or "cpu".
        shape: of the model; None is the usual one.
        quick: tiny sizes.
        threads: on a CPU.
    """

    device: str = "cuda"
    shape: str | None = None
    quick: bool = False
    threads: int = 1

    def flags(self) -> list[str]:
        """Of a benchmark of the engine."""
        flags = ["--device", self.device, "--threads", str(self.threads)]
        if self.shape is not None:
            flags += ["--shape", self.shape]
        return [*flags, "--quick"] if self.quick else flags


@dataclass(frozen=True, slots=True)
class Command:
    """A Python module to run as a process.

    Attributes:
        title: for people.
        arguments: after the interpreter.
        share: of the time that is left when it begins, at most.
        environ: variables to set; an empty value takes one away.
        reports: whether it keeps a journal, whose path is then to be added, with the time it has.
    """

    title: str
    arguments: tuple[str, ...]
    share: float = 1.0
    environ: tuple[tuple[str, str], ...] = ()
    reports: bool = True

    def full_arguments(self, journal: Path, seconds: float) -> list[str]:
        """With its journal and its budget."""
        if not self.reports:
            return list(self.arguments)
        arguments = [*self.arguments, "--journal", str(journal), "--budget", f"{max(1.0, seconds - _RESERVE_S):.0f}"]
        return [*arguments, "--out", str(journal.with_suffix(".out"))]


def commands_of(
    stage: str, rehearsal: Rehearsal, extra: Sequence[str], *, has_xdist: bool, seed: int
) -> tuple[Command, ...]:
    """What a stage runs, in order.

    Args:
        stage: of STAGES.
        rehearsal: how.
        extra: flags for its benchmark, such as ("--precision", "fp8").
        has_xdist: whether tests may run in several processes, which then compile at the same time.
        seed: of the tests' random inputs.
    """
    if stage == "kernels":
        bench = ["--device", rehearsal.device, *(["--quick"] if rehearsal.quick else [])]
        if rehearsal.shape in MODELS:
            bench += ["--model", rehearsal.shape]
        return (
            _tests(rehearsal, has_xdist=has_xdist, seed=seed),
            Command("kernels.bench", ("-m", "kernels.bench", *bench, *extra)),
        )
    bench = [*rehearsal.flags(), *extra]
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


def _tests(rehearsal: Rehearsal, *, has_xdist: bool, seed: int) -> Command:
    """The kernels' tests with pytest and pytest-timeout alone: no plugin of the project's own configuration."""
    arguments = ["-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider", "-q"]
    arguments += ["--import-mode=importlib", "-p", "pytest_timeout", "-o", f"timeout={_TEST_TIMEOUT_S}"]
    arguments += ["-o", f"markers={_MARKERS}", "--maxfail=20"]
    is_gpu = rehearsal.device == "cuda"
    if is_gpu and has_xdist:
        arguments += ["-p", "xdist.plugin", "-n", "8"]
    arguments.append(_REHEARSED_TESTS if rehearsal.quick else _KERNEL_TESTS)
    # Compiling for other targets needs no GPU: CI does it.
    arguments += [f"--ignore={_KERNEL_TESTS}/test_compile.py"]
    environ = (
        ("CHAIRLIFT_TEST_SEED", str(seed)),
        ("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1"),  # whatever else is installed there
        ("TRITON_INTERPRET", "" if is_gpu else "1"),
    )
    return Command("kernel tests", tuple(arguments), share=_TESTS_SHARE, environ=environ, reports=False)
