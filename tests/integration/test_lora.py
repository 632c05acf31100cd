"""LoRA adapters through the whole pair: greedy tokens are those of the merged checkpoints in transformers, in fp32."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import torch

from chairlift import Client, GenerationError
from frontend.cli import lora
from tests.hang import HANG_S
from tests.support.engine.adapters import save_adapter, save_merged
from tests.support.engine.checkpoints import save_checkpoint
from tests.support.engine.greedy import greedy_answers, random_prompts, save_word_tokenizer
from tests.support.pair import PairAddress, Processes, running_pair

PROMPT_LENS = (3, 33, 100)
NUM_TOKENS = 16
TOLERANCE = 1e-4
"""Of a log-probability, as in test_parity.py."""

BASE = "base"
ADAPTERS: dict[str, dict[str, Any]] = {
    "queries": {"seed": 1, "rank": 4, "targets": ("q_proj", "v_proj")},
    "all": {
        "seed": 2,
        "rank": 8,
        "targets": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    },
    "org/half": {"seed": 3, "rank": 2, "targets": ("down_proj",), "dtype": torch.bfloat16, "use_rslora": True},
}

Answer = tuple[list[int], list[float]]


@dataclass
class Served:
    """A model with adapters.

    Attributes:
        flags: of its engine.
        prompts: token ids.
        expected: name of a model -> answers of transformers to the prompts.
    """

    flags: tuple[str, ...]
    prompts: list[list[int]]
    expected: dict[str, list[Answer]]


def make_served(
    folder: Path, *, num_tokens: int = NUM_TOKENS, prompt_lens: tuple[int, ...] = PROMPT_LENS, **overrides: Any
) -> Served:
    model = folder / BASE
    save_checkpoint(model, "llama", seed=5, dtype="float32", max_shard_size="1GB", **overrides)
    save_word_tokenizer(model)
    prompts = random_prompts(prompt_lens)
    expected = {BASE: greedy_answers(model, prompts, num_tokens)}
    flags = ["--model", str(model), "--kv-cache-memory-bytes", "128M", "--max-num-batched-tokens", "96"]
    for name, options in ADAPTERS.items():
        adapter = save_adapter(folder / name, model, **options)
        merged = save_merged(folder / f"{name}-merged", model, adapter)
        expected[name] = greedy_answers(merged, prompts, num_tokens)
        flags += ["--lora", f"{name}={adapter}"]
    for index in range(len(prompts)):
        assert len({tuple(answers[index][0]) for answers in expected.values()}) == len(expected)
    return Served(tuple(flags), prompts, expected)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def pair(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairAddress]:
    with running_pair(tmp_path_factory.mktemp("pair"), *served.flags) as running:
        yield running


def assert_answer(client: Client, name: str, prompt: list[int], expected: Answer, **options: Any) -> int:
    """Checks the tokens and log-probabilities of an answer; returns how many prompt tokens were cached."""
    result = client.generate(
        token_ids=prompt,
        model=name,
        max_tokens=NUM_TOKENS,
        temperature=0,
        ignore_end_token=True,
        return_token_ids=True,
        top_logprobs=0,
        timeout_s=HANG_S,
        **options,
    )
    assert list(result.token_ids) == expected[0], name
    assert list(result.logprobs.chosen) == pytest.approx(expected[1], abs=TOLERANCE)
    return result.finished.usage.num_cached_tokens


def test_tokens_are_those_of_the_merged_checkpoints_solo_and_all_at_once(served: Served, pair: PairAddress) -> None:
    """The prompts are the same for all models: none takes the keys and values of another from the prefix cache."""
    cases = [
        (name, prompt, expected)
        for name, answers in served.expected.items()
        for prompt, expected in zip(served.prompts, answers, strict=True)
    ]
    with Client(pair.target) as client:
        for case in cases:
            assert assert_answer(client, *case) == 0
        with ThreadPoolExecutor(len(cases)) as threads:
            cached = list(threads.map(lambda case: assert_answer(client, *case), cases))
        for (_, prompt, _), num_cached in zip(cases, cached, strict=True):
            assert num_cached == (len(prompt) - 1) // 16 * 16
        assert_answer(client, "", served.prompts[0], served.expected[BASE][0])


def test_models_are_listed_with_their_adapters_and_others_are_not_found(served: Served, pair: PairAddress) -> None:
    with openai.OpenAI(base_url=pair.http_url, api_key="none", max_retries=0) as client:
        listed = [(model.id, model.parent) for model in client.models.list()]
        assert listed == [(BASE, None), *((name, BASE) for name in ADAPTERS)]
        assert client.models.retrieve("org/half").id == "org/half"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("half")
        request = {"prompt": served.prompts[1], "max_tokens": NUM_TOKENS, "temperature": 0}
        extra = {"return_token_ids": True, "ignore_eos": True}
        answer = client.completions.create(model="all", extra_body=extra, **request)
        assert answer.model == "all"
        assert answer.choices[0].token_ids == served.expected["all"][1][0]
        with pytest.raises(openai.NotFoundError, match="'base' and 'queries' and 'all' and 'org/half' are") as caught:
            client.completions.create(model="other", **request)
        assert caught.value.code == "model_not_found"
    with Client(pair.target) as client:
        assert list(client.get_model().adapters) == list(ADAPTERS)
        assert client.get_model("all").model == "all"
        with pytest.raises(GenerationError) as refused:
            client.generate("t5", model="other")
        assert refused.value.status is grpc.StatusCode.NOT_FOUND


def post(pair: PairAddress, path: str, body: dict[str, Any], key: str = "admin-key") -> tuple[int, str]:
    """Returns status and body of a request."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{pair.http_url}/{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def runtime_flags(folder: Path, served: Served) -> tuple[str, ...]:
    """Returns the flags of an engine that has no adapters at its start."""
    return (
        *served.flags[: served.flags.index("--lora")],
        *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "3", "--lora-dir", str(folder)),
    )


def test_adapters_are_loaded_and_unloaded_at_run_time(
    served: Served, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flags of the module's pair name the folders of its adapters."""
    folder = Path(served.flags[-1].partition("=")[2]).parents[1]
    frontend_flags = ("--allow-runtime-lora-updating", "--admin-api-key", "admin-key")
    with (
        running_pair(tmp_path, *runtime_flags(folder, served), frontend_flags=frontend_flags) as pair,
        Client(pair.target) as client,
    ):
        prompt = served.prompts[1]

        def expect(name: str, model: str) -> None:
            assert_answer(client, name, prompt, served.expected[model][1], cache_salt=f"{name} {model}")

        expect(BASE, BASE)
        body = {"lora_name": "tuned", "lora_path": "all"}
        assert post(pair, "load_lora_adapter", body, key="other")[0] == 401
        status, text = post(pair, "load_lora_adapter", body)
        assert (status, text) == (200, "Success: LoRA adapter 'tuned' added successfully.")
        assert list(client.get_model().adapters) == ["tuned"]
        expect("tuned", "all")
        expect(BASE, BASE)
        status, text = post(pair, "load_lora_adapter", body | {"lora_path": "queries"})
        assert (status, "'tuned' has already been loaded; set load_inplace" in text) == (400, True)
        assert post(pair, "load_lora_adapter", body | {"lora_path": "queries", "load_inplace": True})[0] == 200
        expect("tuned", "queries")
        assert (
            post(pair, "load_lora_adapter", {"lora_name": "org/half", "lora_path": str(folder / "org/half")})[0] == 200
        )
        expect("org/half", "org/half")
        for path, expected, problem in (
            ("missing", 404, "no such folder in those of --lora-dir"),
            ("/etc", 400, "is not in a folder of --lora-dir"),
            (BASE, 400, "adapter_config.json: no such file"),
        ):
            status, text = post(pair, "load_lora_adapter", {"lora_name": "bad", "lora_path": path})
            assert (status, problem in text) == (expected, True), text
        assert post(pair, "load_lora_adapter", {"lora_name": "bad"})[0] == 400
        status, text = post(pair, "unload_lora_adapter", {"lora_name": "tuned"})
        assert (status, text) == (200, "Success: LoRA adapter 'tuned' removed successfully.")
        assert post(pair, "unload_lora_adapter", {"lora_name": "tuned"})[0] == 404
        with pytest.raises(GenerationError) as refused:
            client.generate(token_ids=prompt, model="tuned", max_tokens=1)
        assert refused.value.status is grpc.StatusCode.NOT_FOUND
        expect("org/half", "org/half")
        with pytest.raises(GenerationError) as refused:  # no key for administration
            client.unload_adapter("org/half")
        assert refused.value.status is grpc.StatusCode.UNAUTHENTICATED
        monkeypatch.setenv("CHAIRLIFT_API_KEY", "admin-key")
        capfd.readouterr()
        for arguments, printed in (
            (("load", "again", "all"), "loaded again into 1 engine, digest "),
            (("list",), "org/half\nagain\n"),
            (("unload", "org/half"), "unloaded org/half from 1 engine\n"),
        ):
            assert lora.main([*arguments, "--target", pair.target]) == 0
            assert capfd.readouterr().out.startswith(printed)
        assert lora.main(["unload", "org/half", "--target", pair.target]) == 1
        assert "lora_name 'org/half' cannot be found" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("is_at_start", [True, False], ids=["at the start", "at run time"])
def test_an_answer_of_an_adapter_goes_on_in_another_engine(
    is_at_start: bool, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """An answer of minutes is computed when its engine is killed, whatever the machine does meanwhile."""
    num_compared = 200
    served = make_served(tmp_path, num_tokens=num_compared, prompt_lens=(17,), max_position_embeddings=200_000)
    processes, port = Processes(tmp_path), free_port()
    sockets = [tmp_path / f"{index}.sock" for index in range(2)]
    flags = served.flags if is_at_start else runtime_flags(tmp_path, served)
    engines = [processes.start("engine", *flags, "--uds", str(socket), "--threads", "1") for socket in sockets]
    addresses = [flag for socket in sockets for flag in ("--engine", f"unix:{socket}")]
    frontend = processes.start(
        "frontend", *addresses, "--port", str(port), "--no-http", "--allow-runtime-lora-updating"
    )
    deadline = time.monotonic() + HANG_S
    while processes.log(frontend).count("is serving") < len(engines):
        assert time.monotonic() < deadline, processes.log(frontend)
        time.sleep(0.05)  # another process's log
    killed = threading.Event()

    def answer(client: Client) -> list[int]:
        token_ids: list[int] = []
        stream = client.stream(
            token_ids=served.prompts[0],
            model="all",
            max_tokens=150_000,
            temperature=0,
            ignore_end_token=True,
            return_token_ids=True,
            timeout_s=2 * HANG_S,
        )
        for chunk in stream:
            assert chunk.first_token_index == len(token_ids)
            if not token_ids:
                started.release()
            token_ids += chunk.token_ids
            if (
                len(token_ids) >= num_compared
                and killed.is_set()
                and "moved to another engine" in processes.log(frontend)
            ):
                break
        stream.cancel()
        return token_ids

    started = threading.Semaphore(0)
    try:
        with Client(f"127.0.0.1:{port}") as client, ThreadPoolExecutor(2) as threads:
            if not is_at_start:
                assert client.load_adapter("all", "all").num_engines == len(engines)
            answers = [threads.submit(answer, client) for _ in engines]  # one in each engine
            for _ in answers:
                assert started.acquire(timeout=HANG_S)
            engines[0].kill()
            killed.set()
            for one in answers:
                assert one.result()[:num_compared] == served.expected["all"][0][0]
    finally:
        processes.stop()
