"""Loads weights by name; errors of broken checkpoints."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.model.checkpoint_folder import INDEX_FILE, SINGLE_FILE
from engine.model.config import ModelConfig
from engine.model.loader import load_model
from engine.model.weights import check_headers
from kernels.families import reference_ops
from tests.support.engine.weights import loaded_parts

NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def single(make_checkpoint, tmp_path):
    """A checkpoint of one file, to be broken."""
    return shutil.copytree(make_checkpoint("llama"), tmp_path / "single")


@pytest.fixture
def sharded(make_checkpoint, tmp_path):
    """A checkpoint of several shards, to be broken."""
    path = shutil.copytree(make_checkpoint("llama", max_shard_size="40KB"), tmp_path / "sharded")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def load(path, **kwargs):
    return load_model(path, ModelConfig.from_dir(path), reference_ops(), **kwargs)


def loaded_tensors(path, **kwargs):
    return {name: part.tensor for name, part in loaded_parts(path, **kwargs).items()}


def rewrite(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def check_fails(path, *parts):
    with pytest.raises(CheckpointError) as caught:
        load(path)
    for part in parts:
        assert str(part) in str(caught.value)


def test_sharded_and_single_checkpoints_hold_the_same(single, sharded):
    a, b = loaded_tensors(single), loaded_tensors(sharded)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_tensors_land_under_their_names(single):
    stored = load_file(single / SINGLE_FILE)
    loaded = loaded_tensors(single)
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(stored[name], loaded[name]) for name in stored)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5", "mixtral"])
@pytest.mark.parametrize("has_prefix_twice", [False, True])
def test_the_prefix_of_the_base_model_may_be_missing_or_there_twice(
    make_checkpoint, tmp_path, architecture, has_prefix_twice
):
    """A base model that `AutoModel` saves has none; one inside of another module has it twice."""
    path = shutil.copytree(make_checkpoint(architecture, tie_word_embeddings=True), tmp_path / "model")
    expected = loaded_tensors(path)
    tensors = load_file(path / SINGLE_FILE)
    renamed = {f"model.{name}" if has_prefix_twice else name.removeprefix("model."): tensors[name] for name in tensors}
    save_file(renamed, path / SINGLE_FILE, metadata={"format": "pt"})
    _, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    loaded = loaded_tensors(path)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    save_file({**renamed, "model.norm.weight": torch.ones(64)}, path / SINGLE_FILE, metadata={"format": "pt"})
    check_fails(path, SINGLE_FILE, "is there twice")


def test_bfloat16_is_converted_exactly(make_checkpoint):
    path = make_checkpoint("llama", dtype="bfloat16")
    stored, loaded = load_file(path / SINGLE_FILE), loaded_tensors(path)
    assert stored[NAME].dtype is torch.bfloat16
    assert loaded[NAME].dtype is torch.float32
    assert torch.equal(loaded[NAME], stored[NAME].float())


def test_a_value_beyond_the_range_of_float16_is_refused_in_float16_only(single):
    rewrite(single / SINGLE_FILE, lambda tensors: tensors[NAME].__setitem__((-1, -1), 65_504.0))
    load(single, dtype=torch.float16)
    rewrite(single / SINGLE_FILE, lambda tensors: tensors[NAME].__setitem__((-1, -1), 65_536.0))
    load(single, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=rf"{NAME} has values beyond 65504.*use --dtype bfloat16 or float32"):
        load(single, dtype=torch.float16)


def test_progress_ends_with_all_bytes_of_the_files(sharded):
    seen = []
    load(sharded, progress=lambda done, total: seen.append((done, total)))
    num_bytes = sum(tensor.nbytes for path in sharded.glob("*.safetensors") for tensor in load_file(path).values())
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {num_bytes}
    assert seen[-1][0] == num_bytes


def test_extra_tensors_that_no_model_needs_are_ignored(single):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    rewrite(single / SINGLE_FILE, change)
    load(single)


@pytest.mark.parametrize("stored", ["embedding", "both", "head", "both, different"])
@pytest.mark.parametrize("max_shard_size", ["1GB", "40KB"])
def test_tied_embeddings_are_those_of_transformers_whichever_matrices_are_stored(
    make_checkpoint, tmp_path, stored, max_shard_size
):
    """A head that differs is kept, as of a model whose head was trained alone. One of both matrices serves as both."""
    path = shutil.copytree(
        make_checkpoint("llama", tie_word_embeddings=True, max_shard_size=max_shard_size), tmp_path / "model"
    )
    names = {name: file for file in path.glob("*.safetensors") for name in load_file(file)}
    file = names["model.embed_tokens.weight"]
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    if stored != "embedding":
        tensors["lm_head.weight"] = (embedding.flip(0) if stored == "both, different" else embedding).clone()
        names["lm_head.weight"] = file
    if stored == "head":
        del tensors["model.embed_tokens.weight"], names["model.embed_tokens.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    if (path / INDEX_FILE).exists():
        index = {"metadata": {}, "weight_map": {name: file.name for name, file in names.items()}}
        (path / INDEX_FILE).write_text(json.dumps(index))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    model = load(path)
    with torch.inference_mode():
        torch.testing.assert_close(model.compute_logits(hidden), oracle.lm_head(hidden))
    assert torch.equal(model.vocabulary.table, oracle.model.embed_tokens.weight)
    assert model.vocabulary.shares_head == (stored != "both, different")


def test_missing_weights_are_named_and_a_pickle_is_not_loaded(single, monkeypatch):
    monkeypatch.setattr(torch, "load", None)
    (single / SINGLE_FILE).rename(single / "pytorch_model.bin")
    check_fails(single, single, SINGLE_FILE, "only safetensors are read")


def test_missing_shard_is_named(sharded):
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.unlink()
    check_fails(sharded, file, "missing, one of 12 files that model.safetensors.index.json names")


def test_an_index_beside_the_one_file_is_not_read(single, sharded):
    """Tools that quantise a model copy all JSON files beside their own one file of weights."""
    shutil.copy(sharded / INDEX_FILE, single)
    assert torch.equal(loaded_tensors(single)[NAME], load_file(single / SINGLE_FILE)[NAME])


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../../model.safetensors"}}']
)
def test_broken_index_is_named(sharded, content):
    (sharded / INDEX_FILE).write_text(content)
    check_fails(sharded, INDEX_FILE)


def test_missing_tensor_is_named(single):
    rewrite(single / SINGLE_FILE, lambda tensors: tensors.pop(NAME))
    check_fails(single, single, "1 of 21 tensors are missing", NAME)


def test_wrong_shape_is_named(single):
    rewrite(single / SINGLE_FILE, lambda tensors: tensors.update({NAME: torch.ones(64, 111)}))
    check_fails(single, SINGLE_FILE, NAME, "shape [64, 111]", "[64, 112]")


def test_tensor_without_a_place_is_named(single):
    bias = "model.layers.0.self_attn.q_proj.bias"
    rewrite(single / SINGLE_FILE, lambda tensors: tensors.update({bias: torch.ones(64)}))
    check_fails(single, SINGLE_FILE, bias, "not part of this architecture")


def test_tensor_in_two_shards_is_named(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    rewrite(second, lambda tensors: tensors.update({name: tensor}))
    check_fails(sharded, name, "there twice, here or in another file")


def test_unsupported_dtype_is_named(single):
    rewrite(single / SINGLE_FILE, lambda tensors: tensors.update({NAME: torch.ones(64, 112, dtype=torch.int8)}))
    check_fails(single, SINGLE_FILE, NAME, "is I8, supported for this tensor are F32, F16, BF16")


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int16, torch.uint16, torch.uint32, torch.float64, torch.uint64, torch.float8_e5m2]
)
def test_tensors_that_are_not_read_may_have_any_dtype(single, dtype):
    """Such as the masks of GPT-NeoX, which `transformers` computes; a tensor that is read may not."""
    masks = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8).to(dtype)}
    rewrite(single / SINGLE_FILE, lambda tensors: tensors.update(masks))
    check_headers(single)
    load(single)
    rewrite(single / SINGLE_FILE, lambda tensors: tensors.update({NAME: torch.ones(64, 112).to(dtype)}))
    check_headers(single)
    check_fails(single, SINGLE_FILE, NAME, "supported for this tensor are F32, F16, BF16")


@pytest.mark.parametrize("keep", [0, 5, 8, 100, 0.5, 0.999, -1])
def test_truncated_file_is_named(single, keep):
    file = single / SINGLE_FILE
    content = file.read_bytes()
    kept = content[: int(keep * len(content)) if isinstance(keep, float) else keep]
    file.write_bytes(kept)
    check_fails(single, file, f"{len(kept)} bytes", "truncated")


def header_of(change):
    def rewrite_header(content):
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        change(header)
        raw = json.dumps(header).encode()
        return len(raw).to_bytes(8, "little") + raw + content[8 + length :]

    return rewrite_header


CORRUPTIONS = {
    "longer than allowed": (
        lambda content: (1 << 40).to_bytes(8, "little") + content[8:],
        "header of 1099511627776 bytes",
    ),
    "not JSON": (lambda content: content[:8] + b"x" + content[9:], "corrupt header"),
    "not an object": (lambda content: (2).to_bytes(8, "little") + b"[]" + content[8:], "corrupt header"),
    "deeply nested": (
        lambda content: (200_000).to_bytes(8, "little") + b"[" * 200_000 + content[8:],
        "corrupt header",
    ),
    "no dtype": (header_of(lambda h: h[NAME].pop("dtype")), f"corrupt header entry of tensor {NAME}"),
    "entry is a number": (header_of(lambda h: h.update({NAME: 3})), f"corrupt header entry of tensor {NAME}"),
    "negative shape": (header_of(lambda h: h[NAME].update(shape=[-64, -112])), "must be integers >= 0"),
    "offsets of other size": (
        header_of(lambda h: h[NAME].update(data_offsets=[0, 12])),
        "takes 28672 bytes, its offsets span 12",
    ),
    "offsets that overlap": (header_of(lambda h: h[NAME].update(data_offsets=[4, 28676])), "cannot be read"),
    "trailing bytes": (lambda content: content + b"x", "truncated or corrupt"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corrupt_header_is_named(single, name):
    corrupt, message = CORRUPTIONS[name]
    file = single / SINGLE_FILE
    file.write_bytes(corrupt(file.read_bytes()))
    check_fails(single, file, message)


def test_dummy_weights_need_only_the_config_and_follow_the_seed(single):
    (single / SINGLE_FILE).unlink()
    first, again, other = (loaded_tensors(single, load_format="dummy", seed=s) for s in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[NAME], other[NAME])
    assert all(bool(tensor.isfinite().all()) for tensor in first.values())
