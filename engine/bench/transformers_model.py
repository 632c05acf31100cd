"""`transformers` as a contestant: its own ways to answer the requests of a workload greedily, fp32."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.workload import Workload
from engine.bench.hugging_face import import_transformers
from loadgen.experiments.peers.padding_waste import PaddedBatch

Answers = tuple[tuple[int, ...], ...]

_PAGE_TOKENS = 256  # its default
_STEP_TOKENS = 512  # our default: a step of its own default size would take seconds here


@torch.inference_mode()
def generate(model: Any, workload: Workload, batch_size: int) -> Answers:
    """`generate` on static batches, in the order given: each runs until its longest answer is done.

    Args:
        model: see `agreement.load_reference`.
        workload: its prompts have one length, so that nothing is padded.
        batch_size: requests per batch.
    Returns: each request's answer, cut to the length it asked for.
    """
    answers: list[tuple[int, ...]] = []
    for start in range(0, len(workload.prompts), batch_size):
        prompts = torch.tensor(workload.prompts[start : start + batch_size])  # [batch, prompt_len]
        max_tokens = workload.max_tokens[start : start + batch_size]
        ids = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max(max_tokens),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        rows = ids[:, prompts.shape[1] :].tolist()
        answers += [tuple(row[:length]) for row, length in zip(rows, max_tokens, strict=True)]
    return tuple(answers)


@torch.inference_mode()
def generate_padded(model: Any, workload: Workload, batch_size: int) -> tuple[Answers, list[PaddedBatch]]:
    """`generate` on static batches of prompts of any length, padded on the left to the longest.

    Args:
        model: see `agreement.load_reference`.
        workload: in the order in which batches are filled.
        batch_size: requests per batch.
    Returns: each request's answer, cut to the length it asked for, and the batches.
    """
    answers: list[tuple[int, ...]] = []
    batches: list[PaddedBatch] = []
    for start in range(0, len(workload.prompts), batch_size):
        prompts = workload.prompts[start : start + batch_size]
        max_tokens = workload.max_tokens[start : start + batch_size]
        longest = max(map(len, prompts))
        ids = model.generate(
            torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]),
            attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
            max_new_tokens=max(max_tokens),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        rows = ids[:, longest:].tolist()
        answers += [tuple(row[:length]) for row, length in zip(rows, max_tokens, strict=True)]
        batches.append(PaddedBatch(tuple(map(len, prompts)), max_tokens, longest, len(rows[0])))
    return tuple(answers), batches


@contextlib.contextmanager
def batch_generator(model: Any, workload: Workload) -> Iterator[Callable[[Workload], Answers]]:
    """What `generate_batch` does, paged and continuous, on a manager that stays; requests keep their own lengths.

    Args:
        model: see `agreement.load_reference`.
        workload: the cache has room for all of it at once; without a size it would take most of the memory.
    """
    transformers = import_transformers()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # asks for psutil to find a size
    num_pages = sum(
        -(-(len(prompt) + num_tokens) // _PAGE_TOKENS)
        for prompt, num_tokens in zip(workload.prompts, workload.max_tokens, strict=True)
    )
    with model.continuous_batching_context_manager(
        generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS, num_blocks=num_pages, max_batch_tokens=_STEP_TOKENS, allow_block_sharing=False
        ),
        warmup=False,
    ) as manager:
        yield lambda requests: _answers(manager, requests)


def _answers(manager: Any, workload: Workload) -> Answers:
    request_ids = [
        manager.add_request(list(prompt), max_new_tokens=num_tokens)
        for prompt, num_tokens in zip(workload.prompts, workload.max_tokens, strict=True)
    ]
    outputs: dict[str, Any] = {}
    while len(outputs) < len(request_ids):
        output = manager.get_result(timeout=1)
        if output is not None and output.is_finished():
            outputs[output.request_id] = output
        elif output is None and not manager.is_running():
            raise BenchmarkError(f"generate_batch stopped after {len(outputs)} of {len(request_ids)} requests")
    return tuple(tuple(outputs[request_id].generated_tokens) for request_id in request_ids)
