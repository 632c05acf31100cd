from pathlib import Path

from chairlift.bench.workload import uniform_workload
from engine.bench.agreement import greedy_agreement, load_reference
from engine.bench.shapes import SHAPES, save_checkpoint
from engine.bench.transformers_solo import TransformersSolo


def test_answers_are_greedy_of_full_length_and_timed(tmp_path: Path) -> None:
    model = load_reference(save_checkpoint("tiny", tmp_path))
    workload = uniform_workload(3, prompt_lens=(2, 6), output_lens=(3, 5), vocab_size=SHAPES["tiny"].vocab_size)
    run = TransformersSolo(model).generate(workload)
    assert tuple(map(len, run.output_ids)) == workload.max_tokens
    assert greedy_agreement(model, workload.prompts, run.output_ids).num_wrong == 0
    times_s = [time_s for times in run.token_times_s for time_s in times]
    assert len(times_s) == workload.num_output_tokens
    assert times_s == sorted(times_s)  # one request after the other
    assert 0 < times_s[0] < times_s[-1] <= run.wall_s
