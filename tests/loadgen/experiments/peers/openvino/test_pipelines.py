import json
import sys
from pathlib import Path

import pytest

from chairlift.bench.benchmark import Settings
from chairlift.bench.workload import Workload
from loadgen.experiments.peers.formats import FORMATS, Terms
from loadgen.experiments.peers.openvino import pipelines
from loadgen.experiments.peers.openvino.pipelines import OPENVINO, OPENVINO_CACHED, open_openvino


@pytest.mark.parametrize(("precision", "kv_cache"), [("fp32", "f32"), ("int8", "u8"), ("bf16", "bf16")])
def test_both_pipelines_are_loaded_with_their_precision(
    precision: str, kv_cache: str, worker_script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines, "openvino_python", lambda progress: Path(sys.executable))
    monkeypatch.setattr(pipelines, "convert_checkpoint", lambda python, model, out, weight_format: out)
    monkeypatch.setattr(pipelines, "_SCRIPT", worker_script)
    settings = Settings(
        rounds=1,
        quick=True,
        threads=1,
        scratch=tmp_path,
        floors=None,
        progress=lambda _: None,
    )
    with open_openvino(FORMATS[precision], Path("checkpoint"), Terms(512, 4, 64), settings) as systems:
        assert list(systems) == [OPENVINO, OPENVINO_CACHED]
        for pipeline in systems.values():
            assert pipeline.generate(Workload(((1,),), (3,))).output_ids == ((2, 3, 4),)
    said = [
        json.loads(line) for line in (tmp_path / f"openvino-{precision}.log").read_text().splitlines() if line[0] == "["
    ]
    assert [scheduler["enable_prefix_caching"] for _, _, scheduler, _ in said] == [False, True]
    for model, _, scheduler, properties in said:
        assert precision in model
        assert "max_num_seqs" not in scheduler  # it would be ignored
        assert properties["INFERENCE_NUM_THREADS"] == 1
        assert properties["KV_CACHE_PRECISION"] == kv_cache
        assert ("INFERENCE_PRECISION_HINT" in properties) == (precision == "fp32")  # its default otherwise
