"""Advice about failed requests, by cause: a lower rate helps against a full queue, not against too long a prompt.

Pure.
"""

from loadgen.causes import CONNECTION, TIMEOUT, causes_of, code_of
from loadgen.record import ABSENT, RunData, Status

_REFUSED = ("INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION", "HTTP 400", "HTTP 413", "HTTP 422")
_REMEDIES = {
    _REFUSED: "the server refuses such requests at any rate; change the workload or the flags as it says",
    (
        "RESOURCE_EXHAUSTED",
        "HTTP 429",
    ): "its queue is full: lower the rate, set --max-concurrency, or let it queue more",
    ("UNAVAILABLE", "HTTP 502", "HTTP 503", "HTTP 504", CONNECTION): "the server or a part of it was away; see its log",
    (TIMEOUT, "DEADLINE_EXCEEDED", "HTTP 408"): "answers took too long: lower the rate, or raise --timeout",
    ("UNAUTHENTICATED", "PERMISSION_DENIED"): "it refuses us; put its key into CHAIRLIFT_API_KEY",
    ("HTTP 401", "HTTP 403"): "it refuses us; put its key into OPENAI_API_KEY",
    ("NOT_FOUND", "UNIMPLEMENTED", "HTTP 404", "HTTP 405"): "it lacks what was asked for: check --target and --model",
    ("INTERNAL", "UNKNOWN", "ABORTED", "CANCELLED", "DATA_LOSS", "HTTP 500"): "the server failed; see its log",
}
_BY_CODE = {code: remedy for codes, remedy in _REMEDIES.items() for code in codes}


def remedy(run: RunData, num_unfinished: int) -> str:
    """Returns advice against the most frequent cause.

    Args:
        run: with at least one failed request.
        num_unfinished: still in flight at the end.
    """
    causes = causes_of(run)
    if not causes or num_unfinished > causes[0].num_requests:
        return "answers were in flight when the run ended: lower the rate, or raise --drain-timeout"
    code = causes[0].code
    if code in _REFUSED and (num_overlong := _num_overlong(run)):
        max_model_len = run.settings["max_model_len"]
        return (
            f"{num_overlong:,} are longer than the server's context of {max_model_len:,} tokens: --max-model-len "
            f"{max_model_len} leaves them out, --overlong clip with it cuts them, --length-scale shortens a trace"
        )
    return _BY_CODE.get(code, "see why, and the server's log")


def _num_overlong(run: RunData) -> int:
    """Returns how many requests were refused and do not fit the server's context."""
    max_model_len = run.settings.get("max_model_len")
    if max_model_len is None:
        return 0
    refused = {number for number, text in enumerate(run.errors) if code_of(text) in _REFUSED}
    lengths = run.workload.input_tokens + run.workload.output_tokens
    failed = (run.requests["status"] == Status.ERROR) & (run.requests["error"] != ABSENT) & (lengths > max_model_len)
    return sum(number in refused for number in run.requests["error"][failed].tolist())
