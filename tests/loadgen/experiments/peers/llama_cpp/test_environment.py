from pathlib import Path

import pytest

from chairlift.bench.benchmark import BenchmarkError
from loadgen.experiments.peers.llama_cpp import environment
from loadgen.experiments.peers.llama_cpp.environment import llama_environment, llama_python, main, require_build_tools


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which programs are found, empty at first."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def add_program(folder: Path, name: str) -> None:
    (folder / name).touch(mode=0o755)


def test_missing_tools_are_named_before_anything_is_made(tools: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"cmake and a C\+\+ compiler \(c\+\+ or g\+\+ or clang\+\+\) not found"):
        llama_python(print)
    add_program(tools, "cmake")
    with pytest.raises(BenchmarkError, match=r"sources: a C\+\+ compiler .* not found"):
        llama_python(print)
    assert not (tools / "cache").exists()


def test_compiler_is_the_one_of_the_environment(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cmake", "g++"):
        add_program(tools, name)
    require_build_tools()
    monkeypatch.setenv("CXX", "icpx")
    with pytest.raises(BenchmarkError, match=r"a C\+\+ compiler \(icpx\) not found"):
        require_build_tools()


def test_nothing_is_needed_where_it_is_built(tools: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 1
    assert "error: llama.cpp is built from llama-cpp-python==" in capsys.readouterr().err
    built = llama_environment()
    built.folder.mkdir(parents=True)
    (built.folder / "finished").touch()
    assert main() == 0
    assert capsys.readouterr().out == f"{built.python}\n"


def test_it_is_built_from_source_for_this_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = llama_environment()
    assert found.pip_flags == ("--no-binary", "llama-cpp-python", "--no-cache-dir")
    assert "-DGGML_NATIVE=ON" in found.variables["CMAKE_ARGS"]
    folders = {found.folder}
    for flags in ("fpu avx2", "fpu avx2 avx512f"):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
        monkeypatch.setattr(environment, "_CPUINFO", tmp_path / "cpuinfo")
        folders.add(llama_environment().folder)
    assert len(folders) == 3


def test_amx_is_left_out_where_the_processor_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setenv("CXXFLAGS", "-g")
    for flags, expected in (
        ("fpu avx2", None),
        ("fpu avx2 amx_tile amx_int8", "-g -mno-amx-tile -mno-amx-int8 -mno-amx-bf16"),
    ):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
        assert llama_environment().variables.get("CXXFLAGS") == expected
