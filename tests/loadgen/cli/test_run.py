"""`chairlift-loadgen run`: what is said before anything is run, and what is left when something failed."""

import json
from pathlib import Path

import pytest

from loadgen.cli import run_options
from loadgen.cli.main import main
from loadgen.errors import TargetError
from loadgen.mock.behaviour import MockBehaviour
from loadgen.store import load
from loadgen.target.base import TargetSpec
from tests.support.loadgen.mock import mock_in_thread

_FLAGS = ["--num-prompts", "12", "--random-output-len", "5", "--request-rate", "100", "--result-dir", "out"]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_requests_over_the_context_are_counted_before_they_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    with mock_in_thread("grpc", MockBehaviour(ttft_s=0.01, itl_s=0.0, max_model_len=100)) as server:
        assert main(["run", "--target", server.url, *_FLAGS, "--random-input-len", "95,96"]) == 0
        seen = [request.num_asked for request in server.record.answered()]
    said = capsys.readouterr().err
    warning, *_ = said.splitlines()
    assert "longer than the server's context of 100 tokens (the longest has 101)" in warning
    assert "--max-model-len 100" in warning
    assert "--length-scale" not in warning  # drawn lengths are set by other flags
    assert said.index("warning") < said.index("starts in")
    assert len(seen) == 12


def test_a_server_that_is_not_there_leaves_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--target", "grpc://127.0.0.1:9", *_FLAGS]) == 2
    assert "no server answers at grpc://127.0.0.1:9" in capsys.readouterr().err
    assert not Path("out").exists()


def test_results_hold_no_password_of_a_url() -> None:
    with mock_in_thread("openai", MockBehaviour(ttft_s=0.01, itl_s=0.0)) as server:
        url = server.url.replace("://", "://user:hunter2@")
        assert main(["run", "--target", url, *_FLAGS, "--random-input-len", "5"]) == 0
    settings = load(Path("out")).settings
    assert settings["target"] == server.url
    assert server.url in settings["command"]
    assert not [path for path in Path("out").iterdir() if b"hunter2" in path.read_bytes()]


def test_a_tag_without_a_value_is_refused_before_anything_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    with mock_in_thread("grpc", MockBehaviour(ttft_s=0.01, itl_s=0.0)) as server:
        with pytest.raises(SystemExit, match="2"):
            main(["run", "--target", server.url, *_FLAGS, "--random-input-len", "5", "--tag", "gpu"])
        assert not server.record.answered()
    assert "--tag is gpu, it must be KEY=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--goodput", "ttft:100", "--slo", "ttft:5"), "--goodput gives ttft both 100.0 and 5.0; give one of them"),
        (("--tag", "gpu=a", "--tag", "gpu=b"), "--tag gives gpu both a and b; give one of them"),
    ],
)
def test_two_values_of_one_name_are_refused_before_anything_is_run(
    flags: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *_FLAGS, *flags]) == 2
    assert complaint in capsys.readouterr().err


def test_more_requests_than_fit_into_memory_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--num-prompts", "10G", "--dry-run"])
    assert "--num-prompts is 10G, it must be a whole number between 1 and 5000000" in capsys.readouterr().err


def test_the_run_is_kept_if_the_servers_metrics_are_gone_after_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["up 1\n", TargetError("--metrics-url: Connection refused")])

    def read(url: str, spec: TargetSpec) -> str:
        answer = next(answers)
        if isinstance(answer, TargetError):
            raise answer
        return answer

    monkeypatch.setattr(run_options, "read_server_metrics", read)
    with mock_in_thread("grpc", MockBehaviour(ttft_s=0.01, itl_s=0.0)) as server:
        flags = ["--target", server.url, "--metrics-url", "http://127.0.0.1:9/metrics", "--tag", "gpu=none"]
        assert main(["run", *flags, *_FLAGS, "--random-input-len", "5"]) == 0
    result = json.loads(Path("out/result.json").read_text())
    assert result["completed"] == 12
    assert result["server_metrics"] == {"before": "up 1\n", "after": "# not read: --metrics-url: Connection refused\n"}
    assert "no metrics of the server after the run" in capsys.readouterr().err


def test_the_variable_of_chairlift_names_the_target(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with mock_in_thread("grpc", MockBehaviour(ttft_s=0.01, itl_s=0.0)) as server:
        monkeypatch.setenv("CHAIRLIFT_TARGET", server.url.removeprefix("grpc://"))
        assert main(["run", *_FLAGS, "--random-input-len", "5"]) == 0
        assert len(server.record.answered()) == 12
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        ("127.0.0.1:50051", "; did you mean grpc://127.0.0.1:50051?"),
        ("unix:/run/a.sock", "; did you mean grpc+unix:/run/a.sock?"),
        ("ftp://there", ""),
    ],
)
def test_target_without_a_scheme_is_refused_with_the_one_meant(
    target: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--num-prompts", "1", "--random-input-len", "8", "--random-output-len", "4"]
    assert main(["run", "--target", target, *flags]) != 0
    assert capsys.readouterr().err.strip().endswith(f"grpc+unix:, http:, https:, null:{meant}")


def test_targets_of_every_request_are_judged_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with mock_in_thread("grpc", MockBehaviour(ttft_s=0.01, itl_s=0.0)) as server:
        flags = ["--random-input-len", "5", "--target-ttft", "60s", "--target-itl", "1ms"]
        assert main(["run", "--target", server.url, *_FLAGS, *flags]) == 0
    said = capsys.readouterr().out
    assert "Goodput by class" in said
    assert next(line.split()[1] for line in said.splitlines() if line.startswith("all ")) == "12"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target", "ftp://h:1"], "--target ftp://h:1: must begin with"),
        (
            ["--target", "grpc://h:1", "--api", "chat"],
            "target 'grpc://h:1' is no address for --api chat, which takes http: or https:",
        ),
        (
            ["--max-concurrency", "8", "--concurrency", "4"],
            "--concurrency 4 makes a closed loop, --max-concurrency 8 limits",
        ),
        (["--target", "http://h:1/v1", "--api", "chat", "--prompt-mode", "ids"], "the chat API takes no token ids"),
        (["--tls-cert", "x.pem"], "--tls-cert and --tls-key belong together"),
        (["--max-retries", "1"], "--max-retries needs targets"),
    ],
)
def test_contradictions_are_refused_before_anything_is_printed(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--num-prompts", "12", "--dry-run", *flags]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-retries", "1"], "--max-retries needs targets"),
        (["--mix", "a=1"], "--mix needs --service-classes"),
        (["--service-classes", "none.toml"], "none.toml: No such file"),
        (["--service-classes", "classes.toml", "--target-ttft", "1s"], "give one of them"),
        (["--service-classes", "classes.toml", "--mix", "b=1"], "--mix names class 'b'; the file has a"),
    ],
)
def test_flags_of_targets_are_checked(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("classes.toml").write_text("[classes.a]\nttft_ms = 100\n")
    assert main(["run", "--target", "null:", *_FLAGS, "--random-input-len", "5", *flags]) == 2
    assert message in capsys.readouterr().err
