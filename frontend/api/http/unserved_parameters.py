"""Parameters of OpenAI, vLLM and llama.cpp that this server does not support.

Those that do not affect the answer are ignored, those that would are refused.
"""

from collections.abc import Mapping
from typing import Any

WITHOUT_EFFECT = frozenset(
    {
        # OpenAI's: billing, storage, tracing, and hints that change no answer.
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "user", "verbosity"),
        # Anthropic's, about the same.
        *("betas", "cache_control", "context_management", "diagnostics", "inference_geo", "speed", "user_profile_id"),
        "workspace_id",
        # vLLM's: how a stream is cut, to which session it belongs, and details of making text, which there always is.
        *("detokenize", "session_id", "spaces_between_special_tokens", "stream_interval"),
        # llama.cpp's: which slot a request uses, what becomes of a context that is full (here the answer
        # ends), and details of samplers that are off unless a parameter of UNSERVED turns them on.
        *("id_slot", "slot_id", "n_keep", "n_discard", "mirostat_tau", "mirostat_eta"),
        *("dynatemp_exponent", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        "xtc_threshold",
    }
)
"""Parameters that are accepted and have no effect."""

UNSERVED: Mapping[str, tuple[Any, ...]] = {
    # OpenAI's.
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "modalities": (["text"],),
    "suffix": (),
    "web_search_options": (),
    # vLLM's.
    "chat_template": (),
    "length_penalty": (1,),
    "logits_processors": (),
    "logprob_token_ids": (),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "use_beam_search": (0,),
    "watermarking": (),
    # llama.cpp's.
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar_lazy": (),
    "image_data": (),
    "lora": (),
    "mirostat": (0,),
    "post_sampling_probs": (),
    "repeat_last_n": (-1,),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "typ_p": (1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
"""Parameters that would change the answer, with the neutral values that are accepted beside those of `is_off`."""


def is_off(value: Any) -> bool:
    """Whether a value is null, false, "", [] or {}. A 0 may have a meaning."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def is_neutral(name: str, value: Any) -> bool:
    """Whether a parameter of `UNSERVED` has a neutral value."""
    return is_off(value) or value in UNSERVED[name]
