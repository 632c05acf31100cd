"""The check of kernels at the start of an engine."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.fp4 import Fp4Weights, Layout
from engine.model.fp8 import Fp8Weights
from engine.startup.build import build_engine
from engine.startup.kernel_check import model_forms
from engine.startup.progress import StartupProgress
from kernels.check import Mismatch
from kernels.cpu.checked_forms import is_checked, remember_checked
from kernels.cpu.ops import CpuOps
from kernels.model_forms import ModelForms
from tests.support.engine.int_checkpoints import Scheme, quantise_checkpoint


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the results of checks."""
    monkeypatch.setattr("kernels.cpu.checked_forms.cache_folder", lambda: tmp_path)
    return tmp_path


def start(model_dir: Path, **fields: Any) -> None:
    build_engine(
        EngineConfig(model=str(model_dir), device="cpu", num_gpu_blocks_override=8, **fields), StartupProgress()
    )


@pytest.fixture
def faulty_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CpuOps.paged_attention

    def doubled(self: CpuOps, *args: Any, **options: Any) -> torch.Tensor:
        result = right(self, *args, **options)
        return result if self._step is not None else 2 * result  # a recorded step, which is not checked, stays right

    monkeypatch.setattr(CpuOps, "paged_attention", doubled)


@pytest.mark.usefixtures("faulty_attention")
def test_a_faulty_kernel_ends_the_start_with_one_line(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.startup.rank.load", pytest.fail)  # it is found before the weights are read
    with pytest.raises(ConfigError) as caught:
        start(model_dir)
    assert re.fullmatch(
        r"kernel check: paged_attention \(decode, float32, cache float32, 4 heads over 2 of 16, blocks of 16\) has an "
        r"error of [1-9]\S*, 0\.001 is allowed, and 1 more kernels: use --kernels torch, or serve regardless with "
        r"--kernel-check warn",
        str(caught.value),
    )


def test_a_faulty_mixture_of_experts_ends_the_start(
    servable: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CpuOps.mix_experts
    monkeypatch.setattr(CpuOps, "mix_experts", lambda self, x, experts: 2 * right(self, x, experts))
    expected = r"mixture of experts \(float32, weights float32, 3 of 4 experts of 40, 64 wide\) has an error of"
    with pytest.raises(ConfigError, match=expected):
        start(servable("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[]))


def test_integers_pass_beside_weights_in_bfloat16(servable: Callable[..., Path], tmp_path: Path) -> None:
    """A CPU rounds none of their values to the dtype of other weights, so that the reference must not either."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    original = servable(dtype="bfloat16", **sizes)
    integers, twin = (shutil.copytree(original, tmp_path / name) for name in ("integers", "twin"))
    quantise_checkpoint(original, integers, twin, Scheme("packed"))
    start(integers, kernel_check="fail")


@pytest.mark.usefixtures("faulty_attention")
@pytest.mark.parametrize(("kernel_check", "num_warnings"), [("warn", 2), ("off", 0)])
def test_a_faulty_kernel_is_logged_or_ignored_on_request(
    model_dir: Path, caplog: pytest.LogCaptureFixture, kernel_check: str, num_warnings: int
) -> None:
    start(model_dir, kernel_check=kernel_check)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Kernel check: ")]
    assert len(lines) == num_warnings
    assert all("answers may be wrong, use --kernels torch" in line for line in lines)


def test_kernels_that_passed_are_not_checked_again(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(model_dir)
    checked: list[ModelForms] = []

    def find(_ops: object, _reference: object, forms: ModelForms, _cases: object) -> list[Mismatch]:
        checked.append(forms)
        return []

    monkeypatch.setattr("engine.startup.kernel_check.find_mismatches", find)
    start(model_dir)
    assert not checked
    start(model_dir, block_size=32)
    assert [forms.block_size for forms in checked] == [32]  # other forms are


def test_a_damaged_file_of_results_does_not_stop_a_start(model_dir: Path, folder: Path) -> None:
    start(model_dir)
    (file,) = folder.glob("checked-*.txt")
    file.write_bytes(b"\xff\n" + file.read_bytes())
    start(model_dir)


@pytest.mark.usefixtures("faulty_attention")
def test_kernels_that_failed_are_checked_again(model_dir: Path, folder: Path) -> None:
    start(model_dir, kernel_check="warn")
    assert not list(folder.iterdir())
    with pytest.raises(ConfigError, match="kernel check"):
        start(model_dir)


@pytest.mark.parametrize("what", ["source", "package", "cpu"])
def test_a_result_counts_for_this_cpu_these_packages_and_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    import kernels.cpu.checked_forms as checked

    sources = tmp_path / "kernels"
    (sources / "cpu").mkdir(parents=True)
    (sources / "cpu" / "a.py").write_text("1")
    monkeypatch.setattr(checked, "kernel_sources", lambda: [*sources.glob("cpu/*.py")])
    checked._environment.cache_clear()
    try:
        remember_checked("form")
        assert is_checked("form")
        assert not is_checked("other")
        if what == "source":
            (sources / "cpu" / "a.py").write_text("2")
        elif what == "package":
            monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
        else:
            monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: "other")
            monkeypatch.setattr("numba.config.CPU_NAME", None)
        checked._environment.cache_clear()
        assert not is_checked("form")
    finally:
        checked._environment.cache_clear()


def test_without_a_cache_folder_kernels_are_checked_at_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.checked_forms.cache_folder", lambda: None)
    remember_checked("form")
    assert not is_checked("form")


@pytest.mark.parametrize(
    ("has_blocks", "keeps_fp8", "weights"),
    [(False, True, "fp8 checkpoint"), (True, True, "fp8 blocks"), (False, False, None), (True, False, None)],
)
def test_products_of_8_bit_checkpoints_are_checked_where_they_are_not_converted(
    model_dir: Path, has_blocks: bool, keeps_fp8: bool, weights: str | None
) -> None:
    config = replace(ModelConfig.from_dir(model_dir), quantized=Fp8Weights((), has_blocks))
    engine_config = EngineConfig(model="any")
    forms = model_forms(engine_config, config, torch.bfloat16, torch.bfloat16, kept=(Fp8Weights,) if keeps_fp8 else ())
    assert forms.weights_form == weights


@pytest.mark.parametrize(
    ("layout", "quantization", "weights"),
    [
        ("modelopt", None, "nvfp4 groups"),
        ("nvfp4", None, "nvfp4 groups"),
        ("mxfp4", None, "mxfp4 groups"),
        ("mxfp4", "int8", "int8"),
        ("modelopt", "fp8", "nvfp4 groups"),
    ],
)
def test_products_of_4_bit_floats_are_checked_where_they_are_not_quantised_again(
    servable: Callable[..., Path], layout: Layout, quantization: Any, weights: str
) -> None:
    config = replace(ModelConfig.from_dir(servable("qwen3_moe")), quantized=Fp4Weights(layout))
    engine_config = EngineConfig(model="any", quantization=quantization)
    forms = model_forms(engine_config, config, torch.float32, torch.float32, kept=(Fp4Weights,))
    assert forms.weights_form == weights
    assert forms.experts is not None
    assert forms.experts.is_microscaled == (weights == "mxfp4 groups")
    converted = model_forms(engine_config, config, torch.float32, torch.float32, kept=())
    assert converted.weights_form == quantization
