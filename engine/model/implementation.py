"""Chooses what computes a model, Chairlift or transformers, and refuses others by their config.json alone.

It imports neither torch nor transformers, which takes seconds, so that a refusal costs none. What config.json does not
tell, `engine.model.transformers_probe` finds out.
"""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from engine.errors import ConfigError
from engine.model.architectures import FAMILIES
from engine.model.checkpoint import open_checkpoint
from engine.model.config_fields import ConfigFields
from engine.model.gguf_checkpoint import is_gguf
from engine.model.mxfp4 import Mxfp4Weights
from engine.model.quantization_config import read_quantization_config
from engine.model.text_part import has_native_text, text_fields, transformers_fields, transformers_text
from engine.parallel.layout import ONE_RANK, RankLayout

ModelImpl = Literal["auto", "chairlift", "transformers"]
Implementation = Literal["chairlift", "transformers"]

CACHED_LAYERS = ("full_attention", "sliding_attention")
"""Values of `layer_types` whose only state is keys and values that a token sees by its position."""

STATEFUL_LAYERS = (
    "attention",
    "conv",
    "hybrid",
    "hybrid_sliding",
    "linear_attention",
    "mamba",
    "mlp",
    "moe",
)
"""Other values, of models whose layers keep state besides keys and values, or have none."""

_OWN_ATTENTION = "its attention does not go through the attention interface of transformers"
_OWN_STATE = "its layers keep state that is no KV cache"
_INDEXER = "its layers choose keys by an indexer, whose cache is no KV cache"
_REASONS = {
    _OWN_ATTENTION: (
        "BigBirdForCausalLM", "BloomForCausalLM", "CpmAntForCausalLM", "FalconForCausalLM",
        "GPTNeoForCausalLM", "GPTNeoXJapaneseForCausalLM", "MptForCausalLM", "OpenAIGPTLMHeadModel",
        "RemBertForCausalLM", "RoFormerForCausalLM", "TrOCRForCausalLM", "XGLMForCausalLM", "XLNetLMHeadModel",
    ),
    _OWN_STATE: (
        "FalconMambaForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "MiniMaxForCausalLM",
        "RecurrentGemmaForCausalLM", "RwkvForCausalLM", "Zamba2ForCausalLM", "ZambaForCausalLM", "xLSTMForCausalLM",
    ),
    _INDEXER: (
        "AXK2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "Dots3NoteForCausalLM",
        "Dots3NoteForConditionalGeneration", "Glm5NextForConditionalGeneration", "GlmMoeDsaForCausalLM",
        "HYV4ForCausalLM", "HYV4VLForConditionalGeneration", "MiniMaxM3SparseForConditionalGeneration",
        "MistralLarge4ForConditionalGeneration", "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration",
    ),
    "its layers attend more than once": ("DiffLlamaForCausalLM", "DoryForCausalLM", "HrmTextForCausalLM"),
    "its attention adds biases by the distance of tokens": (
        "Inkling2ForCausalLM", "Inkling2ForConditionalGeneration", "Inkling2LoopForCausalLM",
        "Inkling2LoopForConditionalGeneration", "InklingForCausalLM", "InklingForConditionalGeneration",
    ),
    "it attends to patches of bytes instead of tokens": ("BltForCausalLM",),
    "its attention has a mask that depends on tokens": ("DogeForCausalLM",),
    "its attention is in chunks, which the paged attention does not support": (
        "Llama4ForCausalLM", "Llama4ForConditionalGeneration",
    ),
    "some of its layers attend to images instead of tokens": ("MllamaForCausalLM", "MllamaForConditionalGeneration"),
    "tokens of a prompt see those behind them too: its attention is not causal": ("PaliGemmaForConditionalGeneration",),
    "its experts do not go through the interface of transformers for experts": (
        "DbrxForCausalLM", "JetMoeForCausalLM", "LongcatFlashForCausalLM",
    ),
    "its positions begin behind the id of its padding token instead of at 0": (
        "CamembertForCausalLM", "Data2VecTextForCausalLM", "RobertaForCausalLM", "RobertaPreLayerNormForCausalLM",
        "XLMRobertaForCausalLM", "XLMRobertaXLForCausalLM", "XmodForCausalLM",
    ),
    "it drafts tokens of another model, whose keys and values it takes": (
        "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM",
    ),
}  # fmt: skip
_REFUSED = {name: reason for reason, names in _REASONS.items() for name in names}
_LIMITS = {"num_hidden_layers": 1024, "n_layer": 1024, "vocab_size": 2**24, "hidden_size": 2**22, "n_embd": 2**22}
CAUSAL_NAMES = ("ForCausalLM", "LMHeadModel")
"""How names of language models with an output head end in transformers."""
_INSTEAD = "serve another model, or this one with transformers' own generate"


def choose_implementation(path: Path, model_impl: ModelImpl, *, layout: RankLayout = ONE_RANK) -> Implementation:
    """Returns what computes the checkpoint in a folder.

    Args:
        path: the folder.
        model_impl: `auto` selects chairlift for the architectures that it has, and transformers for others and for
            activations that chairlift does not have.
        layout: of the ranks that share the model; transformers has one.

    Raises:
        CheckpointError: config.json is unreadable, or its model cannot be served.
        ConfigError: transformers is not installed, or does not divide a model among ranks.
    """
    fields = open_checkpoint(path).config()
    names, part = fields.raw("architectures"), transformers_text(fields)
    text = fields if part is not None and not has_native_text(fields) else text_fields(fields)
    text_names = text.raw("architectures")
    is_native = isinstance(text_names, list) and any(
        architecture in text_names and family.has_gate_of(text) for architecture, family in FAMILIES.items()
    )
    if model_impl == "chairlift" or (model_impl == "auto" and is_native):
        return "chairlift"  # whose own configuration refuses what it does not support
    if is_gguf(path) and is_native:
        raise ConfigError(
            f"--model-impl transformers is not supported for GGUF files of {names[0]}, such as {path}: omit it"
        )
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise fields.error("architectures", f"is {names!r}, expected a list of names")
    _check_architecture(fields, names[0])
    model = _describe(fields, names[0])
    if layout.num_ranks > 1:
        raise ConfigError(
            f"{layout} is not supported for {model}, which is computed by "
            f"transformers on one device: omit it, or use a model of {', '.join(FAMILIES)}"
        )
    if find_spec("transformers") is None:
        raise ConfigError(
            f"{model} is computed by transformers, which is not installed: pip install 'chairlift[transformers]', "
            f"or use a model of {', '.join(FAMILIES)}"
        )
    if "model_type" in fields and part is None and not _is_in_transformers(model_type := fields.raw("model_type")):
        raise fields.error(
            "model_type",
            f"is {model_type!r}, which transformers {version('transformers')} does not have: update it, or use a model "
            f"of {', '.join(FAMILIES)}",
        )
    return "transformers"


def _describe(fields: ConfigFields, name: str) -> str:
    """Returns the architecture, with the setting that keeps Chairlift from computing it if it is a native one."""
    family = FAMILIES.get(name)
    if family is None or family.has_gate_of(fields):
        return name
    return f"{name} with {family.activation_field} {family.activation(fields)!r}"


def _check_architecture(fields: ConfigFields, name: str) -> None:
    if reason := _REFUSED.get(name):
        raise fields.error("architectures", f"is {name}: {reason}; {_INSTEAD}")
    if fields.flag("is_encoder_decoder", False):
        raise fields.error("is_encoder_decoder", f"is true: {name} is no causal language model; {_INSTEAD}")
    text = transformers_text(fields)
    if text is None and "auto_map" in fields and not _is_in_transformers(fields.raw("model_type", None)):
        raise fields.error(
            "auto_map",
            f"names code of the checkpoint for {name}, which is not executed; use a checkpoint of a model_type that "
            "transformers has",
        )
    if text is not None:
        fields = transformers_fields(fields)
    elif name.endswith("ForConditionalGeneration"):
        _check_layers(fields.section("text_config"))
        raise fields.error(
            "architectures",
            f"is {name}: models of images, sound or an encoder are not supported, but for those in docs/models.md; use "
            "a text-only checkpoint",
        )
    elif not name.endswith(CAUSAL_NAMES):
        raise fields.error(
            "architectures",
            f"is {name}: embedding models, classifiers and encoders are not supported; names of causal language models "
            f"end in {' or '.join(CAUSAL_NAMES)}",
        )
    _check_layers(fields)
    if isinstance(read_quantization_config(fields), Mxfp4Weights):
        raise fields.error(
            "quantization_config",
            f"is mxfp4, which is not supported for {name}, computed by transformers: use the checkpoint in 16 bits",
        )
    for key in ("rope_parameters", "rope_scaling"):
        section = fields.section(key)
        for rope in (section, *(section.section(part) for part in CACHED_LAYERS)):
            is_dynamic = "dynamic" in (rope.raw("rope_type", None), rope.raw("type", None))
            if is_dynamic and not rope.raw("alpha", 0):  # by which Hunyuan's frequencies are fixed
                raise fields.error(
                    key,
                    "has rope_type dynamic, whose factors depend on the longest request of the batch; use linear, yarn "
                    "or llama3",
                )
    for key, maximum in _LIMITS.items():
        if key in fields:
            fields.integer(key, maximum=maximum)


def _check_layers(fields: ConfigFields) -> None:
    """Checks the fields that tell how layers attend, or what they keep."""
    if (top_k := fields.raw("index_topk", None)) is not None:
        raise fields.error("index_topk", f"is {top_k!r}: {_INDEXER}; {_INSTEAD}")
    types = fields.raw("layer_types", [])
    if not isinstance(types, list):
        raise fields.error("layer_types", f"is {types!r}, expected a list")
    if "chunked_attention" in types:
        raise fields.error(
            "layer_types", f"has chunked_attention, which the paged attention does not support; {_INSTEAD}"
        )
    if others := sorted({str(kind) for kind in types} - set(CACHED_LAYERS) - set(STATEFUL_LAYERS)):
        raise fields.error("layer_types", f"has {', '.join(others)}: {_OWN_STATE}; {_INSTEAD}")


def _is_in_transformers(model_type: object) -> bool:
    """Whether the installed transformers has a model type, by the source of its tables: an import takes seconds."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None or not isinstance(model_type, str):
        return False
    tables = (Path(spec.origin).parent / "models" / "auto").glob("*.py")
    return any(f'"{model_type}"' in table.read_text(encoding="utf-8") for table in tables)
