"""Runs every kind of row once before anyone waits for it, so that kernels are compiled and buffers are there."""

from collections.abc import Sequence
from dataclasses import replace

from engine.core.config import SchedulerConfig
from engine.core.request import Request, RequestId, SamplingParams
from engine.core.scheduler import Scheduler
from engine.errors import CheckpointError
from engine.interfaces import ModelRunner, execute

_NUM_OUTPUT_TOKENS = 2
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
    """Serves a greedy request and one with every sampling feature, on a scheduler of its own.

    The runner has forgotten both afterwards; what they left in the cache is in no prefix index.

    Raises:
        CheckpointError: the model's logits are not finite.
        EngineError: a step failed.
    """
    num_prompt_tokens = max(1, min(config.block_size + 1, config.max_model_len - _NUM_OUTPUT_TOKENS))
    _serve(runner, config, _prompt(num_prompt_tokens, vocab_size), (_GREEDY, _EVERYTHING))


def run_largest_step(runner: ModelRunner, config: SchedulerConfig, vocab_size: int) -> None:
    """Runs the step that takes most memory: all its tokens, in as many requests as there are seats, all of which sample
    with every feature.

    The cache needs room for these prompts and a token after each. Where requests may not be so long that all seats
    together fill a step, they are as long as they may be.

    Raises: EngineError: the step failed.
    """
    num_prompt_tokens = min(config.max_num_batched_tokens // config.max_num_seqs, config.max_model_len - 1)
    prompt_ids = _prompt(num_prompt_tokens, vocab_size)
    params = replace(_EVERYTHING, max_tokens=1)
    _serve(runner, replace(config, enable_prefix_caching=False), prompt_ids, [params] * config.max_num_seqs)


def _prompt(num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(index % vocab_size for index in range(num_tokens))


def _serve(
    runner: ModelRunner, config: SchedulerConfig, prompt_ids: tuple[int, ...], params: Sequence[SamplingParams]
) -> None:
    scheduler = Scheduler(replace(config, max_waiting=len(params)))
    for index, one in enumerate(params):
        scheduler.add_request(Request(RequestId(-1 - index), prompt_ids, one, arrival_s=0.0))
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        result = execute(runner, plan)
        if result.failures:
            raise CheckpointError(
                f"the model fails on its first tokens, {next(iter(result.failures.values()))}: its weights, or numbers "
                "of its config.json such as rms_norm_eps and rope_theta, are of no use"
            )
        scheduler.update(plan, result, 0.0)
    farewell = scheduler.schedule(0.0)  # has no rows, but the ids that the runner must forget
    scheduler.update(farewell, execute(runner, farewell), 0.0)
