"""What a configuration means on a device."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.demo import MODEL_DIR
from engine.errors import ConfigError


def test_step_limits_default_to_the_device() -> None:
    config = EngineConfig(model="m")
    assert config.step_limits("cpu") == (64, 512)
    assert config.step_limits("cuda") == (256, 2048)


def test_the_token_budget_grows_with_the_seats() -> None:
    assert EngineConfig(model="m", max_num_seqs=1000).step_limits("cpu") == (1000, 1000)


def test_a_budget_below_the_seats_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 16 .* --max-num-seqs 32"):
        EngineConfig(model="m", max_num_seqs=32, max_num_batched_tokens=16).step_limits("cpu")


def test_addresses() -> None:
    assert EngineConfig(model="m", host="::1", port=5).address == "[::1]:5"
    assert EngineConfig(model="m", uds=Path("/run/x.sock")).address == "unix:/run/x.sock"


def test_the_model_is_named_after_its_folder_unless_told(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    assert EngineConfig(model=str(folder)).model_name == "tiny-llama"
    assert EngineConfig(model="owner/name").model_name == "owner/name"
    assert EngineConfig(model=str(MODEL_DIR)).model_name == "chairlift-demo"
    assert EngineConfig(model=str(folder), served_model_name="mine").model_name == "mine"


@pytest.mark.parametrize(("asked", "cpu", "cuda"), [(None, 1, 2), (True, 2, 2), (False, 1, 1)])
def test_two_steps_are_in_flight_on_a_gpu_unless_told(asked: bool | None, cpu: int, cuda: int) -> None:
    config = EngineConfig(model="m", async_scheduling=asked)
    assert (config.max_steps_in_flight("cpu"), config.max_steps_in_flight("cuda")) == (cpu, cuda)
