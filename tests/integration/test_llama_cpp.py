"""Greedy tokens of GGUF files are those of llama.cpp, up to near-ties and what it rounds.

Both are judged by `transformers` in fp32 on the numbers in the file, position by position. llama.cpp rounds the inputs
of every product to 16 bits for F16 and BF16 files, and to 8 bits for quantised ones, so its choices there are those of
exact arithmetic up to that rounding. Chairlift may round as much. In F32 files its choices must be those of fp32.
llama.cpp is granted the rounding of F16 there: its Qwen2 was off by 0.004 at one of 137 positions, for a reason that
was not found.

llama.cpp is built by `python -m loadgen.experiments.peers.llama_cpp.environment`, not by these tests.
"""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift.bench.agreement import NEAR_TIE, Agreement
from chairlift.bench.shapes import write_tokenizer
from chairlift.bench.workload import Workload
from engine.bench.agreement import greedy_agreement, load_reference
from engine.bench.gguf_writer import metadata_of, save_gguf, save_twin, tensors_of, write_gguf
from engine.bench.serve import engine, serve
from engine.config import parse_config
from loadgen.experiments.peers.llama_cpp import servers
from loadgen.experiments.peers.llama_cpp.environment import llama_environment
from loadgen.experiments.peers.worker import Worker, WorkerSystem
from tests.support.engine.checkpoints import save_checkpoint
from tests.support.engine.families import FAMILIES, family_config, save_family
from tests.support.engine.gguf import of_a_model_for_images
from tests.support.engine.gguf_conversions import FALCON_MULTIPLIERS
from tests.support.engine.gguf_families import WRITTEN, save_family_gguf
from tests.support.engine.mxfp4_checkpoints import quantise_experts

NUM_LAYERS = 2
SIZES = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 400}  # whole blocks of K-quants
WORKLOAD = Workload(tuple(tuple(range(first, first + 5 * first)) for first in (3, 7, 11, 17)), (40, 24, 33, 40))

# Standard deviation of a rounded input, as a part of the inputs' own. A float with p bits behind the point is off by
# 2**-p / sqrt(12) of its power of two, at most itself. An integer of 8 bits is off by the largest input of its block /
# 127 / sqrt(12); of 256 normal ones, which a block of Q8_K has, the largest is about 3.
ROUNDING = {
    "F32": 0.0,
    "F16": 2**-10 / math.sqrt(12),
    "BF16": 2**-7 / math.sqrt(12),
    "Q8_0": 3 / 127 / math.sqrt(12),
    "Q4_K_M": 3 / 127 / math.sqrt(12),
    "MXFP4": 3 / 127 / math.sqrt(12),  # of the inputs of experts; other matrices are in F32
}
# llama.cpp rounds the dimensions between which yarn blends, which gpt-oss does not: here they are whole numbers.
_DELTA_RULES = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rms_norm_eps": 1e-6,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 512,
}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**_EXPERTS, "mlp_only_layers": [], "tie_word_embeddings": False},  # llama.cpp reads no other
    "qwen3_next": {**_DELTA_RULES, **_EXPERTS, "mlp_only_layers": [], "norm_topk_prob": True},
    "qwen3_5": _DELTA_RULES,
    "qwen3_5_moe": {**_DELTA_RULES, **_EXPERTS},
    "glm4": {"tie_word_embeddings": False},  # otherwise answers repeat few tokens
    "gpt_oss": {
        "tie_word_embeddings": False,  # llama.cpp reads no other
        "swiglu_limit": 7.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 804,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 65536.0,
            "factor": 4.0,
            "original_max_position_embeddings": 201,
            "truncate": False,
        },
    },
}

FIELDS_FOR_LLAMA_CPP: dict[str, dict[str, Any]] = {
    "DeepSeek-V2": {"n_group": 1, "topk_method": "greedy"},  # llama.cpp chooses groups as DeepSeek-V3 does
    **{name: {"head_dim": 8} for name in ("DeepSeek-V3", "GLM-4.7 Flash", "Youtu-LLM")},
    "dots.llm1": {"num_key_value_heads": 4},  # llama.cpp reads no other
    "EXAONE 4": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "Falcon-H1": {  # the twin's configuration would multiply once more
        name: 1.0 if isinstance(value, float) else [1.0] * len(value)
        for name, value in FALCON_MULTIPLIERS.items()
        if isinstance(value, float | list)
    },
    "Gemma 3n": {  # llama.cpp has sizes of the published models: see its src/models/gemma3n.cpp
        "num_hidden_layers": 6,
        "activation_sparsity_pattern": [0.95] * 6,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": SIZES["vocab_size"],
        "hidden_size_per_layer_input": 256,
    },
    "Gemma 4": {"num_hidden_layers": 6, "global_head_dim": 128, "vocab_size_per_layer_input": SIZES["vocab_size"]},
    "Granite 4": {"num_hidden_layers": 3, "mamba_d_head": 64},  # llama.cpp reads an expansion to twice the size only
    "LFM2": {"num_hidden_layers": 4},
    "LFM2-MoE": {"num_hidden_layers": 4},
    "OLMoE": {"num_key_value_heads": 4},  # llama.cpp reads no other
    "StarCoder2": {"tie_word_embeddings": False},  # otherwise answers repeat few tokens
}

WITH_SHARED_EXPERTS = ("qwen2_moe", "qwen3_next", "qwen3_5_moe")

NUM_PRODUCTS = 7 * NUM_LAYERS + 1
SIGMAS = 6


def near_tie(kind: str) -> float:
    """Difference of two logits, of about unit size, that the rounding of all products may reverse."""
    return NEAR_TIE + SIGMAS * math.sqrt(2 * NUM_PRODUCTS) * ROUNDING[kind]


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    environment = llama_environment()
    if not environment.exists:
        pytest.skip(
            "llama.cpp is not built: python -m loadgen.experiments.peers.llama_cpp.environment does, in minutes"
        )
    log = tmp_path_factory.mktemp("llama") / "llama.log"
    with Worker([environment.python, "-I", servers._SCRIPT], log) as worker:
        yield worker


def save_model(name: str, folder: Path, **fields: Any) -> Path:
    """A checkpoint whose activations and logits are near unit scale, so that answers depend on all of their prompt."""
    sizes = {**SIZES, "num_hidden_layers": NUM_LAYERS, "tie_word_embeddings": True, **OWN_SIZES.get(name, {}), **fields}
    save_checkpoint(folder, name, seed=0, dtype="float32", max_shard_size="1GB", **sizes)
    scale_weights(folder)
    return folder


def scale_weights(folder: Path) -> None:
    """Draws weights anew so, and adds a tokenizer."""
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    for key, weight in weights.items():
        if key.endswith(("bias", "sinks")):
            weights[key] = torch.randn(weight.shape, generator=generator) * 0.1
        elif weight.ndim > 1:  # the inputs of experts are in this dimension too
            weights[key] = torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5
    if "GemmaForCausalLM" in (folder / "config.json").read_text():
        scale_gemma(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, SIZES["vocab_size"])


def scale_gemma(weights: dict[str, torch.Tensor]) -> None:
    """Changes the weights of a Gemma, whose embeddings are scaled: otherwise answers repeat few tokens."""
    for key, weight in weights.items():
        if ".layers." in key and weight.ndim > 1:
            weights[key] = 3 * weight
    weights["model.embed_tokens.weight"] /= 16
    weights["model.norm.weight"] = 16 * (1 + weights["model.norm.weight"]) - 1


def save_file_of(kind: str, checkpoint: Path, folder: Path, worker: Worker) -> Path:
    model = folder / f"{kind}.gguf"
    if kind in ("F32", "F16", "BF16"):
        save_gguf(checkpoint, model, kind)
    elif kind == "MXFP4":
        for copy in ("stored", "values"):
            shutil.copytree(checkpoint, folder / copy)
        quantise_experts(checkpoint, folder / "stored", folder / "values")
        save_gguf(folder / "stored", model)
    else:
        save_gguf(checkpoint, folder / "stored.gguf", "F32")
        worker.call("quantize", source=str(folder / "stored.gguf"), out=str(model), type=kind, threads=1)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "F32") for name in ("llama", "qwen2", "qwen3", "qwen3_5", "gpt_oss", "glm4", "gemma")),
        *((name, kind) for name in WITH_SHARED_EXPERTS for kind in ("F32", "F16", "Q8_0", "Q4_K_M")),
        *(("llama", kind) for kind in ROUNDING if kind not in ("F32", "MXFP4")),
        *(("qwen3_5", kind) for kind in ("F16", "Q8_0", "Q4_K_M")),
        ("gpt_oss", "MXFP4"),
    ],
)
def test_tokens_are_those_of_llama_cpp(name: str, kind: str, llama_cpp: Worker, tmp_path: Path) -> None:
    # inputs that llama.cpp rounds may reverse the choice of experts, by more than any near-tie: there all are chosen
    fields = {"num_experts_per_tok": 4} if name in WITH_SHARED_EXPERTS and kind != "F32" else {}
    checkpoint = save_model(name, tmp_path / "checkpoint", **fields)
    model = save_file_of(kind, checkpoint, tmp_path, llama_cpp)
    save_twin(model, checkpoint, tmp_path / "twin")
    check_tokens(kind, model, tmp_path / "twin", llama_cpp)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "architecture"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl")])
def test_tokens_of_text_parts_are_those_of_llama_cpp(
    name: str, architecture: str, llama_cpp: Worker, tmp_path: Path
) -> None:
    checkpoint, model = save_model(name, tmp_path / "checkpoint"), tmp_path / "model.gguf"
    write_gguf(model, of_a_model_for_images(metadata_of(checkpoint), architecture), tensors_of(checkpoint))
    check_tokens("F32", model, checkpoint, llama_cpp)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "F32") for name in WRITTEN),
        *((name, kind) for name in ("LFM2", "Seed-OSS") for kind in ("Q8_0", "Q4_K_M")),
    ],
)
def test_tokens_of_architectures_of_transformers_are_those_of_llama_cpp(
    name: str, kind: str, llama_cpp: Worker, tmp_path: Path
) -> None:
    fields = {"num_hidden_layers": NUM_LAYERS, **WRITTEN[name].fields, **FIELDS_FOR_LLAMA_CPP.get(name, {})}
    check_family(name, kind, fields, llama_cpp, tmp_path)


@pytest.mark.slow
def test_tokens_of_exaone_4_with_windows_are_those_of_llama_cpp(llama_cpp: Worker, tmp_path: Path) -> None:
    """Which has windows in models of 64 layers only, as the published one, whatever the file says."""
    types = [*["sliding_attention"] * 3, "full_attention"] * 16
    check_family("EXAONE 4", "F32", {"num_hidden_layers": 64, "layer_types": types}, llama_cpp, tmp_path)


def check_family(name: str, kind: str, own_fields: dict[str, Any], llama_cpp: Worker, tmp_path: Path) -> None:
    folder, model = tmp_path / "checkpoint", tmp_path / "stored.gguf"
    (prefix, fields), written = FAMILIES[name], WRITTEN[name]
    save_family(folder, family_config(prefix, **{**fields, **SIZES, "pad_token_id": None, **own_fields}))
    scale_weights(folder)
    save_family_gguf(folder, model, written)
    if kind != "F32":
        source, model = model, tmp_path / f"{kind}.gguf"
        llama_cpp.call("quantize", source=str(source), out=str(model), type=kind, threads=1)
    save_twin(model, folder, tmp_path / "twin")
    check_tokens(kind, model, tmp_path / "twin", llama_cpp)


def check_tokens(kind: str, model: Path, twin: Path, llama_cpp: Worker) -> None:
    """Compares the tokens of a file, in both, with those of a folder with its numbers, which transformers computes."""
    reference = load_reference(twin)

    def judge(answers: Any, tolerance: float) -> Agreement:
        return greedy_agreement(reference, WORKLOAD.prompts, answers, near_tie=tolerance)

    llama_cpp.call("load", name=str(model), model=str(model), slots=3, context=256, threads=1, cache="F32")
    theirs = WorkerSystem(llama_cpp, name=str(model)).generate(WORKLOAD).output_ids
    parts = engine(parse_config(["--model", str(model), "--threads", "1", "--max-model-len", "256"], {}))
    ours = serve(parts, WORKLOAD.prompts, WORKLOAD.max_tokens).output_ids
    found, expected = judge(ours, near_tie(kind)), judge(theirs, max(near_tie(kind), near_tie("F16")))
    assert found.num_wrong == expected.num_wrong == 0, f"Chairlift: {found}; llama.cpp: {expected}"
    assert len({token for answer in ours for token in answer}) > 10, "answers that repeat themselves prove little"
    if found.num_near_ties == expected.num_near_ties == 0:
        assert ours == theirs
    if kind == "F32":
        assert expected.num_same >= 0.97 * expected.num_tokens, "near-ties are rare"
