"""Settings of a run as labels and texts for reports. Pure.

result.json keeps the raw settings. Unused settings are left out here; a setting without a label is shown under its key.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from loadgen.report.figures import number, share
from loadgen.report.rows import Fact

_ELSEWHERE = ("command", "closed_loop", "start_monotonic_ns", "workload_digest")
"""Shown at the top of the page, or not useful to readers."""


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


def _classes(value: Any) -> str:
    return "; ".join(_class(**one) for one in value)


def _class(*, name: str, ttft_s: float | None, inter_token_s: float | None, **_: Any) -> str:
    targets = {"TTFT": ttft_s, "per token": inter_token_s}
    texts = [f"{what} {number(1e3 * seconds)} ms" for what, seconds in targets.items() if seconds is not None]
    return f"{name}: {', '.join(texts) or 'no targets'}"


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
    "model_version": ("Model version", _as_is),
    "max_model_len": ("Maximum context, tokens", lambda value: f"{value:,}"),
    "vocab_size": ("Vocabulary size", lambda value: f"{value:,}"),
    "prompt_mode": ("Prompt mode", _prompts),
    "text_prompts.words": ("Words for text prompts", lambda value: f"{value:,}"),
    "text_prompts.overhead_tokens": ("Tokens added to a prompt by the server", _as_is),
    "text_prompts.tokens_per_word": ("Tokens per word", _as_is),
    "text_prompts.mismatch": ("Prompt length error in the probe", _share),
    "salt": ("Prompt salt", _as_is),
    "pinned_salt": ("Prompt salt pinned", _yes_or_no),
    "seed": ("Seed", _as_is),
    "temperature": ("Temperature", _as_is),
    "ignore_eos": ("ignore_eos (fixed output length)", _yes_or_no),
    "concurrency": ("Concurrency (closed loop)", _as_is),
    "max_concurrency": ("Maximum concurrency", _as_is),
    "overflow": ("Overflow policy", _as_is),
    "cancel_rate": ("Cancellation rate", _share),
    "service_classes": ("Latency targets", _classes),
    "sends_class_names": ("Requests name their class", _yes_or_no),
    "max_retries": ("Retries of refused requests", _as_is),
    "timeout_s": ("Request timeout", _seconds),
    "drain_timeout_s": ("Drain timeout", _seconds),
    "workers": ("Worker processes", _as_is),
    "ceiling_messages_per_s": ("Measurement ceiling of this host, messages/s", lambda value: f"{value:,.0f}"),
    "warnings": ("Warnings", "; ".join),
    "measure.warmup_s": ("Warm-up excluded", _seconds),
    "measure.slo": ("SLO limits", _limits),
    "measure.percentiles": ("Percentiles", _listed),
    "max_error_rate": ("Maximum error rate", _share),
    "started_at": ("Started", _as_is),
    "time": ("Ended", _as_is),
    "tags": ("Tags", _packages),
    "host.hostname": ("Host of the load generator", _as_is),
    "host.cpu": ("CPU model", _as_is),
    "host.usable_cpus": ("Usable CPUs", _as_is),
    "host.machine": ("Architecture", _as_is),
    "host.system": ("Operating system", _as_is),
    "host.load_average": ("Load average at the end", _as_is),
    "host_busy.mean": ("CPU utilization of the host, mean", _share),
    "host_busy.peak": ("CPU utilization of the host, peak second", _share),
    "host.python": ("Python", _as_is),
    "host.packages": ("Packages", _packages),
    "host.revision": ("Commit", _as_is),
}
"""By path of a setting, its label and how its value is formatted, in order of display."""


def settings_facts(settings: Mapping[str, Any]) -> list[Fact]:
    """Labels and texts; settings with a label come first."""
    if settings.get("max_concurrency") is None:
        settings = {name: value for name, value in settings.items() if name != "overflow"}
    found = dict(_flattened(settings))
    named = [Fact(name, write(found.pop(path))) for path, (name, write) in _NAMES.items() if path in found]
    others = [Fact(path.replace(".", ": ").replace("_", " "), _as_is(value)) for path, value in found.items()]
    return [*named, *others]


def _flattened(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of each setting with a value; a mapping with a label of its own stays one value."""
    for name, value in settings.items():
        path = f"{above}{name}"
        if path in _ELSEWHERE or value is None or value in ({}, [], ()):
            continue
        if isinstance(value, Mapping) and path not in _NAMES:
            yield from _flattened(value, f"{path}.")
        else:
            yield path, value
