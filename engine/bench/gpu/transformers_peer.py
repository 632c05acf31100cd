"""`transformers` on the same device: `generate` in one padded-free batch, and its continuous batching, kept warm."""

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.workload import Workload
from engine.bench.hugging_face import import_transformers

_POLL_S = 0.5


def random_model(model_dir: Path, device: torch.device, dtype: torch.dtype, *, seed: int = 0) -> Any:
    """A model of the folder's config.json, weights normally distributed so that activations keep unit scale.

    Made where it will run: a host would need minutes for the random numbers of an 8B model.
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


@torch.inference_mode()
def generate_tokens(model: Any, workload: Workload, *, most_seconds: float) -> tuple[int, float]:
    """`generate` on all requests as one batch, until the longest answer is there or the time is over.

    Args:
        model: on its device.
        workload: prompts of one length, so that nothing is padded.
        most_seconds: `max_time` of `generate`.
    Returns: tokens that were asked for and generated, and the seconds that took.
    """
    prompts = torch.tensor(workload.prompts, device=model.device)  # [batch, prompt_len]
    started_s = time.perf_counter()
    ids = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=max(workload.max_tokens),
        max_time=most_seconds,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    num_steps = int(ids.shape[1]) - prompts.shape[1]
    _synchronize(model.device)
    seconds = time.perf_counter() - started_s
    return sum(min(num_tokens, num_steps) for num_tokens in workload.max_tokens), seconds


@contextlib.contextmanager
def continuous_batching(model: Any, workload: Workload) -> Iterator[Callable[[Workload, float], float]]:
    """Its continuous batching with its own defaults, warmed up, which on a GPU means CUDA graphs; prefix sharing is
    off, as no two prompts share anything.

    Args:
        model: on its device.
        workload: what will come at most, from which it may choose its sizes.
    Returns: a function that answers a workload, given the seconds it may take, and returns the seconds it took.
    """
    transformers = import_transformers()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    manage = model.continuous_batching_context_manager
    options: dict[str, Any] = {
        "generation_config": transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(workload.max_tokens)
        ),
        "continuous_batching_config": transformers.ContinuousBatchingConfig(**_sizes(model, workload)),
    }
    if "warmup" in inspect.signature(manage).parameters:
        options["warmup"] = model.device.type == "cuda"
    with manage(**options) as manager:
        yield lambda requests, most_seconds: _seconds(manager, requests, most_seconds)


def _sizes(model: Any, workload: Workload) -> dict[str, Any]:
    """On a GPU it sizes itself by the free memory; on a CPU it would take most of it, and must be told."""
    if model.device.type == "cuda":
        return {"allow_block_sharing": False}
    num_tokens = [len(p) + n for p, n in zip(workload.prompts, workload.max_tokens, strict=True)]
    return {
        "allow_block_sharing": False,
        "page_size": 256,
        "num_blocks": sum(-(-tokens // 256) for tokens in num_tokens),
        "max_batch_tokens": 512,
    }


def _seconds(manager: Any, workload: Workload, most_seconds: float) -> float:
    """Raises BenchmarkError if it stops, takes longer, or answers with another length."""
    started_s = time.perf_counter()
    left: dict[str, int] = {}
    for prompt, num_tokens in zip(workload.prompts, workload.max_tokens, strict=True):
        left[manager.add_request(list(prompt), max_new_tokens=num_tokens)] = num_tokens
    while left:
        output = manager.get_result(timeout=_POLL_S)
        seconds = time.perf_counter() - started_s
        if output is not None and output.is_finished():
            _check(output.generated_tokens, left.pop(output.request_id))
        elif output is None and not manager.is_running():
            raise BenchmarkError(f"generate_batch stopped with {len(left)} requests open")
        elif seconds > most_seconds:
            raise BenchmarkError(f"generate_batch still had {len(left)} requests open after {seconds:.0f} s")
    return time.perf_counter() - started_s


def _check(tokens: Sequence[int], num_tokens: int) -> None:
    if len(tokens) != num_tokens:
        raise BenchmarkError(f"generate_batch answered with {len(tokens)} tokens, {num_tokens} were asked for")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
