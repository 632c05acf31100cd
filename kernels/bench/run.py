"""Runs all cases within the budget: first the ceilings, then one group after another."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chairlift.bench.report import format_number
from kernels.bench.attention import decode_cases, latent_cases, mixed_cases, prefill_cases
from kernels.bench.budget import Budget
from kernels.bench.case import Case, WrongResultError, run_case
from kernels.bench.ceilings import measure_ceilings
from kernels.bench.delta_rule import delta_cases
from kernels.bench.device import BenchDevice, describe_device, open_device
from kernels.bench.dims import MODELS, Dims
from kernels.bench.journal import Journal
from kernels.bench.linear import linear_cases
from kernels.bench.pointwise import pointwise_cases
from kernels.bench.sampling import sampler_cases

GROUPS: Mapping[str, Callable[..., Iterator[Case]]] = {
    "decode": decode_cases,
    "prefill": prefill_cases,
    "mixed": mixed_cases,
    "latent": latent_cases,
    "sampler": sampler_cases,
    "linear": linear_cases,
    "pointwise": pointwise_cases,
    "delta": delta_cases,
}
"""Groups of cases, the most important first."""

_CASE_S = 0.25
_LEAST_S = 10.0  # no case is started with less time left: its kernel may have to be compiled first


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        device: "cuda" or "cpu".
        model: name of the shapes, see `kernels.bench.dims`.
        groups: names in GROUPS.
        quick: use tiny sizes; the figures are meaningless.
        budget_s: wall-clock limit of the run in seconds.
        seed: random seed of the inputs.
    """

    device: str
    model: str
    groups: Sequence[str]
    quick: bool
    budget_s: float
    seed: int


def run(plan: Plan, journal: Journal, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measures everything into a journal, reports progress, and returns a description of the device.

    Raises: RuntimeError, ValueError: the device is missing or not supported.
    """
    budget = Budget(plan.budget_s)
    device = open_device(plan.device)
    torch.manual_seed(plan.seed)
    about = describe_device(device.device)
    ceilings = measure_ceilings(
        device.device, float8=device.target.fp8_dtype, quick=plan.quick, seconds=0.0 if plan.quick else 0.5
    )
    journal.keep({"device": about, "ceilings": ceilings.as_json()})
    progress(f"{about.get('gpu', 'a CPU with the interpreter')}: {ceilings}")
    for case in _cases(plan, device, MODELS[plan.model]):
        if not budget.allows(_LEAST_S):
            journal.leave_out(case.what)
            continue
        try:
            result, timing = run_case(case, device, ceilings, seconds=0.0 if plan.quick else _CASE_S)
        except WrongResultError as error:
            journal.fail(str(error))
        except (RuntimeError, ValueError) as error:  # memory, or a kernel that does not compile or launch
            journal.fail(f"{case.what}: {(str(error).splitlines() or [''])[0] or type(error).__name__}")
        else:
            equal = next((other for other in journal.results if other.what == case.equal), None)
            if equal is not None:
                result = result.beside(equal, "equal lengths")
            journal.add(result)
            journal.keep({case.what: {"seconds": timing.samples_s, "method": timing.method}})
            progress(f"  {result.what}: {format_number(result.figure)} {result.unit}")
    return about


def _cases(plan: Plan, device: BenchDevice, dims: Dims) -> Iterator[Case]:
    for group in plan.groups:
        yield from GROUPS[group](device, dims, quick=plan.quick)
