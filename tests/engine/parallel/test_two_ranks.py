"""Two processes on one CPU, over gloo, yield the tokens of one: greedy and sampled, whatever shares a step."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.constraints.constraint import Constraint
from engine.core.outputs import SchedulerOutput
from engine.core.request import Request, RequestId, SamplingParams
from engine.errors import ConfigError
from engine.parallel.leading_runner import LeadingRunner
from engine.serving.parts import EngineParts
from engine.startup.build import build_engine
from engine.startup.progress import StartupProgress
from tests.support.engine.answer_ledger import Answer, AnswerLedger

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied head, one KV head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3, head norms, biases, shards": ("qwen3", {"attention_bias": True, "max_shard_size": "40KB"}),
    "qwen2, biases": ("qwen2", {}),
    "olmo2, norms over the heads of both": ("olmo2", {}),
}
LENGTHS = (1, 5, 33, 70)
EVERYTHING = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 50,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": ((7, 2.0),),
    "top_logprobs": 3,
    "prompt_logprobs": 2,
}
NEVER = {(before, after) for before in range(211) for after in range(before % 2, 200, 2)}


@dataclass(frozen=True)
class Pair:
    """The same model on one rank and on two."""

    one: EngineParts
    two: EngineParts


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, servable: Callable[..., Path]) -> Iterator[Pair]:
    architecture, overrides = MODELS[request.param]
    path = servable(architecture, **overrides)
    with_two = build(path, tensor_parallel_size=2)
    yield Pair(build(path), with_two)
    close(with_two)


def build(path: Path, **fields: Any) -> EngineParts:
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "kv_cache_memory_bytes": 2**18, "threads": 1}
    return build_engine(
        EngineConfig(model=str(path), **limits, **fields), StartupProgress(), lambda error: pytest.fail(str(error))
    )


def close(parts: EngineParts) -> None:
    assert isinstance(parts.runner, LeadingRunner)
    assert parts.progress is None  # it stands still while this rank waits for another
    parts.runner.close()


def requests(salt: int, **params: Any) -> list[Request]:
    """One of each length, prompts of their own."""
    return [
        Request(
            RequestId(1000 * salt + index),
            tuple((salt * 31 + index * 17 + position * 7) % 211 for position in range(length)),
            SamplingParams(seed=index, max_tokens=6, ignore_end_token=True, **params),
            arrival_s=0.0,
        )
        for index, length in enumerate(LENGTHS)
    ]


def constrained(batch: list[Request]) -> list[Request]:
    """Every second one, by what it has drawn: only the rank that samples has a mask."""
    for request in batch[::2]:
        request.constraint = Constraint(211, bad_sequences=NEVER)
    return batch


def serve(parts: EngineParts, batch: list[Request], num_ahead: int = 0) -> list[Answer]:
    """Submits all at once: prompts are cut to pieces, and the pieces share steps with decodes; `num_ahead` steps are
    launched before the one whose tokens are waited for has ended.
    """
    ledger = AnswerLedger()
    for request in batch:
        parts.scheduler.add_request(request)
        ledger.expect(request)
    in_flight: deque[SchedulerOutput] = deque()
    while parts.scheduler.has_work() or in_flight:
        if parts.scheduler.has_work():
            in_flight.append(parts.scheduler.schedule(0.0))
            parts.runner.launch(in_flight[-1])
        if len(in_flight) > num_ahead or not parts.scheduler.has_work():
            plan = in_flight.popleft()
            ledger.record(parts.scheduler.update(plan, parts.runner.collect(), 0.0))
            parts.scheduler.check_integrity()
    return [ledger.answers[request.request_id] for request in batch]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_async", [False, True], ids=["one step in flight", "two steps in flight"])
def test_dummy_weights_are_one_model_on_any_number_of_ranks(
    make_checkpoint: Callable[..., Path], is_async: bool
) -> None:
    """Before the others: a process is in one group at a time, and `pair` keeps its own to the end."""
    path = make_checkpoint("llama")
    two = build(path, tensor_parallel_size=2, load_format="dummy", seed=3, async_scheduling=is_async)
    answers = serve(two, constrained(requests(4)), num_ahead=int(is_async))
    close(two)
    one = serve(build(path, load_format="dummy", seed=3), constrained(requests(4)))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in one]
    for answer in answers[::2]:
        drawn = answer.token_ids
        assert not any((before, after) in NEVER for before, after in itertools.pairwise(drawn))


def test_drafts_reach_every_rank(make_checkpoint: Callable[..., Path]) -> None:
    """Two tokens to choose from, so that answers repeat themselves."""
    path, choice = make_checkpoint("llama"), {"logit_bias": ((5, 100.0), (9, 100.0)), "temperature": 0.5}
    drafts = {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'}
    two = build(path, tensor_parallel_size=2, load_format="dummy", seed=3, **drafts)
    answers = serve(two, requests(5, **choice))
    stats = two.scheduler.stats()
    close(two)
    one = serve(build(path, load_format="dummy", seed=3), requests(5, **choice))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in one]
    assert stats.num_accepted_tokens_total > 3


@pytest.mark.sampled(2)
def test_greedy_tokens_are_those_of_one_rank(pair: Pair) -> None:
    one, two = (serve(parts, requests(1, temperature=0.0)) for parts in (pair.one, pair.two))
    assert [answer.token_ids for answer in two] == [answer.token_ids for answer in one]
    assert {len(answer.token_ids) for answer in two} == {6}


@pytest.mark.sampled(2)
def test_a_step_of_a_prompt_that_samples_nothing_has_no_logits_to_gather(pair: Pair) -> None:
    """A prompt alone, longer than the tokens of two steps."""
    prompt = tuple(range(3, 103))

    def answer(parts: EngineParts) -> list[int]:
        params = SamplingParams(seed=0, max_tokens=4, temperature=0.0, ignore_end_token=True)
        return serve(parts, [Request(RequestId(9000), prompt, params, arrival_s=0.0)])[0].token_ids

    one, two = answer(pair.one), answer(pair.two)
    assert two == one
    assert len(one) == 4


@pytest.mark.sampled(2)
def test_sampled_tokens_and_logprobs_are_those_of_one_rank(pair: Pair) -> None:
    one, two = (serve(parts, requests(2, **EVERYTHING)) for parts in (pair.one, pair.two))
    for a, b in zip(one, two, strict=True):
        assert b.token_ids == a.token_ids
        assert [each.top_ids for each in b.logprobs] == [each.top_ids for each in a.logprobs]
        assert [each.chosen for each in b.logprobs] == pytest.approx([each.chosen for each in a.logprobs], abs=1e-4)
    for length, a, b in zip(LENGTHS, one, two, strict=True):
        scores = [[each.chosen for each in answer.prompt_logprobs] for answer in (a, b)]
        assert len(scores[1]) == length - 1
        assert scores[1] == pytest.approx(scores[0], abs=1e-4)


@pytest.mark.sampled(2)
def test_blocks_of_the_prefix_cache_hold_the_keys_of_every_rank(pair: Pair) -> None:
    first, again = (serve(pair.two, requests(3, temperature=0.0)) for _ in range(2))
    hits = pair.two.scheduler.stats().prefix_cache_hits_total
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in first]
    assert hits >= 32 + 64


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tensor_parallel_size": 3}, "num_attention_heads 4 is not a multiple of tensor_parallel_size 3"),
        ({"quantization": "int8"}, "--quantization int8 is not supported with --tensor-parallel-size 2 on a CPU"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8 is not supported with --tensor-parallel-size 2"),
        ({"batch_invariant": True}, "--batch-invariant is not supported with --tensor-parallel-size 2 on a CPU"),
    ],
)
def test_unsupported_settings_are_reported_before_any_rank_is_started(
    make_checkpoint: Callable[..., Path], fields: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.startup.rank_group.Followers", None)
    with pytest.raises(ConfigError, match=words):
        build(make_checkpoint("llama"), **{"tensor_parallel_size": 2, "load_format": "dummy", **fields})
