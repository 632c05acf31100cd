import pytest

from loadgen.errors import TargetError
from loadgen.target.base import Api, PromptMode, TargetSpec
from loadgen.target.open import check_spec


@pytest.mark.parametrize(
    ("url", "api", "mode"),
    [
        ("grpc://host:50051", "grpc", "ids"),
        ("grpc+unix:/run/chairlift.sock", "grpc", "text"),
        ("http://host:8000/v1", "completions", "ids"),
        ("https://host/v1", "chat", "text"),
        ("null:", "null", "ids"),
    ],
)
def test_these_belong_together(url: str, api: Api, mode: PromptMode) -> None:
    check_spec(TargetSpec(url, api, prompt_mode=mode))


@pytest.mark.parametrize(
    ("url", "api", "mode", "complaint"),
    [
        ("http://host:8000/v1", "grpc", "ids", "no address for --api grpc, which takes grpc: or"),
        ("localhost:50051", "grpc", "ids", "no address for --api grpc"),
        ("grpc://host:50051", "chat", "text", "takes http: or https:"),
        ("http:///v1", "completions", "ids", "names no host"),
        ("grpc+unix:", "grpc", "ids", "names no host"),
        ("http://host/v1", "chat", "ids", "--prompt-mode text"),
        ("http://[::1/v1", "completions", "ids", r"target 'http://\[::1/v1': Invalid IPv6 URL"),
    ],
)
def test_these_do_not(url: str, api: Api, mode: PromptMode, complaint: str) -> None:
    with pytest.raises(TargetError, match=complaint):
        check_spec(TargetSpec(url, api, prompt_mode=mode))


def test_a_request_has_time() -> None:
    with pytest.raises(TargetError, match="--timeout 0: must be above 0 seconds"):
        check_spec(TargetSpec("null:", "null", timeout_s=0.0))
