"""Tests of `GrammarCompiler` with real worker processes."""

import asyncio
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import tokenizers

from chairlift.service.structured.output_constraint import ConstraintKind, OutputConstraint
from frontend.errors import InvalidRequest, QueueFull, ServerDraining, WorkerUnavailable
from frontend.text.isolated.child import ChildProcess
from frontend.text.isolated.process import JobLimits
from frontend.text.structured.compiler import MAX_WAITING, GrammarCompiler
from frontend.text.tokenizer import Tokenizer
from tests.hang import HANG_S

FIELD = "spec.structured_output.json_schema"
ENDLESS = {"type": "integer", "multipleOf": 1_000_003}
"""Compiling it takes seconds and hundreds of megabytes: its automaton has a state for every remainder."""


def schema(value) -> OutputConstraint:
    return OutputConstraint(ConstraintKind.JSON_SCHEMA, json.dumps(value), FIELD)


def unchecked(value) -> OutputConstraint:
    """A schema in a grammar, which the rules for schemas do not see."""
    return OutputConstraint(ConstraintKind.GRAMMAR, f"start: %json {json.dumps(value)}", FIELD)


def good(number: int = 0) -> OutputConstraint:
    return schema({"const": number})


@pytest.fixture
async def make_compiler():
    compilers = []

    def make(timeout_s=20.0, memory_bytes=1 << 30):
        compilers.append(GrammarCompiler(JobLimits(timeout_s, memory_bytes)))
        return compilers[-1]

    yield make
    for compiler in compilers:
        await compiler.stop()
        assert len(compiler._jobs) == 0
    assert not worker_ids(), "workers still run"


def worker_ids() -> set[int]:
    """Returns the process ids of this process's workers, from /proc."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parent = (status.parent / "stat").read_text().rpartition(")")[2].split()[1]
            if b"frontend.text.structured.worker" in status.read_bytes() and int(parent) == _own_id():
                found.add(int(status.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _own_id() -> int:
    return int(Path("/proc/self").resolve().name)


async def refusal(compiler, constraint, model) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await compiler.compile(constraint, model)
    assert caught.value.field == constraint.field
    return caught.value.message


async def test_grammar_is_compiled_and_the_first_request_starts_a_worker(make_compiler, model):
    compiler = make_compiler()
    assert not worker_ids()
    grammar = json.loads(await compiler.compile(good(7), model))
    assert grammar["grammars"][0]["json_schema"]["const"] == 7
    assert len(worker_ids()) == 1
    await compiler.compile(good(8), model)
    assert len(worker_ids()) == 1, "the idle worker was not used"


async def test_an_end_token_beyond_the_vocabulary_costs_no_grammar(make_compiler, model):
    """A generation_config.json may name more than the model has."""
    model = dataclasses.replace(model, end_token_ids=(*model.end_token_ids, 10 * model.vocab_size))
    assert await make_compiler().compile(good(), model)


async def test_worker_ignores_a_folder_named_frontend_in_the_current_directory(
    make_compiler, model, tmp_path, monkeypatch
):
    package = tmp_path / "frontend"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    assert await make_compiler().compile(good(), model)


async def test_tokenizer_is_serialized_once_for_all_workers(make_compiler, model, monkeypatch):
    written = []
    to_json = Tokenizer.to_json
    monkeypatch.setattr(Tokenizer, "to_json", lambda tokenizer: written.append(1) or to_json(tokenizer))
    compiler = make_compiler()
    await compiler.compile(good(1), model)
    compiler._pool._idle[0].process._process.kill()
    await compiler._pool._idle[0].process._process.wait()
    await compiler.compile(good(2), model)
    assert written == [1]


async def test_refusal_names_field_and_cause_and_is_cached_and_keeps_the_worker(make_compiler, model, monkeypatch):
    compiler = make_compiler()
    message = await refusal(compiler, schema({"not": {"type": "null"}}), model)
    assert message == "json_schema cannot be served: cannot enforce a schema with not"
    before = worker_ids()
    await compiler.compile(good(), model)
    assert worker_ids() == before
    monkeypatch.setattr(compiler, "_compiled", None)  # only the cache can answer
    assert await refusal(compiler, schema({"not": {"type": "null"}}), model) == message


async def test_schema_that_takes_too_long_ends_its_worker_and_the_refusal_is_cached(make_compiler, model, monkeypatch):
    monkeypatch.setattr("frontend.text.isolated.process._LATE_S", 10 * HANG_S)  # the worker must end itself
    compiler = make_compiler(timeout_s=0.5)
    await compiler.compile(good(), model)
    (before,) = worker_ids()
    async with asyncio.timeout(HANG_S):
        message = await refusal(compiler, unchecked(ENDLESS), model)
    assert "takes more than 0.5 s" in message
    assert before not in worker_ids()
    await compiler.compile(good(1), model)
    monkeypatch.setattr(compiler, "_compiled", None)  # only the cache can answer
    assert await refusal(compiler, unchecked(ENDLESS), model) == message


async def test_worker_that_does_not_end_itself_is_killed(make_compiler, model, monkeypatch):
    monkeypatch.setattr("frontend.text.isolated.process._LATE_S", -1.0)
    compiler = make_compiler(timeout_s=1.1)
    assert "takes more than 1.1 s" in await refusal(compiler, unchecked(ENDLESS), model)
    assert not worker_ids()


async def test_schema_that_takes_too_much_memory_is_refused(make_compiler, model):
    compiler = make_compiler(memory_bytes=32 << 20)
    assert "takes more than 32 MiB of memory" in await refusal(compiler, unchecked(ENDLESS), model)
    await compiler.compile(good(), model)


async def test_schema_that_crashes_the_library_is_refused(make_compiler, model):
    compiler = make_compiler()
    crashing = unchecked({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)})  # llguidance 1.9.1: SIGSEGV
    assert "ends its process (status -11)" in await refusal(compiler, crashing, model)
    await compiler.compile(good(), model)


async def test_structured_output_is_refused_if_the_models_tokens_are_not_bytes(make_compiler, model):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}))
    tokenizer = Tokenizer({"tokenizer.json": words.to_str().encode()})
    odd = dataclasses.replace(model, tokenizer=tokenizer, vocab_size=2, end_token_ids=(1,))
    assert "tokenizer cannot be used" in await refusal(make_compiler(), good(), odd)
    tokenizer.close()


async def test_other_requests_are_served_while_one_worker_is_busy(make_compiler, model):
    compiler = make_compiler()
    await compiler.compile(good(), model)
    (busy,) = worker_ids()
    os.kill(busy, signal.SIGSTOP)
    slow = asyncio.create_task(compiler.compile(good(100), model))
    while compiler._pool._idle:  # until it has this worker
        await asyncio.sleep(0)
    for number in range(1, 6):
        await compiler.compile(good(number), model)
    assert len(worker_ids()) == 2
    assert not slow.done()
    os.kill(busy, signal.SIGCONT)
    assert await slow


async def test_worker_that_was_killed_while_idle_is_replaced(make_compiler, model):
    compiler = make_compiler()
    await compiler.compile(good(), model)
    (before,) = worker_ids()
    compiler._pool._idle[0].process._process.kill()
    await compiler._pool._idle[0].process._process.wait()
    await compiler.compile(good(1), model)
    assert worker_ids() not in (set(), {before})


async def test_worker_that_is_killed_while_it_starts_refuses_only_the_requests_that_wait(
    make_compiler, model, monkeypatch
):
    async def start_and_kill(command):
        process = await start(command)
        process.kill()
        return process

    start, compiler = ChildProcess.start, make_compiler()
    monkeypatch.setattr(ChildProcess, "start", start_and_kill)
    outcomes = await asyncio.gather(*(compiler.compile(good(), model) for _ in range(2)), return_exceptions=True)
    assert [type(error) for error in outcomes] == [WorkerUnavailable] * 2
    monkeypatch.undo()
    assert await compiler.compile(good(), model)


async def test_signals_to_the_process_group_end_no_worker(make_compiler, model):
    """Draining requests still need grammars; the frontend ends the workers itself."""
    compiler = make_compiler()
    await compiler.compile(good(), model)
    before = worker_ids()
    for number in (signal.SIGTERM, signal.SIGINT):
        compiler._pool._idle[0].process._process.send_signal(number)
    await compiler.compile(good(1), model)
    assert worker_ids() == before


async def test_equal_schemas_are_compiled_once_and_cached(make_compiler, model):
    compiler = make_compiler()
    first = [asyncio.create_task(compiler.compile(good(), model)) for _ in range(20)]
    await asyncio.sleep(0)
    assert len(compiler._jobs) == 1
    assert len(set(await asyncio.gather(*first))) == 1
    compiler._pool._idle[0].process._process.kill()  # only the cache can answer
    assert await compiler.compile(good(), model) == first[0].result()


async def test_another_model_gets_its_own_workers(make_compiler, model):
    compiler = make_compiler()
    await compiler.compile(good(), model)
    (before,) = worker_ids()
    await compiler.compile(good(), dataclasses.replace(model, end_token_ids=(255,)))
    assert worker_ids() not in (set(), {before})


async def test_requests_beyond_the_queue_limit_are_refused(make_compiler, model):
    compiler = make_compiler()
    tasks = [asyncio.create_task(compiler.compile(good(number), model)) for number in range(MAX_WAITING + 2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull) as caught:
        await compiler.compile(good(-1), model)
    assert caught.value.retry_after_s == 20
    joined = asyncio.create_task(compiler.compile(good(3), model))  # joins a job that is queued already
    await asyncio.gather(*tasks, joined)
    await compiler.compile(good(-1), model)


async def test_job_without_waiting_requests_is_not_started(make_compiler, model):
    compiler = make_compiler()
    slow = [asyncio.create_task(compiler.compile(unchecked({**ENDLESS, "title": str(i)}), model)) for i in range(2)]
    waiting = asyncio.create_task(compiler.compile(good(), model))
    while not all(job.has_begun for job in list(compiler._jobs.values())[:2]) or len(compiler._jobs) < 3:
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert len(compiler._jobs) == 2
    again = asyncio.create_task(compiler.compile(good(), model))  # not cancelled with the first request
    await asyncio.sleep(0)
    assert len(compiler._jobs) == 3
    for task in (*slow, again):
        task.cancel()
    await asyncio.gather(*slow, again, return_exceptions=True)


async def test_request_does_not_join_a_job_that_was_cancelled(make_compiler, model):
    """However many turns of the event loop lie between the cancellation and the next request for the same grammar."""
    compiler = make_compiler()
    await asyncio.gather(compiler.compile(good(100), model), compiler.compile(good(101), model))
    workers = worker_ids()
    assert len(workers) == 2
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    tasks = [asyncio.create_task(compiler.compile(good(number), model)) for number in (102, 103)]
    while compiler._pool._idle:
        await asyncio.sleep(0)
    for num_turns in range(5):
        cancelled = asyncio.create_task(compiler.compile(good(num_turns), model))
        while len(compiler._jobs) < len(tasks) + 1:
            await asyncio.sleep(0)
        cancelled.cancel()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        tasks.append(asyncio.create_task(compiler.compile(good(num_turns), model)))
        await asyncio.sleep(0)
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    assert all(await asyncio.gather(*tasks))


async def test_cancelled_request_does_not_cancel_others_for_the_same_grammar(make_compiler, model):
    compiler = make_compiler()
    tasks = [asyncio.create_task(compiler.compile(good(), model)) for _ in range(2)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert await tasks[1]


async def test_stop_fails_waiting_requests(make_compiler, model):
    compiler = make_compiler()
    waiting = asyncio.create_task(compiler.compile(unchecked(ENDLESS), model))
    while not worker_ids():
        await asyncio.sleep(0)
    await compiler.stop()
    with pytest.raises(ServerDraining):
        await waiting
