"""A model in pipeline stages, each a process, yields the bits of one process, whatever is in flight."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.core.request import Request, RequestId, SamplingParams
from engine.errors import ConfigError
from engine.serving.parts import EngineParts
from tests.engine.parallel.test_two_ranks import EVERYTHING, build, close, constrained, requests, serve

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied head, three layers": ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 3}),
    "gemma2, norms behind layers, soft caps": ("gemma2", {}),
    "olmo2, no norms before layers": ("olmo2", {"num_hidden_layers": 3}),
    "qwen3 with experts, in bf16": ("qwen3_moe", {"dtype": "bfloat16"}),
    "qwen3-next, a shared expert and layers with state": (
        "qwen3_next",
        {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "granite, scaled residuals": ("granite", {}),
    "qwen3.5, layers with state": (
        "qwen3_5",
        {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
}


def served(parts: EngineParts, batch: list[Request], num_ahead: int = 0) -> list[Any]:
    """All that is reported of each request, to the last bit."""
    return [
        (answer.token_ids, answer.logprobs, answer.prompt_logprobs, answer.completion and answer.completion.reason)
        for answer in serve(parts, batch, num_ahead)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_one_process(name: str, servable: Callable[..., Path]) -> None:
    architecture, overrides = MODELS[name]
    path = servable(architecture, **overrides)
    batches = [lambda: requests(1, temperature=0.0), lambda: constrained(requests(2, **EVERYTHING))]
    two = build(path, pipeline_parallel_size=2)
    try:
        divided = [served(two, batch(), num_ahead=1) for batch in batches]
    finally:
        close(two)
    one = build(path)
    assert divided == [served(one, batch()) for batch in batches]


def test_so_they_are_in_int8(make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint("llama", num_hidden_layers=4)
    fields = {"quantization": "int8", "kv_cache_dtype": "int8", "load_format": "dummy"}
    three = build(path, pipeline_parallel_size=3, **fields)
    try:
        divided = served(three, requests(5, **EVERYTHING), num_ahead=2)
    finally:
        close(three)
    assert divided == served(build(path, **fields), requests(5, **EVERYTHING))


def test_preempted_requests_leave_the_others_their_bits(make_checkpoint: Callable[..., Path]) -> None:
    """Rows of the runner change hands while the steps of their last owners are in another stage."""
    path = make_checkpoint("llama")
    fields = {"load_format": "dummy", "num_gpu_blocks_override": 9, "max_model_len": 128}

    def batch() -> list[Request]:
        return [
            Request(
                RequestId(index),
                tuple((index * 17 + position) % 211 for position in range(5 + 3 * index)),
                SamplingParams(
                    seed=index, max_tokens=30, ignore_end_token=True, temperature=0.8, repetition_penalty=1.3
                ),
                arrival_s=0.0,
            )
            for index in range(8)
        ]

    two = build(path, pipeline_parallel_size=2, **fields)
    try:
        divided = served(two, batch(), num_ahead=1)
        assert two.scheduler.stats().num_preemptions_total > 0
    finally:
        close(two)
    one = build(path, **fields)
    assert divided == [served(one, [request])[0] for request in batch()]


def test_prefixes_go_on_from_the_states_of_every_stage(servable: Callable[..., Path]) -> None:
    architecture, overrides = MODELS["qwen3.5, layers with state"]
    path = servable(architecture, **overrides)
    system = [position * 7 % 200 for position in range(150)]

    def turns() -> list[Request]:
        params = SamplingParams(seed=1, max_tokens=20, ignore_end_token=True, temperature=0.8, top_logprobs=1)
        prompts = [[*system, *[index] * 7] for index in range(4)]
        return [Request(RequestId(index), tuple(prompt), params, 0.0) for index, prompt in enumerate(prompts)]

    two = build(path, pipeline_parallel_size=2)
    try:
        divided = [served(two, [turn], num_ahead=1) for turn in turns()]
        assert two.scheduler.stats().prefix_cache_hits_total == 3 * 144
    finally:
        close(two)
    one = build(path, enable_prefix_caching=False)
    assert divided == [served(one, [turn]) for turn in turns()]


def test_stages_within_which_layers_are_divided(make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint("llama")
    four = build(path, pipeline_parallel_size=2, tensor_parallel_size=2, load_format="dummy")
    try:
        answers = serve(four, constrained(requests(3)), num_ahead=1)
    finally:
        close(four)
    one = serve(build(path, load_format="dummy"), constrained(requests(3)))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in one]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pipeline_parallel_size": 3}, "--pipeline-parallel-size 3 is more than the 2 layers of the model"),
        ({"scheduling_policy": "slo"}, "--scheduling-policy slo is not supported with --pipeline-parallel-size 2"),
        ({"enable_lora": True}, "--enable-lora is not supported with --pipeline-parallel-size 2"),
        ({"nnodes": 2}, "--nnodes 2 needs --master-addr"),
        ({"nnodes": 3, "master_addr": "a:1"}, "--pipeline-parallel-size 2 is not a multiple of --nnodes 3"),
        ({"node_rank": 1}, "--node-rank 1 is not below --nnodes 1"),
        ({"master_addr": "a:1"}, "--master-addr a:1 needs --nnodes"),
    ],
)
def test_what_contradicts_stages_is_refused_before_any_is_started(
    make_checkpoint: Callable[..., Path], fields: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.startup.rank_group.Followers", None)
    with pytest.raises(ConfigError, match=words):
        build(make_checkpoint("llama"), **{"pipeline_parallel_size": 2, "load_format": "dummy", **fields})
