"""Equal seeds give equal requests, within the ranges asked for."""

from collections import Counter

from chairlift.bench.workload import exponential_workload, mixed_workload, uniform_workload


def test_exponential_lengths_have_their_mean_and_stay_below_the_cap() -> None:
    workload = exponential_workload(4000, prompt_len=3, mean=64, cap=512, vocab_size=100)
    assert {len(prompt) for prompt in workload.prompts} == {3}
    assert min(workload.max_tokens) >= 1
    assert max(workload.max_tokens) <= 512
    assert abs(workload.num_output_tokens / 4000 - 64) < 3


def test_uniform_lengths_reach_both_ends() -> None:
    workload = uniform_workload(200, prompt_lens=(2, 5), output_lens=(7, 9), vocab_size=50)
    assert {len(prompt) for prompt in workload.prompts} == {2, 3, 4, 5}
    assert set(workload.max_tokens) == {7, 8, 9}


def test_the_mixed_workload_is_the_one_peers_were_measured_on() -> None:
    workload = mixed_workload(vocab_size=1000)
    assert Counter(workload.max_tokens) == {16: 32, 64: 22, 256: 10}
    assert min(map(len, workload.prompts)) >= 16
    assert max(map(len, workload.prompts)) <= 512


def test_the_seed_decides_and_no_prompt_has_the_end_token() -> None:
    for draw in (
        lambda seed: exponential_workload(20, prompt_len=4, mean=5, cap=9, vocab_size=11, seed=seed),
        lambda seed: uniform_workload(20, prompt_lens=(1, 9), output_lens=(1, 9), vocab_size=11, seed=seed),
        lambda seed: mixed_workload(20, vocab_size=11, seed=seed),
    ):
        assert draw(3) == draw(3)
        assert draw(3) != draw(4)
        assert {token_id for prompt in draw(3).prompts for token_id in prompt} == set(range(1, 11))
