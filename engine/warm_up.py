"""Runs every kind of row once before anyone waits for it, so that kernels are compiled and buffers are there."""

from dataclasses import replace

from engine.core.config import SchedulerConfig
from engine.core.request import Request, RequestId, SamplingParams
from engine.core.scheduler import Scheduler
from engine.interfaces import ModelRunner

_NUM_OUTPUT_TOKENS = 2


def warm_up(runner: ModelRunner, config: SchedulerConfig, vocab_size: int) -> None:
    """Serves a greedy request and one with every sampling feature, on a scheduler of its own.

    The runner has forgotten both afterwards; what they left in the cache is in no prefix index.

    Raises: EngineError: a step failed.
    """
    num_prompt_tokens = max(1, min(config.block_size + 1, config.max_model_len - _NUM_OUTPUT_TOKENS))
    prompt_ids = tuple(index % vocab_size for index in range(num_prompt_tokens))
    greedy = SamplingParams(seed=0, max_tokens=_NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    everything = replace(
        greedy,
        temperature=0.8,
        top_p=0.9,
        top_k=min(8, vocab_size),
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias=((0, 1.0),),
        min_tokens=1,
        stop_token_ids=(0,),
        top_logprobs=1,
    )
    scheduler = Scheduler(replace(config, max_waiting=2))
    for index, params in enumerate((greedy, everything)):
        scheduler.add_request(Request(RequestId(-1 - index), prompt_ids, params, arrival_s=0.0))
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, runner.execute(plan), 0.0)
    farewell = scheduler.schedule(0.0)  # has no rows, but the ids that the runner must forget
    scheduler.update(farewell, runner.execute(farewell), 0.0)
