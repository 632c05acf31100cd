"""What proves each command of the pages: the one table. The first row whose pattern begins a command counts.

A command that no row knows fails the tests, and so does a row that no command needs. `RUN` and `SERVE` do what a reader
would do; the others say in `because` why that cannot be done here, and which test does it instead.
"""

import re
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache

from tests.docs.pages import Command


class How(Enum):
    RUN = auto()  # ends with status 0 and says what it should
    SERVE = auto()  # says that it serves, serves, and ends well on SIGTERM
    CALL = auto()  # grpcurl's method and message are sent by gRPC's own library, so that grpcurl need not be here
    PARSE = auto()  # the program that it is for takes its whole command line; nothing more happens
    ELSEWHERE = auto()  # no program of ours: `because` says who does it


@dataclass(frozen=True)
class Proof:
    """How commands that begin with `pattern` are proven.

    Attributes:
        says: what their output must have.
        shorter: (text, text in its place), so that it takes seconds.
        after: pattern of the command on this page that must have run before.
        beside: pattern of the command on this page that must serve meanwhile.
        given: shell commands that bring about what the page takes for granted.
        because: why it is not run; tests named there must exist.
    """

    pattern: str
    how: How
    says: str = r"\S"
    shorter: tuple[tuple[str, str], ...] = ()
    after: str = ""
    beside: str = ""
    given: str = ""
    because: str = ""


_FEW = (
    ("--num-prompts 200", "--num-prompts 12"),
    ("--num-prompts 300", "--num-prompts 20"),
    ("--request-rate 8 ", "--request-rate 40 "),
)
_TLS_SERVER = r"chairlift-frontend --host 0\.0\.0\.0 --tls-cert"
_MOCK = r"chairlift-loadgen mock-server"
_MOCK_RUN = r"chairlift-loadgen run --target http://127\.0\.0\.1:8013"
_VERDICT = r"(VALID|DEGRADED|INVALID)"  # how busy this machine is decides

PROOFS = [
    Proof(r"make run( &)?$", How.SERVE, says=r"(?s)Smoke test\..{200,}Serving; Ctrl-C"),
    Proof(r"make run MODEL=/path/to/checkpoint", How.SERVE),
    Proof(
        r"make run MODEL=/path/to/model-Q4_K_M\.gguf",
        How.PARSE,
        because="no such file comes with the project: tests/integration/test_gguf.py serves one with random weights",
    ),
    Proof(
        r"make run MODEL=\w",
        How.PARSE,
        because="fetched from the hub: tests/engine/model/test_hub.py does so from a fake hub",
    ),
    Proof(r"make run ARGS=", How.SERVE),
    Proof(
        r"make (test|test-slow|mutants|lint|types|stubs|compose-check|chart-check)\b", How.PARSE, because="runs tests"
    ),
    Proof(
        r"make bench-(batching|hf)\b",
        How.PARSE,
        because="minutes: tests/loadgen/experiments/batching, tests/engine/bench",
    ),
    Proof(r"make gpu-check\b", How.PARSE, because="a GPU: tests/engine/bench rehearse it on the CPU"),
    Proof(r"smg launch", How.ELSEWHERE, because="is another project's program: tests/integration/test_smg.py runs it"),
    Proof(r"\.ci/run", How.ELSEWHERE, because="is what runs this test in CI"),
    Proof(
        r"chairlift-engine --model \S+ --load-format dummy",
        How.PARSE,
        because="16 GB: tests/engine/model/test_shapes.py",
    ),
    Proof(
        r"chairlift-(engine|frontend) .*\b10\.0\.0\.1:",
        How.PARSE,
        because="two machines: tests/engine/parallel/test_node_processes.py",
    ),
    Proof(r"chairlift(-engine|-frontend| up)\b", How.SERVE),
    Proof(
        r"chairlift generate .*--seed 5|cmp /tmp/undisturbed",
        How.ELSEWHERE,
        because="kills engines by their name: tests/integration/test_up.py kills its own",
    ),
    Proof(r"chairlift generate .*--tls$", How.RUN, beside=_TLS_SERVER),
    Proof(r"chairlift generate .*--num-answers 3", How.RUN, says=r"answer 3: .* first after"),
    Proof(r"chairlift generate\b", How.RUN, says=r"\w+ \w+ \w+"),
    Proof(r"chairlift health\b", How.RUN, says=r"^(SERVING|READY)\b"),
    Proof(_MOCK, How.SERVE),
    Proof(_MOCK_RUN, How.RUN, says=_VERDICT, shorter=_FEW, beside=_MOCK),
    Proof(
        r"chairlift-loadgen run\b", How.RUN, says=_VERDICT + r": .*\n(.*\n)*Requests answered: +12 of 12", shorter=_FEW
    ),
    Proof(r"chairlift-loadgen replay .*--dry-run", How.RUN, says="kept"),
    Proof(
        r"chairlift-loadgen replay .*--max-model-len 4096",
        How.PARSE,
        because="three minutes: the two other replays run",
    ),
    Proof(
        r"chairlift-loadgen replay .*--service-classes",
        How.PARSE,
        because="a pair with these classes: tests/integration/test_loadgen.py",
    ),
    Proof(r"chairlift-loadgen replay\b", How.RUN, says=_VERDICT),
    Proof(r"chairlift-loadgen report mock-http", How.RUN, says="Limits: ", after=_MOCK_RUN),
    Proof(r"chairlift-loadgen trace slice", How.RUN, says="written +ten-minutes"),
    Proof(r"gzip -dc ten-minutes", How.RUN, says='"arrival_s": 0.0', after=r"chairlift-loadgen trace slice"),
    Proof(
        r"chairlift simulate\b", How.PARSE, because="whole traces and other files: tests/loadgen/cli/test_simulate.py"
    ),
    Proof(r"chairlift-loadgen calibrate\b", How.PARSE, because="an idle machine: tests/loadgen/cli/test_calibrate.py"),
    Proof(r"chairlift-loadgen ab --servers", How.PARSE, because="starts servers: tests/loadgen/cli/test_ab.py"),
    Proof(
        r"chairlift-loadgen ab --target-a",
        How.RUN,
        shorter=(("ab --target-a", "ab --dry-run --target-a"),),
    ),
    Proof(
        r"chairlift-loadgen compare before=runs/1",
        How.RUN,
        says=r"no significant difference",
        shorter=(("compare before", "compare --force before"),),  # whatever the verdicts are on this machine
        after=_MOCK_RUN,
        given="mkdir runs; for run in 1 2 3 4; do cp -r mock-http runs/$run; done",
    ),
    Proof(
        r"chairlift-loadgen sweep\b",
        How.RUN,
        says="11 load levels: 1, 1.5, 2.25",
        shorter=(("sweep --rates", "sweep --dry-run --rates"),),
    ),
    Proof(r"grpcurl\b", How.CALL),
    Proof(
        r"curl http://127\.0\.0\.1:8000/v1/(un)?load_lora_adapter",
        How.ELSEWHERE,
        because="no adapter comes with the project: tests/integration/test_lora.py loads and unloads some",
    ),
    Proof(r"curl http://127\.0\.0\.1:8000/", How.RUN, says=r'"choices": ?\[\{'),
    Proof(
        r"sed -i s/chairlift:/vllm:/g",
        How.RUN,
        says="",
        given="! grep -q vllm: deploy/monitoring/prometheus/alerts.yml",
    ),
    Proof(r"docker compose\b", How.PARSE, because="a Docker engine: tests/deploy where there is one"),
    Proof(
        r"docker (build|push)\b",
        How.ELSEWHERE,
        because="a Docker engine and a registry: tests/deploy/containers build the images",
    ),
    Proof(r"helm (install|test)\b", How.ELSEWHERE, because="a cluster: tests/deploy/chart render the chart"),
    Proof(r"echo MODEL\w*=\S+ >> \.env", How.RUN, says=""),
    Proof(r"python -m tests\.support\.demo_model\.\w+", How.PARSE, because="half an hour: tests/engine/demo"),
]


@cache
def proof_of(command: Command) -> Proof | None:
    return next((proof for proof in PROOFS if re.match(proof.pattern, command.plain)), None)
