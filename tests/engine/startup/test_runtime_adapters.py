"""Adapters that are loaded from --lora-dir while an engine serves: hostile files, paths that lead elsewhere, memory."""

import json
import os
import random
import shutil

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import AdapterNotFound, CheckpointError, ConfigError, InvalidRequest
from engine.model.config import ModelConfig
from engine.model.loader import load_model
from engine.model.lora import LoraAdapter
from engine.startup.adapters import ModelAdapters, adapters_bytes, num_adapter_slots, open_adapters
from kernels.families import reference_ops
from tests.support.engine.adapters import CONFIG_FILE, WEIGHTS_FILE, save_adapter

CPU = torch.device("cpu")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def base(make_checkpoint):
    return make_checkpoint("llama")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "allowed").mkdir()
    return tmp_path / "allowed"


def reserved(base, *folders, **options):
    config = EngineConfig(
        model=str(base),
        enable_lora=True,
        max_loras=2,
        lora_dir=tuple(map(str, folders)),
        **({"max_lora_rank": 8} | options),
    )
    return ModelAdapters.reserve(config, load_model(base, ModelConfig.from_dir(base), reference_ops()), reference_ops())


def changes_of(adapters, index):
    """Returns what the reference holds for one place: the matrices of each linear layer."""
    return [layer._packed[1][index] for layer in adapters.model.adaptable()]


def assert_same(ours, theirs):
    for these, those in zip(ours, theirs, strict=True):
        assert len(these) == len(those)
        for one, other in zip(these, those, strict=True):
            assert torch.equal(one.a, other.a)
            assert torch.equal(one.b, other.b)
            assert one.first_row == other.first_row


def test_an_adapter_is_found_by_its_absolute_path_and_below_any_folder(base, folder, tmp_path):
    other = tmp_path / "other"
    save_adapter(folder / "a", base)
    save_adapter(other / "org" / "b", base, seed=2)
    adapters = reserved(base, folder, other)
    digests = [adapters(0, "a", path, b"") for path in ("a", str(folder / "a"), "a/", "../allowed/a")]
    assert len(set(digests)) == 1
    assert adapters(1, "b", "org/b", b"") != digests[0]


def test_the_place_holds_what_a_start_with_the_adapter_would(base, folder):
    path = save_adapter(folder / "a", base, targets=ALL)
    loaded, started = reserved(base, folder), reserved(base, folder)
    loaded(1, "a", "a", b"")
    started.write(1, LoraAdapter.open("a", path, started.layers))
    assert_same(changes_of(loaded, 1), changes_of(started, 1))
    assert not any(changes_of(loaded, 0))


def test_paths_that_lead_out_of_the_folders_are_refused_whether_or_not_they_exist(base, folder, tmp_path):
    outside = save_adapter(tmp_path / "outside" / "a", base)
    (folder / "link").symlink_to(outside)
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    (folder / "circle").symlink_to(folder / "circle")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        inside = save_adapter(folder / f"with-{name}", base)
        (inside / name).unlink()
        (inside / name).symlink_to(outside / name)
    adapters = reserved(base, folder)
    paths = ["../outside/a", str(outside), "../nowhere", "/etc", "link", "dangling", "a\0b"]
    paths += [f"with-{CONFIG_FILE}", f"with-{WEIGHTS_FILE}"]
    for path in paths:
        with pytest.raises(CheckpointError, match=r"is not in a folder of --lora-dir|cannot be read: .*embedded null"):
            adapters(0, "a", path, b"")
    for path in ("circle", "missing", "with/nothing"):
        with pytest.raises((AdapterNotFound, CheckpointError)):
            adapters(0, "a", path, b"")
    with pytest.raises(AdapterNotFound, match="lora_path 'missing': no such folder in those of --lora-dir"):
        adapters(0, "a", "missing", b"")
    assert not any(changes_of(adapters, 0))


def test_links_within_the_folders_are_followed(base, folder):
    (folder / "blobs").mkdir()
    path = save_adapter(folder / "a", base)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (path / name).rename(folder / "blobs" / name)
        (path / name).symlink_to(folder / "blobs" / name)
    adapters = reserved(base, folder)
    assert adapters(0, "a", "a", b"")


def test_a_file_that_would_block_or_is_too_large_is_refused(base, folder):
    path = save_adapter(folder / "a", base)
    adapters = reserved(base, folder)
    config = (path / CONFIG_FILE).read_bytes()
    (path / CONFIG_FILE).unlink()
    os.mkfifo(path / CONFIG_FILE)
    with pytest.raises(CheckpointError, match=r"adapter_config.json: is a named pipe, expected a regular file"):
        adapters(0, "a", "a", b"")
    (path / CONFIG_FILE).unlink()
    (path / CONFIG_FILE).write_bytes(config + b" " * (1 << 20))
    with pytest.raises(CheckpointError, match="at most 1048576 are allowed"):
        adapters(0, "a", "a", b"")
    (path / CONFIG_FILE).write_bytes(config)
    with (path / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(1 << 40)  # without taking any disk
    with pytest.raises(CheckpointError, match=f"has {1 << 40} bytes, its header requires"):
        adapters(0, "a", "a", b"")


def test_a_file_with_a_hole_between_its_matrices_is_refused(base, folder):
    """It would be read for its digest: a terabyte that takes no disk."""
    weights = save_adapter(folder / "a", base) / WEIGHTS_FILE
    whole = weights.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    last = max((entry for name, entry in header.items() if name != "__metadata__"), key=lambda e: e["data_offsets"])
    last["data_offsets"] = [offset + (1 << 40) for offset in last["data_offsets"]]
    changed = json.dumps(header).encode()
    weights.write_bytes(len(changed).to_bytes(8, "little") + changed)
    with weights.open("r+b") as file:
        file.truncate(8 + len(changed) + last["data_offsets"][1])
    with pytest.raises(CheckpointError, match=r"begins at byte \d+, the one before ends at \d+"):
        reserved(base, folder)(0, "a", "a", b"")


def test_a_rank_without_memory_and_another_digest_are_refused(base, folder):
    save_adapter(folder / "a", base, rank=9)
    save_adapter(folder / "b", base)
    adapters = reserved(base, folder)
    with pytest.raises(CheckpointError, match="r is 9, --max-lora-rank is 8"):
        adapters(0, "a", "a", b"")
    with pytest.raises(InvalidRequest, match=r"b: the digest of its files is .*, not 6f74686572"):
        adapters(0, "b", "b", b"other")


def test_random_damage_is_refused_in_one_line_or_read_and_touches_no_other_adapter(base, folder):
    good = save_adapter(folder / "good", base, targets=ALL)
    adapters = reserved(base, folder)
    adapters(0, "good", "good", b"")
    before = changes_of(adapters, 0)
    bad = folder / "bad"
    shutil.copytree(good, bad)
    originals = {name: (good / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
    header = 8 + int.from_bytes(originals[WEIGHTS_FILE][:8], "little")
    rng, refusals = random.Random(1), []
    for _ in range(1000):
        name = rng.choice((CONFIG_FILE, WEIGHTS_FILE))
        data = bytearray(originals[name])
        end = header if name == WEIGHTS_FILE and rng.random() < 0.8 else len(data)
        match rng.randrange(4):
            case 0:
                for _ in range(rng.choice((1, 1, 2, 8))):
                    data[rng.randrange(end)] = rng.randrange(256)
            case 1:
                del data[rng.randrange(end) :]
            case 2:
                data[rng.randrange(end) : rng.randrange(end)] = rng.randbytes(rng.choice((0, 1, 16)))
            case 3:  # values of the other kind
                fields = json.loads(originals[CONFIG_FILE])
                fields[rng.choice(list(fields))] = rng.choice((None, -1, 1e308, "x", [], [[]], {}, True, "\x1b[2J\n"))
                name, data = CONFIG_FILE, bytearray(json.dumps(fields).encode())
        (bad / name).write_bytes(data)
        try:
            adapters(1, "bad", "bad", b"")
        except CheckpointError as error:
            refusals.append(str(error))
        (bad / name).write_bytes(originals[name])
    assert len(refusals) > 500
    assert all(refusal.isprintable() and len(refusal) <= 1003 for refusal in refusals)
    assert_same(changes_of(adapters, 0), before)
    adapters(1, "good", "good", b"")
    assert_same(changes_of(adapters, 1), before)


def test_a_file_that_changes_while_it_is_read_is_refused(base, folder):
    path = save_adapter(folder / "a", base)
    adapter = LoraAdapter.open("a", path, reserved(base).layers)
    with (path / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError, match="has changed while it was read"):
        adapter.read()


def test_memory_is_counted_for_all_places(base):
    model = ModelConfig.from_dir(base)
    config = EngineConfig(model=str(base), enable_lora=True, max_loras=3, max_lora_rank=4)
    one = adapters_bytes(EngineConfig(model=str(base), enable_lora=True, max_loras=1, max_lora_rank=4), model, ())
    assert adapters_bytes(config, model, ()) == 3 * one
    assert adapters_bytes(EngineConfig(model=str(base)), model, ()) == 0
    assert num_adapter_slots(EngineConfig(enable_lora=True)) == 4
    assert num_adapter_slots(EngineConfig(enable_lora=True, lora=("a=b",) * 7)) == 8
    assert num_adapter_slots(EngineConfig(lora=("a=b",))) == 1


def test_settings_that_cannot_be_served_are_refused(base, folder):
    model = ModelConfig.from_dir(base)

    def refusal(**options):
        with pytest.raises(ConfigError) as caught:
            open_adapters(EngineConfig(model=str(base), **options), model)
        return str(caught.value)

    assert refusal(lora_dir=(str(folder),)).startswith("--lora-dir needs --enable-lora")
    settings = (f"a={folder}", f"b={folder}")
    assert refusal(enable_lora=True, max_loras=1, lora=settings) == (
        "--max-loras is 1, but --lora names 2 adapters: raise it"
    )
    assert "nowhere, it must be a folder" in refusal(enable_lora=True, lora_dir=(f"{folder}/nowhere",))
    assert "--tensor-parallel-size 2" in refusal(enable_lora=True, tensor_parallel_size=2)
