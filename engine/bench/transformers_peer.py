"""`transformers` as a peer: its ways to answer a workload greedily, each answer to its full length.

It is a development dependency, imported when needed.
"""

import contextlib
import importlib
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.run import Run
from chairlift.bench.workload import Workload

Answers = tuple[tuple[int, ...], ...]

_PAGE_TOKENS = 256  # the default
_STEP_TOKENS = 512  # Chairlift's default: a step of the library's own size would take seconds on a CPU
_POLL_S = 0.5


def import_transformers() -> Any:
    """Imports the module without its progress bars; typed loosely, as most of its functions are untyped.

    Raises: BenchmarkError: it is not installed.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise BenchmarkError(f"{error}: install chairlift[dev]") from error
    transformers.utils.logging.disable_progress_bar()
    return transformers


def random_model(model_dir: Path, device: torch.device, dtype: torch.dtype, *, seed: int = 0) -> Any:
    """Makes a model of a folder's config.json with normally distributed weights that keep activations at unit scale.

    It is made on its device: a host would need minutes for the random numbers of an 8B model.
    """
    transformers = import_transformers()
    config = transformers.AutoConfig.from_pretrained(model_dir)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
    return model.eval()


class PaddedBatch(NamedTuple):
    """Size of one batch of `generate`: columns of its prompt tensor, and tokens generated for every row."""

    num_positions: int
    num_steps: int


@torch.inference_mode()
def generate(
    model: Any, workload: Workload, batch_size: int, *, max_seconds: float | None = None
) -> tuple[Answers, list[PaddedBatch]]:
    """Runs `generate` on static batches, prompts padded on the left to the longest of their batch.

    Args:
        model: causal model on its device.
        workload: requests in the order in which batches are filled.
        batch_size: requests per batch.
        max_seconds: time limit of each batch; answers may then be shorter.
    Returns: each request's answer, cut to the requested length, and the batches.
    """
    answers: list[tuple[int, ...]] = []
    batches: list[PaddedBatch] = []
    for start in range(0, len(workload.prompts), batch_size):
        prompts = workload.prompts[start : start + batch_size]
        max_tokens = workload.max_tokens[start : start + batch_size]
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ids = model.generate(
            torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=max(max_tokens),
            max_time=max_seconds,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        rows = ids[:, longest:].tolist()
        answers += [tuple(row[:length]) for row, length in zip(rows, max_tokens, strict=True)]
        batches.append(PaddedBatch(longest, len(rows[0])))
    return tuple(answers), batches


def generate_streaming(model: Any, workload: Workload) -> Run:
    """Runs `generate` on one request after the other and records the time of every token."""
    started_s = time.perf_counter()
    streamers = []
    for prompt, limit in zip(workload.prompts, workload.max_tokens, strict=True):
        streamers.append(_Streamer(started_s))
        prompt_ids = torch.tensor([prompt])
        model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=streamers[-1],
        )
    return Run(
        output_ids=tuple(tuple(streamer.token_ids) for streamer in streamers),
        token_times_s=tuple(tuple(streamer.times_s) for streamer in streamers),
        arrivals_s=(0.0,) * len(streamers),
        steps=(),
        wall_s=time.perf_counter() - started_s,
    )


class _Streamer:
    """Streamer of `generate`: receives the prompt first, then each token."""

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
        """Ends the answer."""


@contextlib.contextmanager
def continuous_batching(model: Any, workload: Workload) -> Iterator[Callable[..., Answers]]:
    """Starts its continuous batching, which is paged; requests keep their own lengths.

    On a GPU it chooses its sizes by the free memory and is warmed up, which includes CUDA graphs. On a CPU it would
    take most of the memory, so the cache is sized for the workload. Prefix sharing is off.

    Args:
        model: causal model on its device.
        workload: the largest one to come.
    Returns: a function that answers a workload, with an optional limit `max_seconds`.
    """
    transformers = import_transformers()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # it warns that psutil is missing
    is_gpu = model.device.type == "cuda"
    num_tokens = [len(prompt) + limit for prompt, limit in zip(workload.prompts, workload.max_tokens, strict=True)]
    sizes = {
        "page_size": _PAGE_TOKENS,
        "num_blocks": sum(-(-tokens // _PAGE_TOKENS) for tokens in num_tokens),
        "max_batch_tokens": _STEP_TOKENS,
    }
    options: dict[str, Any] = {
        "generation_config": transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(workload.max_tokens)
        ),
        "continuous_batching_config": transformers.ContinuousBatchingConfig(
            allow_block_sharing=False, **({} if is_gpu else sizes)
        ),
    }
    start = model.continuous_batching_context_manager
    if "warmup" in inspect.signature(start).parameters:
        options["warmup"] = is_gpu
    with start(**options) as manager:
        yield lambda requests, max_seconds=math.inf: _answers(manager, requests, max_seconds)


def _answers(manager: Any, workload: Workload, max_seconds: float) -> Answers:
    """Raises BenchmarkError if it stops, takes longer, or answers with another length."""
    deadline_s = time.perf_counter() + max_seconds
    request_ids = [
        manager.add_request(list(prompt), max_new_tokens=limit)
        for prompt, limit in zip(workload.prompts, workload.max_tokens, strict=True)
    ]
    answers: dict[str, tuple[int, ...]] = {}
    while len(answers) < len(request_ids):
        output = manager.get_result(timeout=_POLL_S)
        num_open = len(request_ids) - len(answers)
        if output is not None and output.is_finished():
            answers[output.request_id] = tuple(output.generated_tokens)
        elif output is None and not manager.is_running():
            raise BenchmarkError(f"continuous batching of transformers stopped with {num_open} requests open")
        elif time.perf_counter() > deadline_s:
            raise BenchmarkError(f"transformers' continuous batching left {num_open} requests open")
    ordered = tuple(answers[request_id] for request_id in request_ids)
    for answer, limit in zip(ordered, workload.max_tokens, strict=True):
        if len(answer) != limit:
            raise BenchmarkError(f"transformers answered with {len(answer)} tokens, {limit} were requested")
    return ordered
