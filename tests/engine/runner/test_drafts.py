"""With drafts every answer has the same tokens as without, greedy and sampled, in fewer steps."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from engine.core.drafts import DraftLimits
from engine.core.request import SamplingParams
from engine.runner import draft_rows
from kernels.families import cpu_ops

LIMITS = DraftLimits(num_speculative_tokens=6, prompt_lookup_max=3, prompt_lookup_min=1)
MODELS = {
    "dense": ("llama", {}),
    "windows": ("gemma3", {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}),
    "experts": ("qwen3_moe", {}),
}
NUM_OUTPUT_TOKENS = 60


def params(index: int) -> SamplingParams:
    """Greedy for even indices; otherwise sampled at a temperature at which random models repeat themselves too."""
    common: dict[str, Any] = {"seed": index, "max_tokens": NUM_OUTPUT_TOKENS, "ignore_end_token": True}
    if index % 2 == 0:
        return SamplingParams(temperature=0.0, min_tokens=3 * index, stop_token_ids=(7, 8), **common)
    return SamplingParams(temperature=0.25, top_p=0.9, top_k=50 * (index % 3), logit_bias=((index, 1.5),), **common)


@pytest.fixture(scope="module")
def prompts(prompt: Callable[..., Any]) -> list[Any]:
    """Prompts that repeat themselves, of various lengths."""
    rng = random.Random(0)
    loops = [[rng.randrange(3, 100) for _ in range(rng.randint(1, 12))] for _ in range(10)]
    return [prompt((loop * 8)[: 11 + 7 * index], params(index)) for index, loop in enumerate(loops)]


def tokens(run: Any) -> list[Sequence[int]]:
    return [answer.token_ids for answer in run.answers]


@pytest.mark.parametrize("model", MODELS)
def test_drafts_change_no_token(
    make_checkpoint: Callable[..., Any], engine_on: Callable[..., Any], prompts: list[Any], model: str
) -> None:
    name, fields = MODELS[model]
    engine = engine_on(make_checkpoint(name, **fields), cpu_ops())
    plain = engine.serve(prompts, num_blocks=300)
    drafted = engine.serve(prompts, num_blocks=300, max_num_seqs=32, drafts=LIMITS)
    assert tokens(drafted) == tokens(plain)
    assert drafted.num_draft_tokens > drafted.num_accepted_tokens > 20
    assert [answer.completion.reason for answer in drafted.answers] == [a.completion.reason for a in plain.answers]
    for index in (0, 1, 5, 8):
        solo = engine.serve([prompts[index]], num_blocks=300, drafts=LIMITS)
        assert tokens(solo) == [plain.answers[index].token_ids]
        assert len(solo.plans) <= len(solo.answers[0].token_ids) + 3 - solo.num_accepted_tokens


def test_so_it_is_with_preemptions_and_neighbours_that_have_no_drafts(
    make_checkpoint: Callable[..., Any], engine_on: Callable[..., Any], prompts: list[Any], prompt: Callable[..., Any]
) -> None:
    """Penalties and log-probabilities rule drafts out."""
    rng = random.Random(1)
    others = [
        prompt([rng.randrange(3, 100) for _ in range(9)], SamplingParams(seed=index, max_tokens=40, **fields))
        for index, fields in enumerate(({"repetition_penalty": 1.2}, {"top_logprobs": 2}, {"presence_penalty": 0.5}))
    ]
    engine = engine_on(make_checkpoint("llama"), cpu_ops())
    plain = engine.serve([*others, *prompts], num_blocks=300)
    drafted = engine.serve([*others, *prompts], num_blocks=45, max_num_seqs=32, drafts=LIMITS)
    assert drafted.num_preemptions > 0
    assert drafted.num_accepted_tokens > 10
    assert tokens(drafted) == tokens(plain)
    assert drafted.answers[1].logprobs == plain.answers[1].logprobs


@pytest.mark.parametrize("num_more", [1, -1])
def test_a_wrong_verification_would_be_noticed(
    make_checkpoint: Callable[..., Any],
    engine_on: Callable[..., Any],
    prompts: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    num_more: int,
) -> None:
    """One token too many changes an answer; one too few is no error, as it is drawn again."""

    def wrong(draft_ids: Sequence[int], drawn_ids: Sequence[int]) -> tuple[int, ...]:
        num_tokens = int(np.cumprod(np.array(draft_ids) == np.array(drawn_ids[:-1])).sum()) + 1 + num_more
        return tuple(drawn_ids[: max(1, num_tokens)])

    engine = engine_on(make_checkpoint("llama"), cpu_ops())
    plain = engine.serve(prompts, num_blocks=300)
    monkeypatch.setattr(draft_rows, "confirmed", wrong)
    drafted = engine.serve(prompts, num_blocks=300, max_num_seqs=32, drafts=LIMITS)
    assert (tokens(drafted) == tokens(plain)) is (num_more < 0)
