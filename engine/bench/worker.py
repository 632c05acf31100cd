"""An engine without a server, and `transformers`, for experiments of the load generator, which imports neither.

`python -m engine.bench.worker` reads one JSON request per line on stdin and writes one JSON answer per line on stdout.
It keeps what it has loaded and sleeps in a read between requests, so that other systems have the machine. Times are
measured here and exclude the pipe. `loadgen.experiments.peers.worker` is the other end.

    {"call": "checkpoint", "shape": ..., "folder": ..., "dtype": ...} -> {"path": ...}     random weights
    {"call": "gguf", "checkpoint": ..., "out": ..., "type": "F32" | "F16" | "BF16"}       -> {}
    {"call": "twin", "gguf": ..., "checkpoint": ..., "out": ...}      -> {}                the numbers in a GGUF file
    {"call": "engine", "flags": [...]}                                -> {}                loads an engine
    {"call": "transformers", "model": ..., "threads": n, "dtype": ...} -> {}               loads a model
    {"call": "continuous", "prompts": [[ids]], "max_tokens": [n]}     -> {}                starts continuous batching
    {"call": "generate", "way": "engine" | "streaming" | "batches" | "continuous", "prompts": ..., "max_tokens": ...,
     "batch_size": n}
        -> {"token_ids": [[ids]], "token_times_s": [[seconds]], "wall_s": seconds, "batches": [[positions, steps]]}
    {"call": "judge", "prompts": [[ids]], "output_ids": [[ids]]}      -> fields of Agreement
    any failure                                                       -> {"error": ...}
"""

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from chairlift.bench.run import Run
from chairlift.bench.workload import Workload
from engine.bench.agreement import greedy_agreement, load_reference
from engine.bench.gguf_writer import save_gguf, save_twin
from engine.bench.serve import engine, serve
from engine.bench.shapes import save_checkpoint
from engine.bench.transformers_peer import (
    Answers,
    PaddedBatch,
    continuous_batching,
    generate,
    generate_streaming,
    import_transformers,
)
from engine.config import parse_config
from engine.serving.parts import EngineParts


class Worker:
    """Holds what is loaded: at most one engine and one model of `transformers`."""

    def __init__(self) -> None:
        self._parts: EngineParts | None = None
        self._model: Any = None
        self._continuous: Callable[..., Answers] | None = None
        self._stack = contextlib.ExitStack()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Executes one call."""
        match request["call"]:
            case "checkpoint":
                import_transformers()
                dtype = getattr(torch, request["dtype"])
                return {"path": str(save_checkpoint(request["shape"], Path(request["folder"]), dtype=dtype))}
            case "gguf":
                save_gguf(Path(request["checkpoint"]), Path(request["out"]), request["type"])
            case "twin":
                save_twin(Path(request["gguf"]), Path(request["checkpoint"]), Path(request["out"]))
            case "engine":
                self._parts = engine(parse_config(request["flags"], {}))
            case "transformers":
                torch.set_num_threads(request["threads"])
                self._model = load_reference(Path(request["model"]), getattr(torch, request["dtype"]))
            case "continuous":
                manager = continuous_batching(self._model, _workload(request))
                self._continuous = self._stack.enter_context(manager)
            case "generate":
                run, batches = self._generate(request["way"], _workload(request), request.get("batch_size", 1))
                return {
                    "token_ids": run.output_ids,
                    "token_times_s": run.token_times_s,
                    "wall_s": run.wall_s,
                    "batches": batches,
                }
            case "judge":
                return asdict(greedy_agreement(self._model, request["prompts"], request["output_ids"]))
            case other:
                raise ValueError(f"unknown call {other!r}")
        return {}

    def close(self) -> None:
        """Ends the continuous batching."""
        self._stack.close()

    def _generate(self, way: str, workload: Workload, batch_size: int) -> tuple[Run, Sequence[PaddedBatch]]:
        started_s = time.perf_counter()
        if way == "engine":
            assert self._parts is not None
            return serve(self._parts, workload.prompts, workload.max_tokens), ()
        if way == "streaming":
            return generate_streaming(self._model, workload), ()
        batches: Sequence[PaddedBatch] = ()
        if way == "batches":
            answers, batches = generate(self._model, workload, batch_size)
        else:
            assert self._continuous is not None
            answers = self._continuous(workload)
        wall_s = time.perf_counter() - started_s
        times_s = tuple((wall_s,) * len(answer) for answer in answers)
        return Run(answers, times_s, (0.0,) * len(answers), (), wall_s), batches


def _workload(request: dict[str, Any]) -> Workload:
    return Workload(tuple(map(tuple, request["prompts"])), tuple(request["max_tokens"]))


def _own_stdout() -> TextIO:
    """Returns the pipe for answers; anything else that is printed, also by libraries, goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


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
    worker.close()


if __name__ == "__main__":
    main()
