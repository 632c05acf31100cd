"""Requests with grammars: each ends exactly once, whatever happens during compilation, and others do not wait."""

import asyncio
import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.constraints.grammar import GrammarMatcher
from engine.demo import MODEL_DIR
from engine.interfaces import Inbox
from engine.model.tokenizer_files import TokenizerFiles
from engine.serving.convert import RequestLimits
from engine.serving.matcher_compiler import MatcherCompiler
from engine.serving.outgoing import Outgoing
from engine.serving.session import Session, SessionContext
from tests.hang import HANG_S
from tests.support.engine.client import AttachClient, submission
from tests.support.engine.fake_engine import fake_engine_parts, run_engine
from tests.support.engine.fake_model import FakeModel

MODEL = FakeModel(vocab_size=3072, end_token_ids=frozenset({1}), end_probability=0.0)
GRAMMAR = 'start: "yes" | "no"'


@pytest.fixture
async def server():
    files = TokenizerFiles.from_dir(MODEL_DIR)
    grammars = MatcherCompiler(files, MODEL.vocab_size, MODEL.end_token_ids)
    parts = replace(fake_engine_parts(model=MODEL, max_waiting=8), tokenizer=files, grammars=grammars)
    async with run_engine(parts) as server:
        yield server


@pytest.fixture
async def client(server):
    async with AttachClient.open(server.address) as client:
        yield client


class Compiling:
    """Blocks the compilation of grammars until `finish`."""

    def __init__(self):
        self.has_begun = threading.Event()
        self._may_end = threading.Event()

    async def begun(self):
        assert await asyncio.to_thread(self.has_begun.wait, 30)

    def finish(self):
        self._may_end.set()

    def __call__(self, grammar, tokenizer):
        self.has_begun.set()
        assert self._may_end.wait(HANG_S)
        return self._compile(grammar, tokenizer)

    _compile = staticmethod(GrammarMatcher.compile)


@pytest.fixture
def compiling(monkeypatch):
    compiling = Compiling()
    monkeypatch.setattr(GrammarMatcher, "compile", compiling)
    yield compiling
    compiling.finish()


async def test_a_request_with_a_grammar_is_served(client):
    """The fake model ignores masks; this tests the path of the request."""
    (answer,) = await client.generate(submission(1, [5], 10, grammar=GRAMMAR))
    assert answer.completion.reason == pb.COMPLETION_REASON_MAX_TOKENS
    assert len(answer.token_ids) == 10


async def test_credit_reaches_a_request_with_a_grammar_while_it_runs(client):
    await client.submit(submission(1, [5], 6, grammar=GRAMMAR, token_credit=2))
    await client.until(lambda: len(client.received[1].token_ids) == 2)
    await client.grant(1, 2)
    await client.until(lambda: len(client.received[1].token_ids) == 4)
    await client.cancel(1)
    (answer,) = await client.ended(1)
    assert answer.completion.reason == pb.COMPLETION_REASON_CANCELLED
    assert answer.completion.num_output_tokens == 4


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"grammar": "start: nothing"}, 'unknown name: "nothing"'),
        ({"grammar": GRAMMAR, "output_ids": [2999]}, "after 1 output_ids"),
        ({"grammar": "x" * 300_000}, "300000 characters"),
    ],
)
async def test_a_bad_grammar_rejects_only_its_request(client, fields, detail):
    bad, good = await client.generate(submission(1, [5], **fields), submission(2, [5], 3))
    assert bad.rejection.reason == pb.REJECTION_REASON_INVALID
    assert bad.rejection.detail.startswith("grammar")
    assert detail in bad.rejection.detail
    assert len(good.token_ids) == 3
    (again,) = await client.generate(submission(1, [5], 2))
    assert len(again.token_ids) == 2


async def test_a_missing_compile_thread_rejects_only_the_request(client, monkeypatch):
    """Their stacks are large: a host that promises no more memory than it has may deny them."""

    def no_thread(executor):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "_adjust_thread_count", no_thread)
        bad, good = await client.generate(submission(1, [5], 3, grammar=GRAMMAR), submission(2, [5], 3))
    assert bad.rejection.reason == pb.REJECTION_REASON_QUEUE_FULL
    assert "can't start new thread" in bad.rejection.detail
    assert len(good.token_ids) == 3
    (again,) = await client.generate(submission(1, [5], 3, grammar=GRAMMAR))
    assert len(again.token_ids) == 3


async def test_other_requests_do_not_wait_for_a_grammar(client, compiling):
    await client.submit(submission(1, [5], 3, grammar=GRAMMAR), submission(2, [6], 3))
    await compiling.begun()
    await client.ended(2)
    await client.generate(submission(3, [7], 3))
    assert not client.received[1].is_accepted
    compiling.finish()
    (answer,) = await client.ended(1)
    assert len(answer.token_ids) == 3


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (pb.CANCEL_REASON_CLIENT, pb.COMPLETION_REASON_CANCELLED),
        (pb.CANCEL_REASON_DEADLINE, pb.COMPLETION_REASON_DEADLINE),
    ],
)
async def test_a_request_may_be_cancelled_while_its_grammar_is_compiled(client, compiling, reason, expected, caplog):
    await client.submit(submission(1, [5, 6], 3, grammar=GRAMMAR, output_ids=[9]))
    await compiling.begun()
    await client.cancel(1, 1, reason=reason)
    await client.cancel(1)
    (answer,) = await client.ended(1)
    assert answer.completion.reason == expected
    assert (answer.completion.num_prompt_tokens, answer.completion.num_output_tokens) == (2, 1)
    (again,) = await client.generate(submission(1, [5], 3, epoch=1))
    compiling.finish()
    (last,) = await client.generate(submission(1, [5], 3, epoch=2, grammar=GRAMMAR))
    assert len(again.token_ids) == len(last.token_ids) == 3
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_credit_granted_while_a_grammar_is_compiled_counts(client, compiling):
    await client.submit(submission(1, [5], 50, grammar=GRAMMAR, token_credit=2))
    await compiling.begun()
    await client.grant(1, 3)
    await client.grant(1, 1)
    await client.generate(submission(2, [5], 3))  # the engine has read both
    compiling.finish()
    await client.until(lambda: len(client.received[1].token_ids) == 6)
    await client.generate(submission(2, [5], 20))
    assert len(client.received[1].token_ids) == 6


async def test_a_handle_is_in_use_while_its_grammar_is_compiled(client, compiling):
    await client.submit(submission(1, [5], 3, grammar=GRAMMAR))
    await client.submit(submission(1, [5], 3, epoch=7))
    await client.until(lambda: client.rejections)
    assert "in use" in client.rejections[0].detail
    compiling.finish()
    (answer,) = await client.ended(1)
    assert len(answer.token_ids) == 3


async def test_requests_whose_grammars_are_compiled_count_as_open(client, compiling):
    """Eight may wait and sixteen run."""
    await client.submit(*(submission(handle, [5], 3, grammar=GRAMMAR) for handle in range(1, 26)))
    (refused,) = await client.ended(25)
    assert refused.rejection.reason == pb.REJECTION_REASON_QUEUE_FULL
    compiling.finish()
    answers = await client.ended(*range(1, 25))
    assert all(answer.has_ended for answer in answers)


async def test_a_frontend_may_disconnect_while_its_grammar_is_compiled(server, client, compiling):
    async with AttachClient.open(server.address) as leaver:
        await leaver.submit(submission(1, [5], 3, grammar=GRAMMAR))
        await compiling.begun()
        await leaver.hang_up()
        with pytest.raises(EOFError):
            await leaver.until(lambda: False)
    compiling.finish()
    (answer,) = await client.generate(submission(1, [5], 3, grammar=GRAMMAR))
    assert len(answer.token_ids) == 3
    assert client.steps[-1].load.num_generated_tokens_total == 3


async def test_draining_rejects_requests_whose_grammar_is_compiled(server, client, compiling):
    await client.submit(submission(1, [5], 3, grammar=GRAMMAR))
    await compiling.begun()
    server.engine.drain(5.0)
    (refused,) = await client.ended(1)
    compiling.finish()
    assert refused.rejection.reason == pb.REJECTION_REASON_DRAINING


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"remaining_ms": 1}, pb.COMPLETION_REASON_DEADLINE),
        ({"stops": pb.TokenStops(time_budget_ms=1)}, pb.COMPLETION_REASON_TIME_BUDGET),
    ],
)
async def test_a_deadline_does_not_wait_for_a_grammar(client, compiling, fields, expected):
    """Grammars of other requests occupy both threads."""
    await client.submit(*(submission(handle, [5], 3, grammar=GRAMMAR) for handle in (1, 2)))
    await client.submit(submission(3, [5, 6], 3, grammar=GRAMMAR, output_ids=[9], **fields))
    (answer,) = await client.ended(3)
    assert answer.is_accepted
    assert answer.completion.reason == expected
    assert (answer.completion.num_prompt_tokens, answer.completion.num_output_tokens) == (2, 1)
    assert answer.completion.queued_us >= 1000
    compiling.finish()
    assert [len(other.token_ids) for other in await client.ended(1, 2)] == [3, 3]


async def test_a_deadline_at_the_same_time_as_a_cancel_ends_a_request_once():
    """Both in one turn of the event loop, the cancel first."""
    defects = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: defects.append(context))
    sessions = {}
    grammars = SimpleNamespace(compile=lambda grammar, build: Future())
    context = SessionContext(Inbox(), RequestLimits(3072, 5), 8, itertools.count(1), {}, grammars, sessions, None)
    session = sessions["one"] = Session("one", context, Outgoing(), 0, 1)
    late = submission(1, [5], 3, grammar=GRAMMAR, remaining_ms=0)
    session.handle(pb.AttachRequest(command_seq=1, submit=pb.SubmitBatch(submissions=[late])))
    loop.call_soon(session.handle, pb.AttachRequest(command_seq=2, cancel=pb.CancelBatch(handles=[1])))
    message = await session.outgoing.next_message()
    assert [each.reason for each in message.step.completions] == [pb.COMPLETION_REASON_CANCELLED]
    session.outgoing.close(linger_s=0)
    assert await session.outgoing.next_message() is None
    assert not defects
