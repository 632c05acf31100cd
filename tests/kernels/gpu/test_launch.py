"""Kernels are compiled in a block and counted after it; what does not compile or fit is named."""

import pytest

from kernels.gpu import launch
from kernels.gpu.targets import UnsupportedTargetError
from tests.support.kernels.compile_scripts import NEGATE, script


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
