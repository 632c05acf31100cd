"""Compiles kernels for a target without a GPU and checks their resources: `python -m kernels.gpu.compile_check --help`.

Needs a separate process, because it replaces Triton's driver.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import triton

from kernels.gpu.compile_only_driver import use_compile_only_driver
from kernels.gpu.launch import CompileCounter, compile_only
from kernels.gpu.resources import Resources, read_resources
from kernels.gpu.row_specializations import Call
from kernels.gpu.specializations import FAMILIES
from kernels.gpu.targets import ARCHITECTURES, TARGETS, Target, find_target

_NVIDIA = frozenset(target.name for target in TARGETS.values() if target.backend == "cuda")


class Allowance(NamedTuple):
    """Bytes per thread that some specializations of a kernel may spill; all others must not spill.

    Attributes:
        form: part of the label.
        max_bytes: by version of Triton; none for a version that is missing.
    """

    targets: frozenset[str]
    kernel: str
    form: str
    max_bytes: Mapping[str, int]


ALLOWANCES = (
    # a register or two; in return more programs fit
    Allowance(_NVIDIA, "_rms_norm_kernel", "", {"3.6": 8, "3.7": 8}),
    Allowance(frozenset({"sm_100"}), "_rms_norm_kernel", "rows of 18944", {"3.7": 16}),  # fp32 weights, 8-bit results
    Allowance(_NVIDIA, "_rotate_and_store_kernel", "float32", {"3.6": 8, "3.7": 8}),
    Allowance(frozenset({"sm_89", "sm_120"}), "_product_kernel", "scales per block", {"3.7": 8}),
    Allowance(frozenset({"sm_75"}), "_expert_product_kernel", "scales per block", {"3.7": 8}),
    Allowance(frozenset({"sm_89"}), "_expert_product_kernel", "scales per block", {"3.7": 40}),
    Allowance(frozenset({"sm_100"}), "_expert_product_kernel", "experts of 2880", {"3.7": 8}),
    Allowance(frozenset({"gfx942"}), "_expert_product_kernel", "scales per block", {"3.6": 56}),
    Allowance(frozenset({"sm_75"}), "grouped_expert_kernel", "orders of inputs", {"3.7": 8}),
    Allowance(frozenset({"sm_75"}), "_up_kernel", "", {"3.7": 8}),
    Allowance(frozenset({"sm_120"}), "_down_kernel", "rank 64", {"3.7": 104}),
    Allowance(frozenset({"sm_110"}), "grouped_product_kernel", "4 bits in groups of 32", {"3.7": 8}),
    Allowance(frozenset({"sm_80"}), "grouped_product_kernel", "4 bits in groups of 32", {"3.6": 8, "3.7": 8}),
    Allowance(frozenset({"sm_100"}), "grouped_product_kernel", "4 bits in groups of 32", {"3.6": 8}),
    # 8-bit keys are widened in registers beside an accumulator of 128 x 256; 16 keys a step instead of 32 would fit,
    # and make of each matrix instruction half of one. The form for divided tiles spills more than the other.
    Allowance(
        frozenset({"sm_90", "sm_100", "sm_110"}), "_prefill_attention_kernel", "head size 256", {"3.6": 184, "3.7": 168}
    ),
    Allowance(frozenset({"sm_80"}), "_prefill_attention_kernel", "window, soft cap", {"3.6": 96, "3.7": 40}),
    Allowance(frozenset({"sm_80"}), "_prefill_attention_kernel", "head size 128", {"3.6": 40}),
    # measured with 3.7 only
    Allowance(frozenset({"sm_87"}), "_prefill_attention_kernel", "window, soft cap", {"3.7": 32}),
    Allowance(frozenset({"sm_87"}), "_prefill_attention_kernel", "head size 128", {"3.7": 56}),
    Allowance(frozenset({"sm_86", "sm_89"}), "_prefill_attention_kernel", "window, soft cap", {"3.7": 8}),
    Allowance(frozenset({"sm_89"}), "_prefill_attention_kernel", "head size 256", {"3.7": 32}),
    Allowance(frozenset({"sm_120"}), "_prefill_attention_kernel", "head size 256", {"3.7": 88}),
    Allowance(frozenset({"sm_120"}), "_prefill_attention_kernel", "window, soft cap", {"3.7": 48}),
    Allowance(
        frozenset({"sm_80"}), "_prefill_attention_kernel", "head size 64", {"3.6": 24, "3.7": 32}
    ),  # with a window
    Allowance(frozenset({"sm_86", "sm_89"}), "_prefill_attention_kernel", "head size 64", {"3.7": 64}),
    Allowance(frozenset({"sm_87"}), "_prefill_attention_kernel", "head size 64", {"3.7": 56}),
    Allowance(frozenset({"sm_120"}), "_prefill_attention_kernel", "head size 64", {"3.7": 112}),
    Allowance(frozenset({"gfx1100"}), "_prefill_attention_kernel", "head size 64", {"3.7": 12}),
    Allowance(frozenset({"sm_120"}), "_alternatives_kernel", "", {"3.7": 8}),
    # two operands of 256 values per row, which the matrix instruction wants twice, in 256 registers
    Allowance(frozenset({"gfx1100"}), "_decode_attention_kernel", "head size 256", {"3.7": 196}),
    Allowance(frozenset({"gfx1100"}), "_prefill_attention_kernel", "head size 256", {"3.7": 544}),
    Allowance(frozenset({"gfx1100"}), "_decode_attention_kernel", "head size 512", {"3.7": 520}),
    Allowance(frozenset({"gfx1100"}), "_prefill_attention_kernel", "head size 512", {"3.7": 640}),
    Allowance(frozenset({"sm_75"}), "_prefill_attention_kernel", "head size 512", {"3.7": 40}),  # in float32
    # in 8 bits; in 16 at most 72, of sm_100 and sm_110
    Allowance(
        frozenset({"sm_90", "sm_100", "sm_110"}),
        "_prefill_attention_kernel",
        "latents of 256",
        {"3.6": 328, "3.7": 296},
    ),
    Allowance(frozenset({"sm_89", "sm_120"}), "_prefill_attention_kernel", "latents of 256", {"3.7": 80}),
    Allowance(frozenset({"gfx942"}), "_prefill_attention_kernel", "latents of 256", {"3.7": 28}),  # in 8 bits
    # GPTQ in the order of activations: rows of inputs are gathered through registers
    Allowance(frozenset({"gfx1100"}), "grouped_expert_kernel", "orders of inputs", {"3.7": 468}),
    Allowance(frozenset({"sm_80", "sm_87"}), "_product_kernel", "", {"3.6": 8, "3.7": 8}),
)
_TRITON = ".".join(triton.__version__.split(".")[:2])


def compile_calls(calls: Iterable[Call], num_threads: int | None = None) -> list[tuple[str, Resources]]:
    """Compiles the kernels that calls launch.

    Args:
        calls: of kernels.gpu.specializations.
        num_threads: compile threads; None is one per core.
    Returns: (label, resources) of each kernel, once per specialization.
    Raises: UnsupportedTargetError: kernels do not compile.
    """
    labels: list[str] = []
    with compile_only(num_threads=num_threads) as compiled:
        for call in calls:
            call.make()
            labels += [call.label] * (len(compiled) - len(labels))
    first_of = {kernel.hash: (label, kernel) for label, kernel in reversed(list(zip(labels, compiled, strict=True)))}
    return [(label, read_resources(kernel)) for label, kernel in reversed(first_of.values())]


def find_faults(kernels: Iterable[tuple[str, Resources]], target: Target) -> list[str]:
    """Returns messages about resources above their limits, and about products and softmax that do not overlap."""
    faults = []
    for label, needs in kernels:
        max_stack_bytes = max(
            (
                allowance.max_bytes.get(_TRITON, 0)
                for allowance in ALLOWANCES
                if target.name in allowance.targets and needs.kernel == allowance.kernel and allowance.form in label
            ),
            default=0,
        )
        if needs.shared_bytes > target.max_shared_bytes:
            faults.append(
                f"{needs.kernel} ({label}) needs {needs.shared_bytes} bytes of shared memory, "
                f"{target.name} has {target.max_shared_bytes}"
            )
        if needs.has_serial_products:
            faults.append(f"{needs.kernel} ({label}) has matrix products that ptxas made synchronous")
        if needs.stack_bytes > max_stack_bytes and target in TARGETS.values():  # others have the tiles of one of these
            faults.append(f"{needs.kernel} ({label}) spills {needs.stack_bytes} bytes per thread of {max_stack_bytes}")
    return faults


def find_live_compiles(target: Target, families: Sequence[str], seed: int) -> list[str]:
    """Makes live calls and returns the kernels they compiled, with arguments: none if the set is closed."""
    compiled: list[str] = []
    counter = CompileCounter(compiled.append)
    try:
        for family in families:
            for call in FAMILIES[family].live(target, random.Random(seed)):
                call.make()
    finally:
        counter.close()
    return compiled


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=ARCHITECTURES, default="sm_90")
    parser.add_argument("--kernels", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="families to compile")
    parser.add_argument(
        "--everything", action="store_true", help="compile all forms (default: each tile and branch once)"
    )
    parser.add_argument("--live", action="store_true", help="also make live calls, which must compile nothing")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the live calls (default: 0)")
    parser.add_argument("--threads", type=int, help="compile threads (default: one per core)")
    parser.add_argument("--json", type=Path, help="also write the report to this JSON file")
    options = parser.parse_args(arguments)
    target = find_target(options.target)
    assert target is not None, "one of the choices"
    use_compile_only_driver(target)

    start_s = time.perf_counter()
    calls = (call for name in options.kernels for call in FAMILIES[name].specializations(target, options.everything))
    kernels = compile_calls(calls, options.threads)
    seconds = time.perf_counter() - start_s
    print("registers  shared  stack  binary  warps  stages  kernel")
    for label, needs in kernels:
        print(
            f"{needs.num_registers:9}{needs.shared_bytes:8}{needs.stack_bytes:7}{needs.binary_bytes:8}"
            f"{needs.num_warps:7}{needs.num_stages:8}  {needs.kernel} ({label})"
        )
    print(f"{len(kernels)} kernels for {options.target} by Triton {triton.__version__} in {seconds:.1f} s")

    faults = find_faults(kernels, target)
    if options.live:
        faults += [
            f"compiled by a live call: {kernel}" for kernel in find_live_compiles(target, options.kernels, options.seed)
        ]
    if options.json:
        report = {
            "target": options.target,
            "triton": triton.__version__,
            "kernels": [{"label": label, **asdict(needs)} for label, needs in kernels],
            "faults": faults,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    for fault in faults:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
