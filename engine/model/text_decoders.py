"""Tables of checkpoints for text and images or sound: which decoder computes their text part.

A class of `transformers` either builds any decoder that `text_config` names, or has one of its own that is the decoder
of another model but for the positions of images. Each entry has been compared with its class: for text alone, hidden
states are those of the decoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text part of an architecture, computed by the decoder of a family.

    Attributes:
        architecture: the architecture of its decoder.
        model_type: what `text_config` has as `model_type`.
        defaults: values of absent fields, where they are not those of its decoder; None counts as absent.
        fixed: values that its class has instead of those of fields.
        may_be_flat: whether older files have no `text_config`, and its fields beside those of the images.
        end_token_id: the end token of its class, where that is not the one of its decoder.
        ties_by_either: whether embeddings are tied if the file or its `text_config` says so; otherwise the file decides
            where it has the field.
        ties_by_class: whether embeddings are tied where the file does not say.
        has_prefix: whether files have all tensors of the decoder under a prefix that no other tensor has.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    may_be_flat: bool = False
    end_token_id: int | None = None
    ties_by_either: bool = False
    ties_by_class: bool = False
    has_prefix: bool = False


def _sizes(
    vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, positions: int
) -> dict[str, int]:
    """Returns the defaults of a configuration class, which files of older versions omit from `text_config`."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
    }


def _qwen2_vl(model_type: str) -> TextPart:
    return TextPart(
        "Qwen2ForCausalLM",
        model_type,
        {
            **_sizes(152064, 8192, 29568, 80, 64, 8, 32768),
            "rms_norm_eps": 1e-5,
            "max_window_layers": 80,
            "rope_theta": 1e6,
        },
        may_be_flat=True,
        end_token_id=151645,
        ties_by_either=True,
    )


_GLM4V = TextPart(
    "Glm4ForCausalLM",
    "glm4v_text",
    {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "head_dim": None},
    fixed={"attention_bias": True},
)
_QWEN3_VL = TextPart("Qwen3ForCausalLM", "qwen3_vl_text", {"max_position_embeddings": 128_000, "rope_theta": 5e5})

TEXT_PARTS = {
    "Cosmos3OmniForConditionalGeneration": _QWEN3_VL,
    "Emu3ForConditionalGeneration": TextPart(
        "LlamaForCausalLM",
        "emu3_text_model",
        {
            **_sizes(184622, 4096, 14336, 32, 32, 8, 9216),
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "eos_token_id": 151850,
        },
        has_prefix=True,
    ),
    "Gemma3ForConditionalGeneration": TextPart("Gemma3ForCausalLM", "gemma3_text"),
    "Glm46VForConditionalGeneration": _GLM4V,
    "Glm4vForConditionalGeneration": _GLM4V,
    "Granite4VisionForConditionalGeneration": TextPart("GraniteForCausalLM", "granite4_vision_text", has_prefix=True),
    "GraniteDoclingForConditionalGeneration": TextPart(
        "GraniteForCausalLM",
        "granite_docling_text",
        {
            **_sizes(133800, 1024, 2048, 28, 16, 4, 32768),
            "rms_norm_eps": 1e-5,
            "embedding_multiplier": 12.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.263,
            "attention_multiplier": 0.015625,
            "eos_token_id": 100257,
        },
        has_prefix=True,
    ),
    "Mistral3ForConditionalGeneration": TextPart("MistralForCausalLM", "mistral", ties_by_class=True),
    "PaddleOCRVLForConditionalGeneration": TextPart(
        "LlamaForCausalLM",
        "paddleocr_vl_text",
        {
            **_sizes(103424, 1024, 3072, 18, 16, 2, 131072),
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "eos_token_id": 2,
        },
    ),
    "Phi4MultimodalForCausalLM": TextPart(
        "Phi3ForCausalLM",
        "phi4_multimodal",
        {
            **_sizes(200064, 3072, 8192, 32, 32, 8, 131072),
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": [199999, 200020],
        },
        may_be_flat=True,
    ),
    "Qwen2VLForConditionalGeneration": _qwen2_vl("qwen2_vl_text"),
    "Qwen2_5OmniThinkerForConditionalGeneration": TextPart(
        "Qwen2ForCausalLM",
        "qwen2_5_omni_text",
        {**_sizes(152064, 3584, 18944, 28, 28, 4, 32768), "max_window_layers": 28, "rope_theta": 1e6},
    ),
    "Qwen2_5_VLForConditionalGeneration": _qwen2_vl("qwen2_5_vl_text"),
    "Qwen3OmniMoeThinkerForConditionalGeneration": TextPart(
        "Qwen3MoeForCausalLM",
        "qwen3_omni_moe_text",
        {**_sizes(3584, 2048, 18944, 28, 28, 4, 32768), "norm_topk_prob": True, "rope_theta": 1e6},
        fixed={"use_sliding_window": False},
    ),
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": TextPart(
        "Qwen3MoeForCausalLM",
        "qwen3_vl_moe_text",
        {
            **_sizes(151936, 2048, 5632, 24, 16, 16, 128000),
            "head_dim": 128,
            "moe_intermediate_size": 1408,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "rope_theta": 5e5,
        },
        fixed={"norm_topk_prob": True, "use_sliding_window": False},
    ),
    "Qwen3_5ForConditionalGeneration": TextPart("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": TextPart("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
}
"""Text parts by architecture."""

THINKERS = {
    "Qwen2_5OmniForConditionalGeneration": "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5OmniModel": "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
"""Architectures that speak too, and that of their part `thinker_config`, which understands and writes text."""

COMPUTED_AS: dict[tuple[str, str], str | None] = {
    ("Gemma3nForConditionalGeneration", "gemma3n_text"): None,
    ("Gemma4ForConditionalGeneration", "gemma4_text"): None,
    ("Glm46VForConditionalGeneration", "glm4v_moe_text"): "glm4_moe",
    ("Glm4vMoeForConditionalGeneration", "glm4v_moe_text"): "glm4_moe",
    ("GlmOcrForConditionalGeneration", "glm_ocr_text"): None,
    ("HunYuanVLForConditionalGeneration", "hunyuan_vl_text"): "hunyuan_v1_dense",
    ("Mistral3ForConditionalGeneration", "ministral3"): None,
    ("Mistral3ForConditionalGeneration", "mistral4"): None,
    ("MuseGlimmerForConditionalGeneration", "muse_glimmer_text"): None,
    ("MuseSparkForConditionalGeneration", "muse_spark_text"): None,
    ("Qwen3_5ForConditionalGeneration", "qwen3_5_text"): None,
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"): None,
}
"""Text parts that transformers computes, by architecture and `model_type` of `text_config`, and as which model type;
None: as the one that `text_config` names."""

WITHOUT_A_HEAD = ("glm_ocr_text", "muse_glimmer_text", "muse_spark_text")
"""Of these, model types for which transformers has a decoder, and no causal language model."""

WITH_ANY_DECODER = {
    "Apertus1p5ForConditionalGeneration": "apertus1p5_text",
    "AriaForConditionalGeneration": "aria_text",
    "AudioFlamingo3ForConditionalGeneration": "qwen2",
    "AyaVisionForConditionalGeneration": "cohere2",
    "Cohere2VisionForConditionalGeneration": "cohere2",
    "DeepseekVLForConditionalGeneration": "llama",
    "DeepseekVLHybridForConditionalGeneration": "llama",
    "Exaone4_5_ForConditionalGeneration": "exaone4",
    "FastVlmForConditionalGeneration": "qwen2",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified_text",
    "GotOcr2ForConditionalGeneration": "qwen2",
    "GraniteSpeechForConditionalGeneration": "granite",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "hyperclovax",
    "Idefics2ForConditionalGeneration": "mistral",
    "Idefics3ForConditionalGeneration": "llama",
    "InternVLForConditionalGeneration": "qwen2",
    "JanusForConditionalGeneration": "llama",
    "Kimi_K25ForConditionalGeneration": "deepseek_v3",
    "Lfm2VlForConditionalGeneration": "lfm2",
    "Lfm3VlForConditionalGeneration": "lfm3",
    "LightOnOcrForConditionalGeneration": "qwen3",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "LlavaNextVideoForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "MiniCPMV4_6ForConditionalGeneration": "qwen3_5_text",
    "MiniCPMV4_7ForConditionalGeneration": "qwen3_5_text",
    "MusicFlamingoForConditionalGeneration": "qwen2",
    "Ovis2ForConditionalGeneration": "qwen2",
    "QianfanOCRForConditionalGeneration": "qwen3",
    "Qwen2AudioForConditionalGeneration": "qwen2",
    "SmolVLMForConditionalGeneration": "llama",
    "VideoLlama3ForConditionalGeneration": "qwen2",
    "VideoLlavaForConditionalGeneration": "llama",
    "VipLlavaForConditionalGeneration": "llama",
    "VoxtralForConditionalGeneration": "llama",
}
"""Architectures whose class builds the decoder that `text_config` names, and the one where it names none."""

PUBLISHED_WITH_CODE = {
    "InternVLChatModel": "qwen2",
    "KimiK25ForConditionalGeneration": "deepseek_v3",
    "NemotronH_Nano_Omni_Reasoning_V3": "nemotron_h",
    "NemotronH_Omni_Reasoning_V3": "nemotron_h",
}
"""The same for architectures that their publishers' code has, which is not executed: the decoder is in transformers.

Its section may be called `llm_config`.
"""

OTHER_NAMES = {"kimi_k2": "deepseek_v3"}
"""Model types of such files, and those of transformers."""

NATIVE_DECODERS = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""Model types of text parts that the decoder of a family computes, and its architecture."""
