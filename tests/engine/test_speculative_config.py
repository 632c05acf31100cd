"""--speculative-config: what it says, and what is refused in one line."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.config import EngineConfig, parse_config
from engine.core.draft_scheduler import DraftScheduler
from engine.core.drafts import DraftLimits
from engine.core.request import Request, RequestId, SamplingParams
from engine.errors import ConfigError
from engine.speculative_config import parse_speculative_config
from engine.startup.build import build_engine
from engine.startup.progress import StartupProgress
from tests.support.engine.small_engine import build, run_to_the_end

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}


def changed(**fields: object) -> str:
    return json.dumps({**NGRAM, **fields})


@pytest.mark.parametrize(
    ("fields", "limits"),
    [
        ({}, DraftLimits(5, 4, 2)),
        ({"prompt_lookup_max": 6, "prompt_lookup_min": 3}, DraftLimits(5, 6, 3)),
        ({"prompt_lookup_max": 3}, DraftLimits(5, 3, 3)),
        ({"prompt_lookup_min": 3}, DraftLimits(5, 3, 3)),
    ],
)
def test_fields_are_those_of_vllm(fields: dict[str, int], limits: DraftLimits) -> None:
    config = parse_config(["--speculative-config", json.dumps({**NGRAM, **fields})], {})
    assert config.drafts == limits
    assert parse_config([], {"CHAIRLIFT_SPECULATIVE_CONFIG": json.dumps({**NGRAM, **fields})}).drafts == limits
    assert parse_config([], {}).drafts is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram", "--speculative-config is no JSON"),
        ("[8]", "--speculative-config must be a JSON object with the field method, it is [8]"),
        ('{"method": "eagle", "num_speculative_tokens": 3}', 'method is "eagle", only "ngram" is supported'),
        ('{"num_speculative_tokens": 3}', 'method is null, only "ngram" is supported'),
        ('{"method": "ngram"}', "lacks num_speculative_tokens"),
        (changed(model="x"), "unknown field model; known are method, num_speculative_tokens"),
        (changed(num_speculative_tokens=0), "num_speculative_tokens is 0, must be a whole number between 1 and 64"),
        (changed(num_speculative_tokens=65), "num_speculative_tokens is 65, must be a whole number between 1 and 64"),
        (changed(num_speculative_tokens=True), "num_speculative_tokens is true, must be a whole number"),
        (changed(prompt_lookup_min=2.0), "prompt_lookup_min is 2.0, must be a whole number between 1 and 32"),
        (changed(prompt_lookup_max="4"), 'prompt_lookup_max is "4", must be a whole number between 1 and 32'),
        (changed(prompt_lookup_max=2, prompt_lookup_min=3), "prompt_lookup_min is 3, must be at most"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_speculative_config(text)
    with pytest.raises(SystemExit):
        parse_config(["--speculative-config", text], {})
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_model_that_cannot_go_back_is_refused(servable: Callable[..., Path]) -> None:
    config = EngineConfig(model=str(servable("qwen3_5")), speculative_config=changed())
    with pytest.raises(ConfigError, match=r"--speculative-config is not supported with .*: the state that it keeps"):
        build_engine(config, StartupProgress())


def repeating(max_tokens: int = 24) -> list[Request]:
    """Requests whose answers have two different tokens, so that they repeat themselves; greedy and sampled."""
    return [
        Request(
            RequestId(number),
            tuple([5, 9, 7, 30 + number] * 3),
            SamplingParams(
                seed=number,
                max_tokens=max_tokens,
                temperature=0.3 * number,
                ignore_end_token=True,
                logit_bias=((5, 100.0), (9, 100.0)),
            ),
            arrival_s=0.0,
        )
        for number in range(3)
    ]


def served(model_dir: Path, **fields: object) -> tuple[dict[int, list[int]], int]:
    """Returns tokens by request, and how many were accepted drafts."""
    parts = build(model_dir, max_num_seqs=12, max_num_batched_tokens=24, **fields)
    for request in repeating():
        parts.scheduler.add_request(request)
    assert isinstance(parts.scheduler, DraftScheduler) == ("speculative_config" in fields)
    assert parts.scheduler.max_steps_in_flight == 1 or "speculative_config" not in fields
    return run_to_the_end(parts), parts.scheduler.stats().num_accepted_tokens_total


@pytest.mark.parametrize("fields", [{}, {"quantization": "int8", "kv_cache_dtype": "int8"}, {"kernels": "torch"}])
def test_an_engine_with_drafts_gives_the_same_answers(model_dir: Path, fields: dict[str, str]) -> None:
    plain, _ = served(model_dir, device="cpu", **fields)
    drafted, num_accepted = served(model_dir, device="cpu", speculative_config=changed(), **fields)
    assert num_accepted > 8
    assert drafted == plain


@pytest.mark.slow
def test_so_does_one_on_a_simulated_gpu_with_one_step_in_flight(
    gpu: SimpleNamespace, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plain, _ = served(model_dir, device="cuda")
    drafted, num_accepted = served(model_dir, device="cuda", speculative_config=changed())
    assert num_accepted > 8
    assert drafted == plain
    assert "One step is in flight instead of two, because of --speculative-config" in caplog.text
