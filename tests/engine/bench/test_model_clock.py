"""The clock times every step of engines built while it is installed, and of no others."""

from pathlib import Path

from chairlift.bench.shapes import write_shape
from chairlift.bench.workload import Workload
from engine.bench.fresh_scheduler import serve_anew
from engine.bench.model_clock import ModelClock
from engine.bench.serve import engine
from engine.config import EngineConfig


def test_every_step_of_an_engine_built_under_it_is_timed(tmp_path: Path) -> None:
    config = EngineConfig(model=str(write_shape("tiny", tmp_path)), load_format="dummy", max_model_len=64, threads=1)
    workload = Workload(((1, 2, 3),), (5,))
    clock = ModelClock()
    with clock.installed():
        timed = engine(config)
    untimed = engine(config)
    clock.take()  # warming up runs the model too

    run = serve_anew(timed, workload)
    seconds = clock.take()
    assert len(seconds) == len(run.steps) == 5
    assert all(0 < model_s < step.execute_s for model_s, step in zip(seconds, run.steps, strict=True))
    assert serve_anew(untimed, workload).output_ids == run.output_ids
    assert clock.take() == []
