"""Writes the model in plain Hugging Face format, so that anything that loads a Llama loads it."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.demo_model.corpus import END_ID, PAD_ID
from tests.support.demo_model.documents import ASSISTANT, END, PAD, SYSTEM, USER

MAX_POSITIONS = 1024
VOCAB_SIZE = 3072

# As `Document.render` writes a chat. No beginning token: the first message's role token opens the text. Tool calls have
# the form of Hermes, which a server reads off the template. Definitions of tools are left out: the model is too small
# to read them, and they would fill its context; the call itself can be enforced.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'tool' -%}"
    "{{- '" + USER + "<tool_response>\\n' + message['content'] + '\\n</tool_response>' -}}"
    "{%- else -%}"
    "{{- '<|' + message['role'] + '|>' + (message['content'] or '') -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{- '<tool_call>\\n' + call['function'] | tojson + '\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- '" + END + "' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '" + ASSISTANT + "' -}}{%- endif -%}"
)


def model_config() -> LlamaConfig:
    """The shape of the demo model: 3.9 million parameters, grouped-query attention, tied embeddings."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    named = {"eos_token": END, "pad_token": PAD}
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named,
            "extra_special_tokens": [SYSTEM, USER, ASSISTANT],
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_POSITIONS,
            "padding_side": "left",
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(out / "special_tokens_map.json", {**named, "additional_special_tokens": [SYSTEM, USER, ASSISTANT]})


def save_model(model: LlamaForCausalLM, out: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors, the weights in bfloat16."""
    stored: Any = LlamaForCausalLM(model.config)
    stored.to(torch.bfloat16)
    stored.load_state_dict(model.state_dict())
    stored.generation_config.update(
        do_sample=True, temperature=0.8, top_p=0.9, max_new_tokens=512, eos_token_id=END_ID, pad_token_id=PAD_ID
    )
    stored.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # written readable by its owner alone


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
