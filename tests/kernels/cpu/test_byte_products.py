"""Products of bytes are exact with every instruction, and each CPU's compiler takes the one that is meant for it."""

import ctypes
import platform
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from llvmlite import binding, ir

from kernels.cpu.byte_products import emit_byte_products_by
from kernels.cpu.cpu_features import ByteProducts
from kernels.cpu.tile import INTS, LANES, load

Function = Callable[[int, int, int], None]


class Instruction(NamedTuple):
    """What an instruction needs, and what it looks like.

    Attributes:
        features: of LLVM.
        flags: of /proc/cpuinfo, which a CPU needs to run it.
        name, registers: in assembly.
    """

    architecture: str
    features: str
    flags: set[str]
    name: str
    registers: str


HERE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
_AVX512 = {"avx512f", "avx512bw", "avx512vl"}
INSTRUCTIONS = {
    ByteProducts.AVX512_VNNI: Instruction(
        "x86_64", "+avx512f,+avx512bw,+avx512vl,+avx512vnni", {*_AVX512, "avx512_vnni"}, "vpdpbusd", "zmm"
    ),
    ByteProducts.AVX512: Instruction("x86_64", "+avx512f,+avx512bw,+avx512vl", _AVX512, "vpmaddwd", "zmm"),
    ByteProducts.AVX_VNNI: Instruction("x86_64", "+avx2,+avxvnni", {"avx_vnni"}, "vpdpbusd", "ymm"),
    ByteProducts.AVX2: Instruction("x86_64", "+avx2", {"avx2"}, "vpmaddwd", "ymm"),
    ByteProducts.I8MM: Instruction("aarch64", "+neon,+i8mm", {"i8mm"}, "usdot", ".16b"),
    ByteProducts.DOTPROD: Instruction("aarch64", "+neon,+dotprod", {"asimddp"}, "sdot", ".16b"),
    ByteProducts.GENERIC: Instruction(HERE, "", set(), "", ""),
}


def build(
    instruction: ByteProducts, architecture: str, features: str
) -> tuple[binding.ModuleRef, binding.TargetMachine]:
    """Builds add(sums, unsigned, signed) for a CPU: sums[i] += four products of bytes.

    Raises: RuntimeError: this LLVM has no compiler for the architecture.
    """
    triple = f"{architecture}-unknown-linux-gnu"
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple(triple).create_target_machine(features=features, opt=3, jit=True)
    module = ir.Module()
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 3), "add")
    builder = ir.IRBuilder(function.append_basic_block())
    values = [load(builder, address, INTS, 4) for address in function.args]
    result = emit_byte_products_by(instruction, builder, *values)
    builder.store(result, builder.inttoptr(function.args[0], INTS.as_pointer())).align = 4
    builder.ret_void()
    return binding.parse_assembly(str(module)), target


def assert_exact(add: Function) -> None:
    generator = np.random.default_rng(1)
    for case in range(200):
        unsigned = generator.integers(0, 256, (LANES, 4), dtype=np.uint8)
        signed = generator.integers(-128, 128, (LANES, 4), dtype=np.int8)
        if case < 4:  # sums of two do not fit 16 bits
            unsigned[:], signed[:] = (255, 0)[case // 2], (127, -128)[case % 2]
        sums = generator.integers(-(2**30), 2**30, LANES, dtype=np.int32)
        want = sums + (unsigned.astype(np.int32) * signed).sum(axis=1, dtype=np.int32)
        add(sums.ctypes.data, unsigned.ctypes.data, signed.ctypes.data)
        assert (sums == want).all()


def run(instruction: ByteProducts, features: str) -> None:
    with binding.create_mcjit_compiler(*build(instruction, HERE, features)) as engine:
        address = engine.get_function_address("add")
        assert_exact(ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(address))


def runs_here(instruction: ByteProducts) -> bool:
    form = INSTRUCTIONS[instruction]
    return form.architecture == HERE and form.flags <= set(Path("/proc/cpuinfo").read_text().split())


@pytest.mark.parametrize("instruction", ByteProducts)
def test_products_are_exact(instruction: ByteProducts) -> None:
    if not runs_here(instruction):
        pytest.skip(f"this CPU has no {instruction.value}")
    run(instruction, INSTRUCTIONS[instruction].features)


def test_products_of_avx_vnni_are_exact_in_the_encoding_of_avx512() -> None:
    """More CPUs have this one: the form of half a register runs there too."""
    if not runs_here(ByteProducts.AVX512_VNNI):
        pytest.skip("this CPU has no AVX-512 VNNI")
    run(ByteProducts.AVX_VNNI, INSTRUCTIONS[ByteProducts.AVX512_VNNI].features)


@pytest.mark.parametrize("instruction", list(ByteProducts)[:-1])
def test_the_compiler_takes_the_instruction(instruction: ByteProducts) -> None:
    """On a CPU that lacks it too, and on another architecture if this LLVM compiles for it."""
    form = INSTRUCTIONS[instruction]
    try:
        module, target = build(instruction, form.architecture, form.features)
    except RuntimeError:
        assert form.architecture != HERE
        pytest.skip(f"this LLVM does not compile for {form.architecture}")
    lines = [line for line in target.emit_assembly(module).splitlines() if form.name in line.split()]
    assert lines
    assert all(form.registers in line for line in lines)
