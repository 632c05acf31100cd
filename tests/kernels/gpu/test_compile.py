"""Every kernel compiles for every target, within its registers and shared memory, and live calls need nothing more.

CHAIRLIFT_COMPILE_EVERYTHING=1 compiles every form that there is, which takes long; else each tile and branch once.
"""

import json
import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import triton

from kernels.gpu import compile_check
from kernels.gpu.targets import ARCHITECTURES, TARGETS, UnsupportedTargetError, find_target

ROOT = Path(__file__).parents[3]
CHECKED_WHOLE = ("sm_80", "sm_90", "sm_100", "gfx942")
OTHER_TRITON = Path(sys.prefix) / "other-triton"
EVERYTHING = bool(os.environ.get("CHAIRLIFT_COMPILE_EVERYTHING"))


def run(*command, paths=()):
    """In a process of its own, with Triton's interpreter off; `paths` come first among the places of modules."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((*map(str, paths), environment["PYTHONPATH"]))
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


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


KERNELS = """
    import torch
    import triton
    import triton.language as tl

    from kernels.gpu.launch import CompileCounter, compile_only, launch
    from kernels.gpu.compile_check import compile_calls, find_faults, find_live_compiles
    from kernels.gpu.row_specializations import Call
    from kernels.gpu.specializations import FAMILIES, Family
    from kernels.gpu.compile_only_driver import use_compile_only_driver
    from kernels.gpu.targets import TARGETS, UnsupportedTargetError

    use_compile_only_driver(TARGETS["sm_80"])
    values = torch.empty(1024, device="meta")
"""


def script(tmp_path, kernel, body):
    """Triton reads kernels from files."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(KERNELS) + textwrap.dedent(kernel) + textwrap.dedent(body))
    result = run(str(path))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(autouse=True)
def modules_are_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


NEGATE = """
    @triton.jit
    def negate(ptr, n, BLOCK: tl.constexpr):
        offsets = tl.arange(0, BLOCK)
        tl.store(ptr + offsets, -tl.load(ptr + offsets, mask=offsets < n), mask=offsets < n)
"""


@pytest.mark.slow
def test_launches_compile_in_the_block_and_are_counted_after_it(tmp_path):
    script(
        tmp_path,
        NEGATE,
        """
        counted = []
        counter = CompileCounter(counted.append)
        with compile_only(num_threads=2) as compiled:
            for block in (16, 32):
                launch(negate, (1,), values, 17, BLOCK=block)
        assert [kernel.metadata.target.arch for kernel in compiled] == [80, 80]
        assert counter.num_compiles == 0
        launch(negate, (1,), values, 17, BLOCK=32)
        launch(negate, (0,), values, 17, BLOCK=64)  # of nothing
        assert counter.num_compiles == 0
        launch(negate, (1,), values, 16, BLOCK=32)  # 16 divides n: another form
        assert counter.num_compiles == 1 and len(counted) == 1 and "negate" in counted[0], counted
        counter.close()
        launch(negate, (1,), values, 1, BLOCK=32)
        assert counter.num_compiles == 1
        """,
    )


def test_later_launches_run_the_same_binary_as_triton_would(tmp_path):
    """For each alignment, dtype and kind of integer, and for other devices; only first launches go through Triton."""
    script(
        tmp_path,
        NEGATE,
        """
        from kernels.gpu.launch import BoundKernel
        from kernels.gpu.compile_only_driver import CompileOnlyDriver

        ran = []

        class Launcher:
            def __init__(self, src, metadata):
                self.binary = src.signature, src.attrs, metadata.target

            def __call__(self, x, y, z, stream, function, metadata, _, enter, exit, *args):
                pointer = args[0] if isinstance(args[0], int) else args[0].data_ptr()
                ran.append((self.binary, metadata, (x, y, z), pointer, args[1:]))

        def use(target):
            driver = CompileOnlyDriver(TARGETS[target])
            driver.launcher_cls = Launcher
            triton.runtime.driver.set_active(driver)

        use("sm_80")
        host = torch.zeros(1024)
        dispatched = []
        dispatch = BoundKernel.dispatch
        BoundKernel.dispatch = lambda *args: dispatched.append(args) or dispatch(*args)
        kernel = BoundKernel(negate, BLOCK=32, num_warps=1)
        binaries = set()
        for args in ((host, 17), (host[1:], 17), (host, 16), (host, 1), (host.int(), 17), (host, 2**31), (host, 17.0)):
            for number, grid in enumerate([(3,), (2, 3), (4, 5, 6)]):
                dispatched.clear()
                kernel(grid, *args)
                dispatch(kernel, grid, *args)
                assert ran[-1] == ran[-2], ran[-2:]
                always_dispatched = args[1] == 2**31 or isinstance(args[1], float)
                assert len(dispatched) == (number == 0 or always_dispatched), (args[1:], number)
            binaries.add(str(ran[-1][0]))
        assert len(binaries) == 7, binaries
        use("sm_90")
        kernel((1,), host, 17)
        assert ran[-1][0][2].arch == 90, ran[-1]
        """,
    )


@pytest.mark.slow
def test_compile_errors_are_collected_and_later_compiles_work(tmp_path):
    script(
        tmp_path,
        NEGATE
        + """
    @triton.jit
    def wrong(ptr, BLOCK: tl.constexpr):
        tl.store(ptr + tl.arange(0, BLOCK), tl.nothing_of_the_kind)
""",
        """
        try:
            with compile_only():
                launch(wrong, (1,), values, BLOCK=16)
                launch(negate, (1,), values, 17, BLOCK=16)
                launch(wrong, (1,), values, BLOCK=32)
        except UnsupportedTargetError as error:
            assert str(error).startswith("2 of 3 GPU kernels do not compile with Triton 3."), error
            assert "such as wrong: AttributeError(" in str(error) and "nothing_of_the_kind" in str(error), error
            assert len(str(error).splitlines()) == 1 and str(error).endswith("needs no kernels, or --device cpu"), error
            assert len(error.__cause__.exceptions) == 2
        else:
            raise AssertionError("nothing was raised")
        counter = CompileCounter()
        launch(negate, (1,), values, 17, BLOCK=16)
        assert counter.num_compiles == 0
        with compile_only() as compiled:
            launch(negate, (1,), values, 17, BLOCK=64)
        assert compiled[0].name == "negate"
        """,
    )


def test_a_kernel_that_does_not_fit_the_gpu_is_named_with_its_need_and_the_limit(tmp_path):
    script(
        tmp_path,
        """
    @triton.jit
    def wide(ptr, BLOCK: tl.constexpr):
        offsets = tl.arange(0, BLOCK)
        x = tl.load(ptr + offsets[:, None] * BLOCK + offsets)
        tl.store(ptr + offsets[:, None] * BLOCK + offsets, tl.dot(x, x).to(x.dtype))
""",
        """
        from dataclasses import replace
        from kernels.gpu.launch import load_kernels

        half = torch.empty(1 << 14, device="meta", dtype=torch.float16)
        use_compile_only_driver(replace(TARGETS["sm_80"], max_shared_bytes=1024))
        with compile_only() as compiled:
            launch(wide, (1,), half, BLOCK=64)
        need = compiled[0].metadata.shared
        try:
            load_kernels(compiled)
        except UnsupportedTargetError as error:
            assert f"kernel wide needs {need} bytes of shared memory, the GPU has 1024. Use --kernels" in str(error)
        else:
            raise AssertionError("nothing was raised")
        """,
    )


def test_a_missing_c_compiler_is_named(monkeypatch):
    from kernels.gpu import launch

    class Driver:
        @property
        def active(self):
            raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(launch, "driver", Driver())
    with pytest.raises(UnsupportedTargetError, match=r"Triton cannot call the GPU: Failed to find C compiler.*gcc"):
        launch.load_driver()


@pytest.mark.slow
def test_progress_is_shown_while_kernels_are_compiled(tmp_path):
    """Of each kernel that was not compiled before, once, though it is launched twice; wrong ones end too."""
    script(
        tmp_path,
        NEGATE
        + """
    @triton.jit
    def wrong(ptr, BLOCK: tl.constexpr):
        tl.store(ptr + tl.arange(0, BLOCK), tl.nothing_of_the_kind)
""",
        """
        shown = []

        def progress(iterable, /, *, desc, total):
            shown.append((desc, total))
            for future in iterable:
                assert future.done()
                shown.append("one more")
                yield future

        with compile_only():
            launch(negate, (1,), values, 17, BLOCK=16)
        with compile_only(progress=progress):
            for block in (16, 32, 64, 64):
                launch(negate, (1,), values, 17, BLOCK=block)
        assert shown == [("compiling kernels", 2), "one more", "one more"], shown
        shown.clear()
        with compile_only(progress=progress):
            launch(negate, (1,), values, 17, BLOCK=64)
        assert shown == []
        try:
            with compile_only(progress=progress):
                launch(wrong, (1,), values, BLOCK=16)
        except UnsupportedTargetError:
            pass
        assert shown == [("compiling kernels", 1), "one more"], shown
        """,
    )


@pytest.mark.slow
def test_full_disk_is_not_reported_as_a_kernel_error(tmp_path):
    """With room in the temporary folder kernels compile; without, one error says what to do."""
    script(
        tmp_path,
        NEGATE,
        """
        import errno, os, tempfile
        import triton.runtime.cache
        from kernels.gpu.kernel_cache import NoRoomError, use_kernel_cache

        triton.knobs.cache.dir = os.path.join(os.path.dirname(__file__), "cache")
        full = [triton.knobs.cache.dir]

        def no_room(path, mode="r", **kwargs):
            if "w" in mode and path.startswith(tuple(full)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return open(path, mode, **kwargs)

        triton.runtime.cache.open = no_room
        use_kernel_cache()
        with compile_only() as compiled:
            launch(negate, (1,), values, 17, BLOCK=16)
        assert compiled[0].name == "negate" and compiled[0].asm["ptx"] and compiled[0].kernel
        full.append(tempfile.gettempdir())
        try:
            with compile_only():
                launch(negate, (1,), values, 17, BLOCK=32)
        except NoRoomError as error:
            assert "No space left on device; make room in" in str(error)
        else:
            raise AssertionError("nothing was raised")
        """,
    )


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
