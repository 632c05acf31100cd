"""The shapes that come with the engine are those of the models they are named after."""

from pathlib import Path

import pytest
import torch

from engine.model.config import ModelConfig
from engine.model.loader import weights_bytes
from engine.model.shapes import find_shape, shape_names

NUM_PARAMETERS = {  # as the models' cards and files have them
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
}


def test_every_shape_is_known_here() -> None:
    assert shape_names() == sorted(NUM_PARAMETERS)


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_shapes_have_as_many_parameters_as_the_models(name: str) -> None:
    path = find_shape(name)
    assert path is not None
    config = ModelConfig.from_dir(path)
    num_parameters = weights_bytes(config, torch.bfloat16) // 2
    assert num_parameters == NUM_PARAMETERS[name]
    assert config.checkpoint_dtype == "bfloat16"
    assert config.end_token_ids


def test_case_does_not_matter_and_a_folder_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_shape("Llama-3.1-8B") == find_shape("llama-3.1-8b")
    (tmp_path / "Llama-3.1-8B").mkdir()
    assert find_shape("Llama-3.1-8B") is None
    assert find_shape("llama-4") is None
