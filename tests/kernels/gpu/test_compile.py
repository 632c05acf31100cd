"""Every kernel compiles for every target, within its registers and shared memory, and live calls need nothing more.

CHAIRLIFT_COMPILE_EVERYTHING=1 compiles every form that there is, which takes long; else each tile and branch once.
"""

import json
import os
import sys
import tomllib
from pathlib import Path

import pytest
import triton

from kernels.gpu import compile_check
from kernels.gpu.targets import ARCHITECTURES, TARGETS, find_target
from tests.support.kernels.compile_scripts import NEGATE, run, script

ROOT = Path(__file__).parents[3]
CHECKED_WHOLE = ("sm_80", "sm_90", "sm_100", "gfx942")
OTHER_TRITON = Path(sys.prefix) / "other-triton"
EVERYTHING = bool(os.environ.get("CHAIRLIFT_COMPILE_EVERYTHING"))


def check_target(target, report, *options, paths=()):
    """Runs the compile check; returns what it reports."""
    if EVERYTHING:
        options = (*options, "--everything")
    result = run("-m", "kernels.gpu.compile_check", "--target", target, "--json", str(report), *options, paths=paths)
    assert result.returncode == 0, result.stderr
    checked = json.loads(report.read_text())
    names = {kernel["kernel"] for kernel in checked["kernels"]}
    assert {
        "_prefill_attention_kernel",
        "_decode_plan_kernel",
        "_decode_attention_kernel",
        "_merge_chunks_kernel",
        "_prefill_plan_kernel",
        "_merge_tile_chunks_kernel",
    } <= names
    assert all(kernel["num_registers"] > 0 and kernel["binary_bytes"] > 0 for kernel in checked["kernels"])
    return checked


@pytest.mark.slow
@pytest.mark.timeout(7200 if EVERYTHING else 1200)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_fits(target, tmp_path):
    """Of the less common targets only attention, whose tiles follow a target's shared memory and registers most."""
    is_whole = EVERYTHING or target in CHECKED_WHOLE
    check_target(target, tmp_path / "report.json", *(["--live"] if is_whole else ["--kernels", "paged_attention"]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend", "arch"), [("sm_121", "cuda", 121), ("gfx1201", "hip", "gfx1201")])
def test_kernels_of_a_gpu_with_the_tiles_of_another_are_compiled_for_itself(tmp_path, name, backend, arch):
    script(
        tmp_path,
        NEGATE,
        f"""
        from kernels.gpu.targets import find_target

        use_compile_only_driver(find_target({name!r}))
        with compile_only() as compiled:
            launch(negate, (1,), values, 17, BLOCK=32)
        assert (compiled[0].metadata.target.backend, compiled[0].metadata.target.arch) == ({backend!r}, {arch!r})
        """,
    )


@pytest.mark.slow
@pytest.mark.timeout(7200 if EVERYTHING else 1200)
@pytest.mark.parametrize("target", TARGETS if EVERYTHING else ["sm_90"])
def test_every_kernel_compiles_with_the_other_supported_triton(target, tmp_path, monkeypatch):
    if not OTHER_TRITON.is_dir():
        pytest.skip("`make test-slow` installs the other Triton; there was none")
    if target.startswith("gfx"):
        monkeypatch.setenv("AMDGCN_USE_BUFFER_OPS", "0")  # without it 3.6 does not compile the sampler
    checked = check_target(target, tmp_path / "report.json", paths=[OTHER_TRITON])
    assert checked["triton"] != triton.__version__


def test_versions_of_the_compile_check_are_those_that_can_be_installed():
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["engine"]
    assert "triton>=3.6,<3.8; sys_platform == 'linux'" in requirements
    assert all(set(allowance.max_bytes) <= {"3.6", "3.7"} for allowance in compile_check.ALLOWANCES)


@pytest.mark.slow
def test_faults_are_found(tmp_path):
    """Spilled registers, too much shared memory, and calls of a form that was not compiled before.

    The kernels are small, so that ptxas takes about a second: 64 values per thread with 32 registers for them, and two
    tiles of 4 KiB in 32 stages.
    """
    script(
        tmp_path,
        NEGATE
        + """
    @triton.jit
    def crowded(ptr, BLOCK: tl.constexpr):
        offsets = tl.arange(0, BLOCK)
        values = tl.load(ptr + offsets)
        tl.store(ptr + offsets, values / tl.sum(values))

    @triton.jit
    def greedy(ptr, n, BLOCK: tl.constexpr):
        offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for i in range(n):
            tile = tl.load(ptr + i * BLOCK * BLOCK + offsets)
            total = tl.dot(tile, tl.load(ptr + BLOCK + i * BLOCK * BLOCK + offsets), total)
        tl.store(ptr + offsets, total)
""",
        """
        target = TARGETS["sm_80"]

        def call(kernel, *args, **options):
            return Call("a call", lambda: launch(kernel, (1,), values, *args, **options))

        kernels = compile_calls([
            call(greedy, 17, BLOCK=32, num_stages=32),
            call(crowded, BLOCK=2048, num_warps=1, maxnreg=32),
            call(negate, 17, BLOCK=16),
        ])
        assert [needs.kernel for _, needs in kernels] == ["greedy", "crowded", "negate"]
        faults = find_faults(kernels, target)
        assert len(faults) == 2, faults
        assert "greedy" in faults[0] and "shared memory" in faults[0], faults
        assert "crowded" in faults[1] and "spills" in faults[1], faults

        specializations = lambda *_: iter([call(negate, 17, BLOCK=16)])
        closed = Family(specializations, lambda *_: iter([call(negate, n, BLOCK=16) for n in (17, 18, 100)]))
        open_ = Family(specializations, lambda *_: iter([call(negate, n, BLOCK=16) for n in (17, 32)]))
        FAMILIES.update(closed=closed, open=open_)
        assert find_live_compiles(target, ["closed"], 0) == []
        assert len(find_live_compiles(target, ["open"], 0)) == 1
        """,
    )


@pytest.mark.slow
def test_a_layer_compiles_for_columns_of_wider_rows_and_for_the_copies_of_recorded_steps(tmp_path):
    """Two heads, so that rows of gates are a multiple of 16 values in neither, and wider rows are not one either."""
    script(
        tmp_path,
        "",
        """
        from kernels.delta_heads import DeltaHeads
        from kernels.delta_rule import DeltaStates, DeltaWeights
        from kernels.gpu.ops import GpuOps
        from kernels.metadata import AttentionMetadata

        meta, heads = torch.device("meta"), DeltaHeads(1, 16, 2, 16, 4)
        columns = heads.num_channels + heads.value_size
        empty = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=meta)
        weights = DeltaWeights(heads, empty(4, heads.num_channels), empty(2), empty(2), empty(16), 1e-6)
        states = DeltaStates.zeros(heads, 4, meta)
        ops = GpuOps(meta, TARGETS["sm_80"], num_processors=108)

        def run(num_tokens, num_rows, copies=False):
            rows = empty(num_tokens, columns + 4, dtype=torch.bfloat16)
            x, gates = rows[:, :columns], rows[:, columns:]
            if copies:
                x, gates = x.clone(), gates.clone()
            metadata = AttentionMetadata(
                empty(num_rows + 1, dtype=torch.int32), empty(num_rows, dtype=torch.int32), empty(num_rows, 1),
                empty(num_tokens), 16, num_tokens, num_tokens, state_slots=empty(num_rows, dtype=torch.int32),
            )
            ops.delta_rule(x, gates, weights, states, metadata)

        with compile_only():
            run(1, 1)
        compiled = []
        counter = CompileCounter(compiled.append)
        for sizes in ((1, 1), (5, 2), (16, 16), (300, 4)):
            for copies in (False, True):
                run(*sizes, copies)
        assert compiled == [], compiled
        """,
    )


def test_check_fails_under_the_interpreter(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compile_check.main([])


def test_the_compile_check_takes_every_gpu_that_is_served():
    with pytest.raises(SystemExit):
        compile_check.main(["--target", "gfx1030"])
    for name in ARCHITECTURES:
        assert find_target(name).name in TARGETS
    assert find_target("gfx1030") is None
