"""Engines of the experiment: their sizes and flags, and processes that do not start."""

import json
from pathlib import Path

import pytest

from loadgen.errors import OptionError, TargetError
from loadgen.experiments.batching.model import Model, chosen_model
from loadgen.experiments.batching.policies import CACHED, CONTINUOUS, ENGINE_FLAGS, STATIC
from loadgen.experiments.batching.system import EngineSize
from loadgen.experiments.pair import Pair


@pytest.mark.parametrize(
    ("num_slots", "context", "step_tokens", "max_model_len"),
    [(64, 8192, 2048, 2050), (4, 8192, 128, 1056), (128, 8192, 2048, 2050), (64, 1024, 512, 1024)],
)
def test_a_step_takes_the_prompts_of_a_batch_and_a_barrier_fills_whole_steps(
    num_slots: int, context: int, step_tokens: int, max_model_len: int
) -> None:
    size = EngineSize.of(Model("", (), context), num_slots, 32, 1056)
    assert (size.step_tokens, size.max_model_len) == (step_tokens, max_model_len)
    assert size.barrier_tokens % step_tokens == 0
    assert max_model_len - step_tokens - 1 <= size.barrier_tokens < max_model_len


def test_systems_differ_in_policy_and_prefix_cache_only() -> None:
    policies = {name: dict(zip(flags[::2], flags[1::2], strict=False)) for name, flags in ENGINE_FLAGS.items()}
    assert {name: flags["--scheduling-policy"] for name, flags in policies.items()} == {
        STATIC: "static",
        CONTINUOUS: "fcfs",
        CACHED: "fcfs",
    }
    assert [flags[2:] for flags in ENGINE_FLAGS.values()] == [
        ("--no-enable-prefix-caching",),
        ("--no-enable-prefix-caching",),
        ("--enable-prefix-caching",),
    ]


def test_the_default_model_is_a_shape_of_fifteen_million_weights(tmp_path: Path) -> None:
    model = chosen_model(None, tmp_path)
    assert model.flags[2:4] == ("--load-format", "dummy")
    config = json.loads((tmp_path / "15M" / "config.json").read_text())
    attention = 4 * config["hidden_size"] ** 2
    feed_forward = 3 * config["hidden_size"] * config["intermediate_size"]
    weights = config["num_hidden_layers"] * (attention + feed_forward) + config["vocab_size"] * config["hidden_size"]
    assert weights == pytest.approx(15e6, rel=0.02)
    assert model.max_model_len == config["max_position_embeddings"]
    assert len(json.loads((tmp_path / "15M" / "tokenizer.json").read_text())["model"]["vocab"]) == config["vocab_size"]


def test_a_checkpoint_says_its_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    model = chosen_model(tmp_path, tmp_path)
    assert (model.flags, model.max_model_len) == (("--model", str(tmp_path)), 512)


@pytest.mark.parametrize("config", [None, "{", "{}", "[]"])
def test_a_folder_without_a_model_is_refused(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(OptionError, match=r"config\.json that says max_position_embeddings"):
        chosen_model(tmp_path, tmp_path)


def test_engine_that_does_not_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    with Pair(["--no-such-flag"], tmp_path / "pair") as pair, pytest.raises(TargetError) as raised:
        pair.wait_until_served()
    assert "engine ended with status 2 while starting:" in str(raised.value)
    assert "--no-such-flag" in str(raised.value)
