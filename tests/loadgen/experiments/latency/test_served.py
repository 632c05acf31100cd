"""The step log of a served pair, read piece by piece."""

import json

from loadgen.experiments.latency.served import ServedPair


def test_new_steps_are_those_since_the_last_call_with_those_left_out(tmp_path):
    path = tmp_path / "steps.jsonl"
    common = {"t_ms": 0, "schedule_ms": 1, "execute_ms": 8, "update_ms": 1, "running": 0, "waiting": 0, "preempted": []}

    def append(step, request, usage):
        with path.open("a") as file:
            own = {
                "step": step,
                "scheduled": {request: 4},
                "usage": usage,
                "finished": dict.fromkeys(usage, "MAX_TOKENS"),
            }
            file.write(json.dumps({**common, **own}) + "\n")

    pair = ServedPair("127.0.0.1:1", path)
    append(1, "1", {"1": [4, 0, 1]})
    append(2, "2", {})  # of unknown shape: its request never ends
    first = pair.new_steps()
    append(3, "3", {"3": [4, 0, 1]})
    second = pair.new_steps()
    assert [(len(log.steps), log.num_left_out) for log in (first, second)] == [(1, 1), (1, 0)]
