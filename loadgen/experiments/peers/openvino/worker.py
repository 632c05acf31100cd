"""The OpenVINO side of a comparison: one JSON request per line on stdin, one JSON answer per line on stdout.

Run by the interpreter of `environment.py`, which has nothing of Chairlift. It keeps its pipelines loaded and sleeps in
a read between requests, so that the other side can have the machine. Times are measured here: nothing of the pipe is in
them. `loadgen.experiments.peers.worker` is the other end.

    {"call": "load", "name": ..., "model": ..., "properties": {...}, "scheduler": {...}}   -> {}
    {"call": "generate", "name": ..., "prompts": [[ids]], "max_tokens": [n]}
        -> {"token_ids": [[ids]], "token_times_s": [[seconds since the start, one per token]], "wall_s": seconds}
    anything that fails                                                                    -> {"error": ...}
"""

import json
import os
import sys
import time
import traceback
from typing import Any, TextIO

import numpy as np
import openvino
import openvino_genai as genai


def main() -> None:
    """Answers until stdin ends."""
    answers = _own_stdout()
    worker = Worker()
    for line in sys.stdin:
        try:
            answer = worker.answer(json.loads(line))
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Worker:
    """Pipelines by name."""

    def __init__(self) -> None:
        self._pipelines: dict[str, Any] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Does one call."""
        match request["call"]:
            case "load":
                scheduler = genai.SchedulerConfig()
                for field, value in request["scheduler"].items():
                    setattr(scheduler, field, value)
                self._pipelines[request["name"]] = genai.ContinuousBatchingPipeline(
                    request["model"], scheduler, "CPU", request["properties"]
                )
                return {}
            case "generate":
                return _generate(self._pipelines[request["name"]], request["prompts"], request["max_tokens"])
            case other:
                raise ValueError(f"call is {other!r}, it must be 'load' or 'generate'")


def _generate(pipeline: Any, prompts: list[list[int]], max_tokens: list[int]) -> dict[str, Any]:
    """All requests at once, greedy, to their full lengths."""
    inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
    token_ids: list[list[int]] = [[] for _ in prompts]
    times_s: list[list[float]] = [[] for _ in prompts]
    started_s = time.perf_counter()
    handles = [
        pipeline.add_request(index, prompt, _greedy(limit))
        for index, (prompt, limit) in enumerate(zip(inputs, max_tokens, strict=True))
    ]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now_s = time.perf_counter() - started_s
        for index, handle in enumerate(handles):
            while handle.can_read():
                for output in handle.read().values():
                    token_ids[index] += output.generated_ids
                    times_s[index] += [now_s] * len(output.generated_ids)
    wall_s = time.perf_counter() - started_s
    return {"token_ids": token_ids, "token_times_s": times_s, "wall_s": wall_s}


def _greedy(max_tokens: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def _own_stdout() -> TextIO:
    """The pipe, for answers only: whatever else is printed, by libraries too, goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
