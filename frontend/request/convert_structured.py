"""Structured-output formats from the public proto, checked. Grammars are validated when they are compiled."""

import json

from chairlift.service.sampling_fields import StopOptions
from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import InvalidRequest
from frontend.limits import MAX_CHOICES, MAX_FORM_BYTES
from frontend.request.checks import check_at_most
from frontend.text.structured.output_format import FormKind, OutputForm


def output_form(spec: pb.GenerationSpec) -> OutputForm | None:
    """Returns the structured-output format of a request; None: unconstrained.

    Raises:
        InvalidRequest: no format is set, or it is empty or too large.
    """
    if not spec.HasField("structured_output"):
        return None
    message, path = spec.structured_output, "spec.structured_output"
    name = message.WhichOneof("form")
    if name is None:
        forms = ", ".join(field.name for field in message.DESCRIPTOR.oneofs_by_name["form"].fields)
        raise InvalidRequest(f"there is no form: set exactly one of {forms}", field=path)
    field = f"{path}.{name}"
    match name:
        case "json_object":
            if not message.json_object:
                raise InvalidRequest("json_object is false: leave structured_output out instead", field=field)
            return OutputForm(FormKind.JSON_OBJECT, "", field)
        case "choice":
            return choice_form(list(message.choice.texts), field)
        case "json_schema":
            return text_form(FormKind.JSON_SCHEMA, message.json_schema, field)
        case "regex":
            return text_form(FormKind.REGEX, message.regex, field)
    return text_form(FormKind.GRAMMAR, message.grammar, field)


def text_form(kind: FormKind, text: str, field: str) -> OutputForm:
    """Makes a format that is one text.

    Raises:
        InvalidRequest: it is empty or too large.
    """
    if not text:
        raise InvalidRequest(f"{field.rpartition('.')[2]} is empty", field=field)
    check_at_most(field, len(text.encode()), MAX_FORM_BYTES, "bytes")
    return OutputForm(kind, text, field)


def choice_form(texts: list[str], field: str) -> OutputForm:
    """Makes a choice between texts.

    Raises:
        InvalidRequest: there are none or too many, or one is empty.
    """
    if not texts or not all(texts):
        raise InvalidRequest("choice needs at least one text, and none may be empty", field=field)
    check_at_most(field, len(texts), MAX_CHOICES, "entries")
    check_at_most(field, sum(len(text.encode()) for text in texts), MAX_FORM_BYTES, "bytes")
    return OutputForm(FormKind.CHOICE, json.dumps(texts), field)


def check_form_ends(stop: StopOptions) -> None:
    """Checks that a structured answer may end when it is complete.

    Raises:
        InvalidRequest: ignore_end_token is set.
    """
    if stop.ignore_end_token:
        raise InvalidRequest(
            "ignore_end_token excludes structured output, which ends when it is complete",
            field="spec.stop.ignore_end_token",
        )
