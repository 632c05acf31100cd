"""Flags that give requests latency targets: classes of a file, or two targets for all."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from chairlift.service.flag_kinds import integer, switch
from chairlift.service.flags import Flag
from chairlift.service.service_classes import ServiceClass, ServiceClassError, read_service_classes
from loadgen.cli.values import ABOVE_ZERO, CLASS_MIX, FILE
from loadgen.errors import OptionError
from loadgen.service_mix import ServiceMix

CLASS_FLAGS: Sequence[Flag] = (
    Flag("--service-classes", "TOML file of service classes, as the frontend reads it (default: none)", FILE),
    Flag("--mix", "weights of the classes, drawn at random (default: all alike)", CLASS_MIX),
)
"""Flags of the twin too."""


LATENCY_TARGET_FLAGS: Sequence[Flag] = (
    *CLASS_FLAGS,
    Flag("--send-targets", "send the targets of a class instead of its name, to a server without the file", switch()),
    Flag("--target-ttft", "first-token target of every request, without a class (default: none)", ABOVE_ZERO),
    Flag("--target-itl", "inter-token target of every request, without a class (default: none)", ABOVE_ZERO),
    Flag(
        "--max-retries",
        "retries of a request refused for its targets, each at the time that the server names (default: %(default)s)",
        integer(0),
        default=0,
    ),
)


def classes_of(path: Path | None) -> dict[str, ServiceClass]:
    """Returns the classes of a file by name; none without a file.

    Raises: OptionError: the file cannot be used; names the field.
    """
    if path is None:
        return {}
    try:
        return read_service_classes(path)
    except ServiceClassError as error:
        raise OptionError(f"--service-classes {error}") from error


def service_mix(options: argparse.Namespace) -> ServiceMix | None:
    """Returns the targets of the requests; None: they have none.

    Raises: OptionError: flags contradict each other, or a file cannot be used.
    """
    ttft_s, inter_token_s = options.target_ttft, options.target_itl
    classes = classes_of(options.service_classes)
    if classes:
        if ttft_s is not None or inter_token_s is not None:
            raise OptionError("--service-classes and --target-ttft or --target-itl both give targets; give one of them")
        return ServiceMix(classes=classes, weights=options.mix or {}, sends_names=not options.send_targets)
    for name, is_given in (("--mix", options.mix), ("--send-targets", options.send_targets)):
        if is_given:
            raise OptionError(f"{name} needs --service-classes, which names the classes")
    if ttft_s is None and inter_token_s is None:
        if options.max_retries:
            raise OptionError("--max-retries needs targets: --service-classes, or --target-ttft")
        return None
    own = ServiceClass(name="all", ttft_s=ttft_s, inter_token_s=inter_token_s)
    return ServiceMix(classes={own.name: own}, sends_names=False)
