from dataclasses import replace
from typing import Any

import pytest

from engine.core.cache_groups import CacheGroups
from engine.core.config import SchedulerConfig, check_config
from engine.core.drafts import DraftLimits
from engine.errors import ConfigError

GOOD = SchedulerConfig(num_blocks=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64)
WINDOWED = CacheGroups(1, 1, 16)


def test_a_context_of_exactly_the_cache_is_accepted() -> None:
    check_config(GOOD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_model_len": 65}, "max_model_len is 65, must be from 2 to the 64 tokens that 4 blocks of 16 hold"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0, must be at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_steps_in_flight": 0}, "max_steps_in_flight is 0"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"num_stages": 2, "policy": "slo"}, "slo is not supported with 2 pipeline stages"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_preemptions": -1}, "max_preemptions -1"),
        ({"policy": "slo"}, "the policy slo needs a prior of step times, step_time is not set"),
        ({"best_effort_share": 1.0}, r"best_effort_share is 1\.0, must be at least 0 and below 1"),
        (
            {"drafts": DraftLimits(2, 3, 2)},
            "num_speculative_tokens is 2, must be at least 1 and below max_num_seqs, .* 2",
        ),
        ({"drafts": DraftLimits(0, 3, 2)}, "num_speculative_tokens is 0, must be at least 1"),
        ({"drafts": DraftLimits(1, 2, 3)}, "prompt_lookup_min is 3 and prompt_lookup_max 2, must be"),
        ({"drafts": DraftLimits(1, 2, 0)}, "prompt_lookup_min is 0"),
        ({"drafts": DraftLimits(1, 3, 2), "max_steps_in_flight": 2}, "drafts are not supported with 2 steps in flight"),
        ({"drafts": DraftLimits(1, 3, 2), "num_stages": 2}, "drafts are not supported with 2 pipeline stages"),
        ({"drafts": DraftLimits(1, 3, 2), "num_state_snapshots": 0}, "drafts are .* a model that keeps state"),
        (
            {"num_state_snapshots": 0, "cache_groups": WINDOWED, "num_blocks": 8},
            "caching is True and num_state_snapshots is 0, must",
        ),
        (
            {"num_state_snapshots": 3, "cache_groups": WINDOWED, "num_blocks": 8, "enable_prefix_caching": False},
            "caching is False and num_state_snapshots is 3, must",
        ),
        ({"max_step_s": 0.0}, r"max_step_s is 0\.0, must be above 0"),
        ({"tenant_weights": {"a": -1.0}}, r"the weight of tenant 'a' is -1\.0, must be above 0"),
    ],
)
def test_bad_values_are_named_with_their_numbers(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(replace(GOOD, **change))
