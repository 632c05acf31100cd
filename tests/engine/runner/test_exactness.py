"""Over 10,000 tokens of a deeper model with a real vocabulary: how often is the best token another one than in
`transformers`?
"""

import random

import pytest

from engine.core.request import SamplingParams
from kernels.families import cpu_ops

NUM_REQUESTS, NUM_OUTPUT_TOKENS = 32, 320
# Logits of 8 times unit scale. Of 32,000 unit normal values the two largest are 0.22 apart on average, so that 4.5 in
# 10,000 positions would be near-ties by chance alone. Trained models are as decided as this at most positions.
LOGIT_SCALE = 8.0


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint, tmp_path_factory):
    import transformers

    path = make_checkpoint(
        "llama",
        vocab_size=32_000,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    model.lm_head.weight.data *= LOGIT_SCALE
    scaled = tmp_path_factory.mktemp("scaled")
    model.save_pretrained(scaled)
    return scaled


@pytest.mark.slow
def test_best_tokens_differ_at_near_ties_only_and_rarely(checkpoint, prompt, engine_on, reference_of):
    """Half the requests are greedy. The others wander about at a high temperature, as greedy answers of random models
    run in circles, and report the best token at each position.

    They are chunked and preempted, so that the same positions are computed in many different batches.
    """
    rng = random.Random(0)
    greedy = SamplingParams(seed=0, max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_end_token=True)
    prompts = []
    for index in range(NUM_REQUESTS):
        wandering = SamplingParams(
            seed=index, max_tokens=NUM_OUTPUT_TOKENS, temperature=LOGIT_SCALE, ignore_end_token=True, top_logprobs=1
        )
        prompt_ids = [rng.randrange(32_000) for _ in range(rng.randint(1, 150))]
        prompts.append(prompt(prompt_ids, wandering if index % 2 else greedy))
    run = engine_on(checkpoint, cpu_ops()).serve(
        prompts, block_size=16, num_blocks=550, max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=128
    )
    assert run.num_preemptions > 0
    reference = reference_of(checkpoint)
    checks = []
    for request, answer in zip(prompts, run.answers, strict=True):
        best_ids = [logprobs.top_ids[0] for logprobs in answer.logprobs] or None
        checks.append(reference.check_greedy(request.prompt_ids, answer.token_ids, best_ids))
    num_tokens = sum(check.num_tokens for check in checks)
    num_differences = sum(check.num_differences for check in checks)
    assert num_tokens >= 10_000
    assert num_differences < num_tokens / 5_000
    assert len({token_id for answer in run.answers for token_id in answer.token_ids}) > 2500
