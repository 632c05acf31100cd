"""Held-out prompts: many, different, of both kinds, and cheap to import."""

import subprocess
import sys

from tests.support.demo_model.prompts import PromptKind, heldout_prompts


def test_prompts_are_distinct_and_repeatable() -> None:
    prompts = heldout_prompts(200)
    assert len(set(prompts)) == 200
    assert prompts == heldout_prompts(200)
    assert prompts[:50] == heldout_prompts(50)
    assert prompts != heldout_prompts(200, seed=2)


def test_prompts_are_of_both_kinds_and_never_empty() -> None:
    prompts = heldout_prompts(200)
    num_text = sum(prompt.kind is PromptKind.TEXT for prompt in prompts)
    assert 40 <= num_text <= 90
    assert all(prompt.text.strip() and "<|" not in prompt.text for prompt in prompts)


def test_prompts_need_no_torch() -> None:
    code = "import sys, engine.demo, tests.support.demo_model.prompts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
