"""Converts and checks structured output from the public proto. Compilation validates the grammars."""

import json

from chairlift.service.sampling_fields import StopOptions
from chairlift.service.structured.output_constraint import ConstraintKind, OutputConstraint
from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import InvalidRequest
from frontend.limits import MAX_CHOICES, MAX_CONSTRAINT_BYTES
from frontend.request.checks import check_at_most


def output_constraint(spec: pb.GenerationSpec) -> OutputConstraint | None:
    """Returns the output constraint of a request; None without one.

    Raises:
        InvalidRequest: none of its fields is set, or the constraint is empty or too large.
    """
    if not spec.HasField("structured_output"):
        return None
    message, path = spec.structured_output, "spec.structured_output"
    name = message.WhichOneof("form")
    if name is None:
        names = ", ".join(field.name for field in message.DESCRIPTOR.oneofs_by_name["form"].fields)
        raise InvalidRequest(f"structured_output is empty: set exactly one of {names}", field=path)
    field = f"{path}.{name}"
    match name:
        case "json_object":
            if not message.json_object:
                raise InvalidRequest("json_object is false: leave structured_output out instead", field=field)
            return OutputConstraint(ConstraintKind.JSON_OBJECT, "", field)
        case "choice":
            return choice_constraint(list(message.choice.texts), field)
        case "json_schema":
            return text_constraint(ConstraintKind.JSON_SCHEMA, message.json_schema, field)
        case "regex":
            return text_constraint(ConstraintKind.REGEX, message.regex, field)
    return text_constraint(ConstraintKind.GRAMMAR, message.grammar, field)


def text_constraint(kind: ConstraintKind, text: str, field: str) -> OutputConstraint:
    """Returns a constraint that consists of one text.

    Raises:
        InvalidRequest: it is empty or too large.
    """
    if not text:
        raise InvalidRequest(f"{field.rpartition('.')[2]} is empty", field=field)
    check_at_most(field, len(text.encode()), MAX_CONSTRAINT_BYTES, "bytes")
    return OutputConstraint(kind, text, field)


def choice_constraint(texts: list[str], field: str) -> OutputConstraint:
    """Returns a constraint to one of several texts.

    Raises:
        InvalidRequest: there are none or too many, or one is empty.
    """
    if not texts or not all(texts):
        raise InvalidRequest("choice needs at least one text, and none may be empty", field=field)
    check_at_most(field, len(texts), MAX_CHOICES, "entries")
    check_at_most(field, sum(len(text.encode()) for text in texts), MAX_CONSTRAINT_BYTES, "bytes")
    return OutputConstraint(ConstraintKind.CHOICE, json.dumps(texts), field)


def check_answer_can_end(stop: StopOptions) -> None:
    """Checks that a structured answer may end when it is complete.

    Raises:
        InvalidRequest: ignore_end_token is set.
    """
    if stop.ignore_end_token:
        raise InvalidRequest(
            "ignore_end_token excludes structured output, which ends when it is complete",
            field="spec.stop.ignore_end_token",
        )
