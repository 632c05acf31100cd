"""Addresses of engines with and without a scheme, and the package that a scheme needs."""

import sys

import pytest

from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from frontend.engine_address import EngineAddress, EngineKind
from frontend.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "kind", "target"),
    [
        ("127.0.0.1:50052", EngineKind.CHAIRLIFT, "127.0.0.1:50052"),
        ("unix:/tmp/a", EngineKind.CHAIRLIFT, "unix:/tmp/a"),
        ("dns:engine:1", EngineKind.CHAIRLIFT, "dns:engine:1"),
        ("vllm://gpu:1", EngineKind.VLLM, "gpu:1"),
        ("sglang://[::1]:1", EngineKind.SGLANG, "[::1]:1"),
        ("trtllm://dns:gpu:1", EngineKind.TRTLLM, "dns:gpu:1"),
        ("vllm://unix:/tmp/a", EngineKind.VLLM, "unix:/tmp/a"),
    ],
)
def test_scheme_names_the_kind(address, kind, target):
    parsed = EngineAddress.parse(address)
    assert parsed == (kind, target)
    assert parsed.at(target) == address
    FrontendConfig(engine=(address,))


def test_engines_that_a_name_stands_for_are_of_its_kind():
    assert EngineAddress.parse("vllm://gpu:1").at("10.0.0.7:1") == "vllm://10.0.0.7:1"
    assert EngineAddress.parse("gpu:1").at("10.0.0.7:1") == "10.0.0.7:1"


@pytest.mark.parametrize("address", ["tgi://gpu:1", "://gpu:1x", "VLLM://gpu:1", "vllm://", "vllm://vllm://gpu:1"])
def test_other_schemes_and_targets_are_refused(address):
    with pytest.raises(ConfigError):
        FrontendConfig(engine=(address,))


async def test_missing_package_is_named_at_the_start(monkeypatch):
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    monkeypatch.setitem(sys.modules, "smg_grpc_proto.generated", None)
    with pytest.raises(ConfigError, match=r"--engine vllm://... needs the engine's protos .* 'chairlift\[engines\]'"):
        FrontendApp(FrontendConfig(engine=("vllm://127.0.0.1:1",), http=False))
