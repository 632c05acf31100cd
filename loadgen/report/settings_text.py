"""How a run was made, in words: the settings of a RunData as names and texts. Pure.

result.json keeps them as they are. Here what was not used is left out, and a setting without a name of its own is shown
under its key with spaces, so that nothing else is lost.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from loadgen.report.figures import number, share
from loadgen.report.rows import Fact

_ELSEWHERE = ("command", "closed_loop", "start_monotonic_ns", "workload_digest")
"""At the head of the page, or of no use to a reader."""


def _yes_or_no(value: Any) -> str:
    return "yes" if value else "no"


def _seconds(value: Any) -> str:
    return f"{value:g} s"


def _share(value: Any) -> str:
    return share(float(value))


def _prompts(value: Any) -> str:
    return {"ids": "token ids", "text": "text"}.get(str(value), str(value))


def _limits(value: Any) -> str:
    return ", ".join(f"{name} {limit_ms:g} ms" for name, limit_ms in value.items())


def _listed(value: Any) -> str:
    return ", ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in value)


def _packages(value: Any) -> str:
    return ", ".join(f"{name} {version}" for name, version in value.items())


def _as_is(value: Any) -> str:
    if isinstance(value, bool):
        return _yes_or_no(value)
    if isinstance(value, float):
        return number(value)
    return _listed(value) if isinstance(value, list | tuple) else str(value)


_NAMES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "target": ("Server", _as_is),
    "api": ("Protocol", _as_is),
    "model": ("Model", _as_is),
    "model_version": ("Version of the model", _as_is),
    "max_model_len": ("Tokens that fit the model", lambda value: f"{value:,}"),
    "vocab_size": ("Token ids drawn from", lambda value: f"{value:,}"),
    "prompt_mode": ("Prompts sent as", _prompts),
    "text_prompts.words": ("Words of text prompts", lambda value: f"{value:,}"),
    "text_prompts.overhead_tokens": ("Tokens the server adds to a prompt", _as_is),
    "text_prompts.tokens_per_word": ("Tokens of a word", _as_is),
    "text_prompts.mismatch": ("Prompt lengths off, in the probe", _share),
    "salt": ("Salt of the prompts", _as_is),
    "pinned_salt": ("Salt given by hand", _yes_or_no),
    "seed": ("Seed", _as_is),
    "temperature": ("Temperature", _as_is),
    "ignore_eos": ("Answers as long as planned", _yes_or_no),
    "concurrency": ("Requests under way, always (closed loop)", _as_is),
    "max_concurrency": ("Requests under way, at most", _as_is),
    "overflow": ("Beyond that", lambda value: {"queue": "they wait", "drop": "they are dropped"}.get(value, value)),
    "cancel_rate": ("Cancelled on purpose", _share),
    "timeout_s": ("Deadline of a request", _seconds),
    "drain_timeout_s": ("Time to finish after the last arrival", _seconds),
    "workers": ("Worker processes", _as_is),
    "ceiling_messages_per_s": ("Messages per second this host can measure", lambda value: f"{value:,.0f}"),
    "warnings": ("Warnings before the start", "; ".join),
    "measure.warmup_s": ("Warm-up left out", _seconds),
    "measure.slo": ("Limits", _limits),
    "measure.percentiles": ("Percentiles", _listed),
    "max_error_rate": ("Errors, INVALID above", _share),
    "started_at": ("First request due from", _as_is),
    "time": ("Ended", _as_is),
    "tags": ("Tags", _packages),
    "host.hostname": ("Load generator's host", _as_is),
    "host.cpu": ("Its processor", _as_is),
    "host.usable_cpus": ("Its cores", _as_is),
    "host.machine": ("Its architecture", _as_is),
    "host.system": ("Its system", _as_is),
    "host.load_average": ("Its load average, at the end", _as_is),
    "host_busy.mean": ("Its cores busy, mean of the run", _share),
    "host_busy.peak": ("Its cores busy, worst second", _share),
    "host.python": ("Python", _as_is),
    "host.packages": ("Packages", _packages),
    "host.revision": ("Commit", _as_is),
}
"""Path of a setting to its name and how its value is written, in the order in which they are shown."""


def settings_facts(settings: Mapping[str, Any]) -> list[Fact]:
    """Names and texts, those with a name first."""
    if settings.get("max_concurrency") is None:
        settings = {name: value for name, value in settings.items() if name != "overflow"}
    found = dict(_flattened(settings))
    named = [Fact(name, write(found.pop(path))) for path, (name, write) in _NAMES.items() if path in found]
    others = [Fact(path.replace(".", ": ").replace("_", " "), _as_is(value)) for path, value in found.items()]
    return [*named, *others]


def _flattened(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of each setting that says something; what has a name as a whole stays whole."""
    for name, value in settings.items():
        path = f"{above}{name}"
        if path in _ELSEWHERE or value is None or value in ({}, [], ()):
            continue
        if isinstance(value, Mapping) and path not in _NAMES:
            yield from _flattened(value, f"{path}.")
        else:
            yield path, value
