"""Runs every kind of row once before the engine serves, so that kernels are compiled and buffers allocated."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from engine.core.config import SchedulerConfig
from engine.core.request import Adapter, Request, RequestId, SamplingParams
from engine.core.scheduler import Scheduler
from engine.errors import CheckpointError
from engine.interfaces import ModelRunner, execute
from engine.runner.step_buffers import BIAS_CAPACITY

_NUM_OUTPUT_TOKENS = 2
_FEW = (1, 2, 4, 8, 16, 32)
_GREEDY = SamplingParams(seed=0, max_tokens=_NUM_OUTPUT_TOKENS, temperature=0.0, ignore_end_token=True)
_EVERYTHING = replace(
    _GREEDY,
    temperature=0.8,
    top_p=0.9,
    top_k=8,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    min_tokens=1,
    stop_token_ids=(0,),
    top_logprobs=1,
)


def warm_up(runner: ModelRunner, config: SchedulerConfig, vocab_size: int) -> None:
    """Serves a greedy request and one with every sampling feature, on a temporary scheduler.

    Both are removed from the runner afterwards, and their blocks are in no prefix cache.

    Raises:
        CheckpointError: the model's logits are not finite.
        EngineError: a step failed.
    """
    num_prompt_tokens = max(1, min(config.block_size + 1, config.max_model_len - _NUM_OUTPUT_TOKENS))
    _serve(runner, config, [_prompt(num_prompt_tokens, vocab_size)] * 2, (_GREEDY, _EVERYTHING))


def run_largest_step(runner: ModelRunner, config: SchedulerConfig, vocab_size: int, has_adapters: bool) -> None:
    """Runs the step that needs most memory: `max_num_seqs` requests that fill the token budget and sample with every
    feature, and with the first adapter if there are any.

    If the budget is one token for each, a prompt that fills it alone follows: prompts have kernels of their own. The
    cache must hold these prompts and one token after each. If `max_model_len` keeps the requests from filling the
    budget, they have the maximum length.

    Raises: EngineError: the step failed.
    """
    budget, num_seqs = config.max_num_batched_tokens, config.max_num_seqs
    params = replace(_EVERYTHING, max_tokens=1)
    config, adapter = replace(config, enable_prefix_caching=False), Adapter(0, b"") if has_adapters else None

    def serve(num_requests: int) -> None:
        shares = ((budget + index) // num_requests for index in range(num_requests))  # the budget in all
        prompts = [_prompt(min(share, config.max_model_len - 1), vocab_size) for share in shares]
        _serve(runner, config, prompts, [params] * num_requests, adapter)

    serve(num_seqs)
    if budget == num_seqs:
        serve(1)


def sweep_sizes(runner: ModelRunner, config: SchedulerConfig, vocab_size: int) -> None:
    """Runs steps of all sizes between which matrix libraries choose other kernels.

    A GPU loads such a kernel at its first use, which would stall a request. The numbers of rows, and with them of
    logits, vary too. One step has more logit biases than a batch holds, so that their host memory is in the pool.

    Raises: EngineError: a step failed.
    """
    config = replace(config, enable_prefix_caching=False)
    most_rows = min(config.max_num_seqs, config.num_cache_blocks)  # a small cache has fewer blocks than slots
    most = min(config.max_model_len - 1, config.num_cache_tokens // most_rows - 1)
    rows = itertools.cycle((*_FEW, *range(64, most_rows, 64), most_rows))
    for num_tokens in (*_FEW, *range(64, config.max_num_batched_tokens, 64), config.max_num_batched_tokens):
        num_rows = min(max(next(rows), -(-num_tokens // max(1, most))), num_tokens, most_rows)
        if 1 <= num_tokens // num_rows <= most:
            params = replace(_GREEDY, max_tokens=1)
            _serve(runner, config, [_prompt(num_tokens // num_rows, vocab_size)] * num_rows, [params] * num_rows)
    biases = tuple((token_id, 1.0) for token_id in range(min(vocab_size, BIAS_CAPACITY + 1)))
    _serve(runner, config, [(0,)], [replace(_GREEDY, max_tokens=1, logit_bias=biases)])


def _prompt(num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(index % vocab_size for index in range(num_tokens))


def _serve(
    runner: ModelRunner,
    config: SchedulerConfig,
    prompts: Sequence[tuple[int, ...]],
    params: Sequence[SamplingParams],
    adapter: Adapter | None = None,
) -> None:
    scheduler = Scheduler(replace(config, policy="fcfs", max_waiting=len(params)))
    for index, (prompt_ids, one) in enumerate(zip(prompts, params, strict=True)):
        scheduler.add_request(Request(RequestId(-1 - index), prompt_ids, one, arrival_s=0.0, adapter=adapter))
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        result = execute(runner, plan)
        if result.failures:
            raise CheckpointError(
                f"the model fails on its first tokens, {next(iter(result.failures.values()))}: check its weights, and "
                "numbers of its config.json such as rms_norm_eps and rope_theta"
            )
        scheduler.update(plan, result, 0.0)
    last = scheduler.schedule(0.0)  # a plan without rows that removes the requests from the runner
    scheduler.update(last, execute(runner, last), 0.0)
