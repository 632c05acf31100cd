"""The registry of architectures: add a module to `engine.model.families`, and its family here."""

from engine.model.families.gemma import GEMMA, GEMMA2, GEMMA3
from engine.model.families.glm import GLM, GLM4
from engine.model.families.gpt_oss import GPT_OSS
from engine.model.families.granite import GRANITE
from engine.model.families.llama import LLAMA
from engine.model.families.mistral import MISTRAL
from engine.model.families.mixtral import MIXTRAL
from engine.model.families.olmo import OLMO2, OLMO3
from engine.model.families.phi3 import PHI3
from engine.model.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from engine.model.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from engine.model.families.smollm3 import SMOLLM3
from engine.model.family import Family

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        LLAMA,
        MISTRAL,
        MIXTRAL,
        QWEN2,
        QWEN2_MOE,
        QWEN3,
        QWEN3_MOE,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        PHI3,
        SMOLLM3,
        GRANITE,
        GEMMA,
        GEMMA2,
        GEMMA3,
        GLM,
        GLM4,
        GPT_OSS,
        OLMO2,
        OLMO3,
    )
}
"""Families by their entry of `architectures` in config.json."""
