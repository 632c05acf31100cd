"""The shipped checkpoint: small, loadable, its tokenizer loses nothing, and its measured figures meet their bounds."""

import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from engine.demo import MODEL_DIR
from tests.support.demo_model.checkpoint import CHAT_TEMPLATE
from tests.support.demo_model.corpus import END_ID
from tests.support.demo_model.documents import Document, Role, Turn
from tests.support.demo_model.evaluate import (
    MAX_SIZE_BYTES,
    TEMPERATURE,
    encode_prompt,
    sample_answers,
    size_bytes,
    text_digest,
)
from tests.support.demo_model.prompts import HeldOutPrompt, PromptKind, heldout_prompts

ODD_TEXTS = [
    "Once upon a time there was a fox.",
    "",
    " ",
    "  two  spaces \t tab\r\nand\n\nlines ",
    "ÅÄÖ åäö é e\u0301 ﬁ Straße İstanbul",
    "日本語のテキスト 中文 한국어 العربية עברית हिन्दी ไทย",
    "🦊🐻‍❄️ 👩‍👩‍👧‍👦 🇸🇪 \u200d\ufeff\u00a0\u2028",
    "\x00\x01\x7f\u0080\ud7ff\ue000\U0010ffff",
    "for (i = 0; i < 10; i++) { x[i] |= ~0x1F; }  // 3.14e-10",
    "mixed'case can't WON'T \"quotes\" «ok» — dash",
    "<|use", "<end>", "a" * 300,
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)


def test_all_files_together_are_within_16_mb() -> None:
    assert size_bytes(MODEL_DIR) <= MAX_SIZE_BYTES


def test_config_describes_a_plain_llama() -> None:
    config = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] >= 1024
    assert config["eos_token_id"] == END_ID
    assert config["bos_token_id"] is None
    assert config["tie_word_embeddings"] is True


def test_model_loads_with_every_weight_and_bfloat16_storage() -> None:
    stored, info = LlamaForCausalLM.from_pretrained(MODEL_DIR, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert stored.dtype is torch.bfloat16


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_tokenizer_round_trip_keeps_any_text(tokenizer: Any, text: str) -> None:
    fast = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    assert fast.decode(fast.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_adds_nothing_of_its_own(tokenizer: Any) -> None:
    fast = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    text = "Once upon a time"
    plain = fast.encode(text, add_special_tokens=False).ids
    assert fast.encode(text, add_special_tokens=True).ids == plain
    assert tokenizer.encode(text) == plain
    assert tokenizer.bos_token is None
    assert tokenizer.eos_token_id == END_ID


def test_chat_template_renders_what_the_model_was_trained_on(tokenizer: Any) -> None:
    turns = (
        Turn(Role.SYSTEM, "You tell stories."),
        Turn(Role.USER, "Tell me a story {{ 1 }}."),
        Turn(Role.ASSISTANT, "Once."),
        Turn(Role.USER, "Again."),
    )
    names = {Role.SYSTEM: "system", Role.USER: "user", Role.ASSISTANT: "assistant"}
    messages = [{"role": names[turn.role], "content": turn.text} for turn in turns]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == Document(turns=turns).render()
    prompted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompted == rendered + Role.ASSISTANT.value


def test_chat_template_renders_calls_and_results_of_tools(tokenizer: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rom"}}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tools=[call], tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|user|>Rain?<|end|>"
        '<|assistant|><tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call><|end|>'
        "<|user|><tool_response>\nsunny\n</tool_response><|end|><|assistant|>"
    )


def test_the_bundled_template_is_that_of_the_code(tokenizer: Any) -> None:
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_role_tokens_are_single_ids(tokenizer: Any) -> None:
    ids = encode_prompt(tokenizer, HeldOutPrompt(PromptKind.CHAT, "Hello!"))
    assert tokenizer.convert_ids_to_tokens(ids[0]) == Role.USER.value
    assert tokenizer.convert_ids_to_tokens(ids[-1]) == Role.ASSISTANT.value
    assert ids[-2] == END_ID


def test_measured_figures_meet_their_bounds() -> None:
    report = json.loads((MODEL_DIR / "evaluation.json").read_text(encoding="utf-8"))
    assert report["num_prompts"] >= 200
    assert report["temperature"] == TEMPERATURE
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert len(figures) == 7
    for figure in figures.values():
        on_the_right_side = (
            figure["value"] >= figure["bound"] if figure["at_least"] else figure["value"] <= figure["bound"]
        )
        assert on_the_right_side, figure


def test_generator_still_draws_the_text_of_the_shipped_model() -> None:
    report = json.loads((MODEL_DIR / "evaluation.json").read_text(encoding="utf-8"))
    seed = json.loads((MODEL_DIR / "training.json").read_text(encoding="utf-8"))["seed"]
    assert text_digest(seed) == report["text_sha256"], "the templates changed: train and evaluate again"


@pytest.mark.slow
def test_sampled_answers_end_themselves_and_differ(model: LlamaForCausalLM, tokenizer: Any) -> None:
    torch.manual_seed(0)
    answers = sample_answers(model, tokenizer, heldout_prompts(8, seed=3))
    assert sum(answer.ended for answer in answers) >= 7
    assert len({answer.text for answer in answers}) == 8
    assert all(answer.text.strip() for answer in answers)
