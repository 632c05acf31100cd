"""Every command of the documentation does what a reader expects of it."""

import re
import shutil
import subprocess

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.docs.pages import PAGES, ROOT, Command, all_commands
from tests.docs.programs import accepts, calls
from tests.docs.proofs import PROOFS, How, proof_of
from tests.docs.reader import Reader, is_served
from tests.hang import HANG_S, START_HANG_S

pytestmark = pytest.mark.timeout(2 * START_HANG_S)  # both programs start first

COMMANDS = all_commands()


SERVED = ("chairlift-engine", "chairlift-frontend")  # by the fixture `servers`, with README's commands
QUICK = {
    command.words[0]: command
    for command in reversed(COMMANDS)
    if command.page == "README.md" and command.words[0] not in SERVED
}.values()
"""README's first command of each other program: `make test` runs these, `make test-slow` the rest."""


def proven(*ways: How) -> pytest.MarkDecorator:
    """The commands proven in one of these ways."""
    chosen = [command for command in COMMANDS if (proof := proof_of(command)) is not None and proof.how in ways]
    is_long = {How.RUN, How.SERVE} & set(ways)
    params = [
        pytest.param(command, marks=[pytest.mark.slow] if is_long and command not in QUICK else [])
        for command in chosen
    ]
    return pytest.mark.parametrize("command", params, ids=str)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_the_table_says_how_it_is_proven(command: Command) -> None:
    assert proof_of(command) is not None, "a new kind of command: give it a row in tests/docs/proofs.py"


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.pattern)
def test_no_row_of_the_table_is_left_over(proof) -> None:
    assert any(proof_of(command) is proof for command in COMMANDS)
    assert bool(proof.because) == (proof.how in (How.PARSE, How.ELSEWHERE))
    for path in re.findall(r"tests/[\w/.]*\w", proof.because):
        assert (ROOT / path).exists(), path


def test_the_pages_are_all_there() -> None:
    assert {"README.md", "docs/api.md", "docs/clients/README.md"} <= set(PAGES)
    assert len(COMMANDS) > 50


@proven(How.RUN)
@pytest.mark.usefixtures("certificates")
def test_runs(command: Command, reader: Reader) -> None:
    program = command.words[0]
    if shutil.which(program, path=reader.environment()["PATH"]) is None:
        pytest.skip(f"needs {program}")
    proof = proof_of(command)
    assert proof is not None
    done = reader.run(command)
    assert done.returncode == 0, done.stderr + done.stdout
    assert re.search(proof.says, done.stdout + done.stderr), done.stdout + done.stderr
    for line in command.output.splitlines():
        assert re.search(shape(line), done.stdout), f"{line!r} is not in\n{done.stdout}"


def shape(line: str) -> str:
    """What lines look like that say the same of other numbers, with another verdict."""
    if line.strip() == "...":
        return ""
    text = re.sub(r"(\\ )+", r"\\s+", re.escape(line.strip()))
    text = re.sub(r"\d+(,\d{3})*(\\\.\d+)?", r"[\\d,.]+", text)
    return re.sub(r"^VALID:.*", "(VALID|DEGRADED|INVALID): ", text)


@proven(How.SERVE)
@pytest.mark.usefixtures("certificates")
def test_serves(command: Command, reader: Reader) -> None:
    proof = proof_of(command)
    assert proof is not None
    same = command.plain.removesuffix(" &")
    if same not in reader.served:
        reader.served[same] = serve_and_stop(command, proof.says, reader)
    for line in command.output.splitlines():
        assert re.search(shape(line), reader.served[same]), reader.served[same]


def serve_and_stop(command: Command, says: str, reader: Reader) -> str:
    """Returns what it printed."""
    by_make = command.words[0] == "make"
    with reader.serve(command) as server:
        if command.words[0] == "chairlift-engine":
            address = server.wait_for(r"serving on (\S+),")[1]
            health = reader.shell(f"chairlift health --engine {address}", reader.environment())
            assert health.returncode == 0, health.stderr
        elif "tls" not in command.text and "mock-server" not in command.text:
            assert is_served(f"127.0.0.1:{server.ports['50051']}")
        server.wait_for(says)
        assert server.stop() in ((0, -15, 2) if by_make else (0,)), server.output  # make says how it was ended
        if by_make:
            server.wait_for(r"(?m)^drained \d")
        return server.output


PARSED = [
    command
    for command in COMMANDS
    if (proof := proof_of(command)) is not None
    and (
        proof.how is How.PARSE
        or (command.words[0].startswith(("chairlift", "make")) and proof.how is not How.ELSEWHERE)
    )
]


@pytest.mark.parametrize("command", PARSED, ids=str)
def test_is_taken_by_the_program_it_is_for(command: Command) -> None:
    accepts([word for word in command.words if word != "&"])


@proven(How.CALL)
def test_calls(command: Command, reader: Reader) -> None:
    """The server's reflection, which grpcurl reads, says what is called, and takes the message."""
    ((name, message),) = calls(command.words)
    with grpc.insecure_channel(reader.target) as channel:
        pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        service_name, _, method_name = name.partition("/")
        service = pool.FindServiceByName(service_name)
        if message is None:
            assert [method.name for method in service.methods]
            return
        method = service.FindMethodByName(method_name)
        request = json_format.ParseDict(message, message_factory.GetMessageClass(method.input_type)())
        answer_class = message_factory.GetMessageClass(method.output_type)
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        call = make(
            f"/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer_class.FromString,
        )
        answers = list(call(request, timeout=HANG_S)) if method.server_streaming else [call(request, timeout=HANG_S)]
        assert len(answers) >= 1
    if shutil.which("grpcurl"):
        done = subprocess.run(["bash", "-c", reader.translate(command.text)], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
