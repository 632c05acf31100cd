import json
import sys
from pathlib import Path

import pytest

from chairlift.bench.benchmark import Settings
from chairlift.bench.workload import Workload
from loadgen.experiments.peers.formats import FORMATS, Terms
from loadgen.experiments.peers.llama_cpp import servers
from loadgen.experiments.peers.llama_cpp.servers import LLAMA_CPP, LLAMA_CPP_ALONE, open_llama_cpp, quantize_gguf


@pytest.fixture
def settings(worker_script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(servers, "llama_python", lambda progress: Path(sys.executable))
    monkeypatch.setattr(servers, "_SCRIPT", worker_script)
    return Settings(rounds=1, quick=True, threads=3, scratch=tmp_path, floors=None, progress=lambda _: None)


def test_a_file_is_loaded_once_with_slots_and_with_one(settings: Settings, tmp_path: Path) -> None:
    with open_llama_cpp(FORMATS["Q8_0"], Path("m.gguf"), Terms(512, 16, 100), settings) as systems:
        assert list(systems) == [LLAMA_CPP, LLAMA_CPP_ALONE]
        for system in systems.values():
            assert system.generate(Workload(((1,),), (3,))).output_ids == ((1, 2, 4),)
    lines = [json.loads(line) for line in (tmp_path / "llama-cpp-Q8_0.log").read_text().splitlines() if line[0] == "["]
    assert [line for line in lines if line[0] == "model"] == [["model", "m.gguf"]]
    contexts = [options for kind, options, *_ in lines if kind == "context"]
    assert [(options["n_seq_max"], options["n_ctx"]) for options in contexts] == [(16, 1600), (1, 100)]
    assert all(options["n_threads"] == 3 for options in contexts)
    assert all(options["type_k"] == 1 for options in contexts)


def test_a_file_is_quantised_to_the_format(settings: Settings, tmp_path: Path) -> None:
    quantize_gguf(Path("a.gguf"), Path("b.gguf"), FORMATS["Q8_0"], settings)
    (line,) = [line for line in (tmp_path / "llama-cpp-quantize-Q8_0.log").read_text().splitlines() if line[0] == "["]
    assert json.loads(line) == ["quantize", "a.gguf", "b.gguf", 7, 3]
