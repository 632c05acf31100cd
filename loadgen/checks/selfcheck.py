"""The verdict on a run: VALID, DEGRADED or INVALID. Every report begins with it.

Pure: records and figures in, a verdict out. What is checked of the client is in `client_checks`, what
is checked of the server in `server_checks`.
"""

from dataclasses import dataclass

from loadgen.checks.client_checks import client_checks
from loadgen.checks.finding import LEVELS, Finding, Level
from loadgen.checks.limits import Limits
from loadgen.checks.server_checks import server_checks
from loadgen.measure.metrics import Metrics
from loadgen.measure.samples import Samples, samples_of
from loadgen.record import RunData

__all__ = ["Limits", "Verdict", "judge"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of all checks.

    Attributes:
        level: the worst of the findings.
        findings: of every check, passed or not.
    """

    level: Level
    findings: tuple[Finding, ...]

    @property
    def reasons(self) -> tuple[Finding, ...]:
        """Returns the checks that did not pass, the worst first."""
        failed = [finding for finding in self.findings if finding.level != "VALID"]
        return tuple(sorted(failed, key=lambda finding: -LEVELS.index(finding.level)))

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Returns the checks that passed with a remark."""
        return tuple(one for one in self.findings if one.level == "VALID" and one.text and one.judged)

    @property
    def partial(self) -> bool:
        """Returns whether the run was stopped before its end."""
        return any(finding.check == "complete" for finding in self.reasons)


def judge(run: RunData, metrics: Metrics, limits: Limits | None = None, samples: Samples | None = None) -> Verdict:
    """Runs every check.

    Args:
        run: what is known of it. Of `settings` it reads closed_loop, max_concurrency, ignore_eos, pinned_salt,
            ceiling_messages_per_s (what `calibrate` found for the host of the run), warnings and
            host_busy (of the controller) and text_prompts.mismatch (what a probe found).
        metrics: of this run.
        limits: None takes those it was run with, the usual ones but for `--max-error-rate`.
        samples: of this run, if they are there already.
    """
    limits = limits or Limits.of(run.settings)
    samples = samples or samples_of(run)
    findings = (*client_checks(run, metrics, samples, limits), *server_checks(run, metrics, samples, limits))
    return Verdict(max((finding.level for finding in findings), key=LEVELS.index), findings)
