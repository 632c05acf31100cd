"""What the public proto says of the form of answers and of words, to checked values; what is a grammar and what is none
is found when it is compiled.
"""

import json

from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import InvalidRequest
from frontend.limits import MAX_BAD_WORD_BYTES, MAX_BAD_WORDS, MAX_CHOICES, MAX_FORM_BYTES
from frontend.request.checks import check_at_most
from frontend.request.request import StopOptions
from frontend.text.structured.output_format import FormKind, OutputForm


def output_form(spec: pb.GenerationSpec) -> OutputForm | None:
    """The form that a request asks for; None: it is free.

    Raises:
        InvalidRequest: none of the forms, an empty one, or one that is too large.
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
    """A form that is one text.

    Raises:
        InvalidRequest: it is empty or too large.
    """
    if not text:
        raise InvalidRequest(f"{field.rpartition('.')[2]} is empty", field=field)
    check_at_most(field, len(text.encode()), MAX_FORM_BYTES, "bytes")
    return OutputForm(kind, text, field)


def choice_form(texts: list[str], field: str) -> OutputForm:
    """One of some texts.

    Raises:
        InvalidRequest: there are none, or too many, or an empty one.
    """
    if not texts or not all(texts):
        raise InvalidRequest("choice needs at least one text, and none may be empty", field=field)
    check_at_most(field, len(texts), MAX_CHOICES, "entries")
    check_at_most(field, sum(len(text.encode()) for text in texts), MAX_FORM_BYTES, "bytes")
    return OutputForm(FormKind.CHOICE, json.dumps(texts), field)


def check_form_ends(stop: StopOptions) -> None:
    """Checks that an answer with a form may end when it is complete.

    Raises:
        InvalidRequest: it may not.
    """
    if stop.ignore_end_token:
        raise InvalidRequest(
            "ignore_end_token does not go with a form of the answer, which ends when it is complete",
            field="spec.stop.ignore_end_token",
        )


def bad_words(options: pb.SamplingOptions, path: str) -> tuple[str, ...]:
    """The words that are never written, each once.

    Raises:
        InvalidRequest: too many, too long, or nothing but space.
    """
    field = path + "bad_words"
    check_at_most(field, len(options.bad_words), MAX_BAD_WORDS, "entries")
    for word in options.bad_words:
        if not word.strip():
            raise InvalidRequest("a bad word is empty", field=field)
        check_at_most(field, len(word.encode()), MAX_BAD_WORD_BYTES, "bytes in one entry")
    return tuple(dict.fromkeys(options.bad_words))
