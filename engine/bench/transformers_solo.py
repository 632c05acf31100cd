"""`transformers` as a contender: `generate` on one request after the other, in this process."""

import time
from typing import Any

import torch

from chairlift.bench.workload import Workload
from engine.bench.serve import Run


class TransformersSolo:
    """Answers requests one by one, fp32, with the library's own KV cache.

    Args:
        model: see `agreement.load_reference`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def generate(self, workload: Workload) -> Run:
        """See `Contender.generate`."""
        started_s = time.perf_counter()
        recorders = [
            self._answer(prompt, limit, started_s)
            for prompt, limit in zip(workload.prompts, workload.max_tokens, strict=True)
        ]
        return Run(
            output_ids=tuple(tuple(recorder.token_ids) for recorder in recorders),
            token_times_s=tuple(tuple(recorder.times_s) for recorder in recorders),
            arrivals_s=(0.0,) * len(recorders),
            steps=(),
            wall_s=time.perf_counter() - started_s,
        )

    @property
    def pids(self) -> frozenset[int]:
        """None: it has no process of its own, and between calls it does nothing."""
        return frozenset()

    def _answer(self, prompt: tuple[int, ...], max_tokens: int, started_s: float) -> "_Recorder":
        recorder = _Recorder(started_s)
        prompt_ids = torch.tensor([prompt])
        self._model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=recorder,
        )
        return recorder


class _Recorder:
    """What `generate` takes as a streamer: it is handed the prompt first, then each token."""

    def __init__(self, started_s: float) -> None:
        self.token_ids: list[int] = []
        self.times_s: list[float] = []
        self._started_s = started_s
        self._has_prompt = False

    def put(self, token_ids: torch.Tensor) -> None:
        """Takes the prompt or a token."""
        if self._has_prompt:
            self.token_ids += token_ids.flatten().tolist()
            self.times_s.append(time.perf_counter() - self._started_s)
        self._has_prompt = True

    def end(self) -> None:
        """Nothing follows."""
