"""When a CPU multiplies in bfloat16: if a flag asks for it and the CPU can."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.startup.build import build_engine
from engine.startup.cpu_threads import multiplies_in_bf16
from engine.startup.progress import StartupProgress
from engine.startup.served_model import load
from kernels.cpu.cpu_features import cpu_features
from kernels.cpu.packed_linear import Kind


@pytest.mark.parametrize(
    ("has_bf16", "fields", "expected", "words"),
    [
        (True, {"dtype": "bfloat16"}, True, "multiply in bfloat16"),
        (False, {"dtype": "bfloat16"}, False, "no AVX512-BF16"),
        (True, {}, False, None),
        (False, {}, False, None),
        (True, {"dtype": "float32"}, False, None),
        (True, {"dtype": "float16"}, False, None),
        (True, {"dtype": "bfloat16", "quantization": "int8"}, False, None),
        (False, {"dtype": "bfloat16", "quantization": "int8"}, False, None),
    ],
)
def test_a_flag_and_the_cpu_decide(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_bf16: bool,
    fields: dict[str, Any],
    expected: bool,
    words: str | None,
) -> None:
    features = replace(cpu_features(), bf16=has_bf16)
    monkeypatch.setattr("engine.startup.cpu_threads.cpu_features", lambda: features)
    with caplog.at_level("INFO"):
        assert multiplies_in_bf16(EngineConfig(model="any", **fields)) is expected
    assert len(caplog.records) == (words is not None)
    assert (words or "") in caplog.text


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_an_engine_multiplies_a_bf16_checkpoint_in_bf16_only_by_the_flag(
    servable: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    models: list[Any] = []

    def load_and_keep(*arguments: Any, **options: Any) -> Any:
        models.append(load(*arguments, **options))
        return models[-1]

    monkeypatch.setattr("engine.startup.rank.load", load_and_keep)
    config = EngineConfig(
        model=str(servable(dtype="bfloat16")), device="cpu", dtype=dtype, num_gpu_blocks_override=8, threads=1
    )
    build_engine(config, StartupProgress())
    [model] = models
    in_bf16 = dtype == "bfloat16" and cpu_features().bf16
    kinds = [linear._packed.kind for layer in model.layers for linear in layer.linears]
    assert {*kinds, model.vocabulary._packed_head.kind} == {Kind.BF16 if in_bf16 else Kind.BF16_WEIGHTS}
