"""The profile of a step: every instruction is in one part, and parts are within the step."""

from pathlib import Path

import numpy as np
import pytest

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.shapes import write_shape
from chairlift.bench.workload import Workload
from engine.bench.fresh_scheduler import serve_anew
from engine.bench.serve import engine
from engine.bench.step_profile import PARTS, ProgramClock, draw, grouped, part_seconds
from engine.config import EngineConfig
from kernels.cpu.instruction import Opcode


def test_every_opcode_is_in_one_part() -> None:
    assert sorted(opcode for opcodes in PARTS.values() for opcode in opcodes) == sorted(Opcode)


def test_instructions_are_added_up_by_part() -> None:
    opcodes = np.array([Opcode.LINEAR, Opcode.PLAN_ATTENTION, Opcode.LINEAR, Opcode.PAGED_ATTENTION])
    seconds = part_seconds(opcodes, np.array([1.0, 2.0, 4.0, 8.0]))
    assert seconds == {"linear": 5, "attention": 10}


def test_steps_are_grouped_by_their_tokens_and_the_largest_come_first() -> None:
    parts = [{"linear": float(seconds)} for seconds in (1, 3, 5, 7)]
    groups = grouped([10, 1, 301, 11], parts)
    assert [(group.name, group.num_steps, group.seconds["linear"]) for group in groups] == [
        ("over 300 tokens", 1, 5),
        ("11 to 32 tokens", 1, 7),
        ("1 to 10 tokens", 2, 2),
    ]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_parts_of_a_program_are_within_its_step(tmp_path: Path, threads: int) -> None:
    config = EngineConfig(
        model=str(write_shape("tiny", tmp_path)), load_format="dummy", max_model_len=64, threads=threads
    )
    parts = engine(config)
    clock = ProgramClock()
    with clock.running():
        run = serve_anew(parts, Workload(((1, 2, 3),), (5,)))
    programs = clock.take()
    assert len(programs) == len(run.steps) == 5
    for program, step in zip(programs, run.steps, strict=True):
        assert set(program) == set(PARTS) - {"routing", "linear attention"}
        assert min(program.values()) > 0
        assert sum(program.values()) < step.execute_s
    serve_anew(parts, Workload(((1, 2, 3),), (5,)))
    assert clock.take() == []


def test_profile_is_drawn_as_svg_and_other_types_are_rejected(tmp_path: Path) -> None:
    groups = grouped([1, 400], [{"linear": 1.0, "attention": 0.5}, {"linear": 2.0, "attention": 2.0}])
    path = tmp_path / "profile.svg"
    draw(groups, "tiny, fp32", path)
    assert "over 300 tokens" in path.read_text()
    with pytest.raises(BenchmarkError, match=r"profile\.jam"):
        draw(groups, "", tmp_path / "profile.jam")
