"""Reads one call, `{"name": ..., "arguments": {...}}`, while it arrives."""

import enum
import json
from collections.abc import Collection

from frontend.text.chat.json_scanner import JsonObjectScanner, Part

_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_CALL_KEYS = frozenset({"name", "type", "id", *_ARGUMENT_KEYS})


class ReaderStatus(enum.Enum):
    """How far a call has been read."""

    READING = "reading"
    COMPLETE = "complete"
    FAILED = "failed"  # the text is not a call


class CallReader:
    """Reads one call.

    The call is certain once its name is known and its arguments have started, or the object ends without arguments.
    Arguments in a JSON string are unquoted. Missing arguments and null become the empty object.

    Args:
        only_names: allowed names; None allows any.
        strict: reject an object without arguments, or with members that a call does not have.

    Attributes:
        status: how far the call has been read.
        name: the tool's name once the call is certain; None before.
        call_id: always None, because these models write no ids.
    """

    call_id: str | None = None

    def __init__(self, *, only_names: Collection[str] | None = None, strict: bool = False) -> None:
        self.status = ReaderStatus.READING
        self.name: str | None = None
        self._only_names = only_names
        self._strict = strict
        self._scanner = JsonObjectScanner()
        self._member: str | None = None  # whose value is being read
        self._value: list[str] = []
        self._wanted_name: str | None = None  # its name, before the call is certain
        self._early_arguments: str | None = None  # arguments that preceded the name
        self._has_arguments = False
        self._is_streaming = False
        self._arguments: list[str] = []  # not taken yet

    def read(self, text: str) -> str:
        """Takes the next piece; returns the rest that does not belong to the call."""
        position = 0
        while position < len(text) and self.status is ReaderStatus.READING:
            part, end = self._scanner.scan(text, position)
            piece, position = text[position:end], end
            if part is Part.VALUE or part is Part.CONTROL:
                is_call = self._take_value(_escaped(piece) if part is Part.CONTROL else piece)
            else:
                is_call = part is not Part.ERROR and self._end_value()
                if is_call and part is Part.END:
                    is_call = self._end_object()
            if not is_call:
                self.status = ReaderStatus.FAILED
        return text[position:]

    def take_arguments(self) -> str:
        """Returns the arguments read since the last call; empty before the call is certain."""
        arguments, self._arguments = "".join(self._arguments), []
        return arguments

    def _take_value(self, piece: str) -> bool:
        if self._member is None:
            self._member, self._value = self._scanner.key, []
            if self._strict and self._member not in _CALL_KEYS:
                return False
            if self._are_arguments(self._member):
                if piece[0] not in '{"n':
                    return False
                if piece[0] == "{" and self._wanted_name is not None:
                    self._is_streaming = True
                    self._begin(self._wanted_name)
        if self._is_streaming:
            self._arguments.append(piece)
        elif self._member == "name" or self._are_arguments(self._member):
            self._value.append(piece)
        return True

    def _end_value(self) -> bool:
        member, self._member = self._member, None
        if self._is_streaming:
            self._is_streaming = False
        elif member == "name" and self._wanted_name is None:
            return self._take_name("".join(self._value))
        elif member is not None and self._are_arguments(member):
            arguments = _object_text("".join(self._value))
            if arguments is None:
                return False
            self._has_arguments = True
            if self._wanted_name is None:
                self._early_arguments = arguments
            else:
                self._begin(self._wanted_name)
                self._arguments.append(arguments)
        return True

    def _take_name(self, value: str) -> bool:
        name = json.loads(value) if value.startswith('"') else ""
        if not name or not _is_sendable(name):
            return False
        if self._only_names is not None and name not in self._only_names:
            return False
        self._wanted_name = name
        if self._early_arguments is not None:
            self._begin(name)
            self._arguments.append(self._early_arguments)
        return True

    def _begin(self, name: str) -> None:
        self.name = name
        self._has_arguments = True

    def _end_object(self) -> bool:
        if self.name is None:
            if self._wanted_name is None or self._strict:
                return False
            self._begin(self._wanted_name)
            self._arguments.append("{}")
        self.status = ReaderStatus.COMPLETE
        return True

    def _are_arguments(self, member: str) -> bool:
        return member in _ARGUMENT_KEYS and not self._has_arguments


class ArgumentsReader:
    """Reads the arguments of a call whose name is known: any JSON object.

    Attributes:
        status, name: see `CallReader`; the call is certain from the opening bracket on.
        call_id: the id that the model gave the call.
    """

    def __init__(self, name: str, call_id: str | None = None) -> None:
        self.status = ReaderStatus.READING
        self.name = name
        self.call_id = call_id
        self._scanner = JsonObjectScanner()
        self._arguments: list[str] = []

    def read(self, text: str) -> str:
        """See `CallReader.read`."""
        position = 0
        while position < len(text) and self.status is ReaderStatus.READING:
            part, end = self._scanner.scan(text, position)
            piece, position = text[position:end], end
            self._arguments.append(_escaped(piece) if part is Part.CONTROL else piece)
            if part is Part.END:
                self.status = ReaderStatus.COMPLETE
            elif part is Part.ERROR:
                self.status = ReaderStatus.FAILED
        return text[position:]

    def take_arguments(self) -> str:
        """See `CallReader.take_arguments`."""
        arguments, self._arguments = "".join(self._arguments), []
        return arguments


def _escaped(control: str) -> str:
    return json.dumps(control)[1:-1]


def _is_sendable(text: str) -> bool:
    """Returns whether UTF-8 can encode the text; JSON may contain half a surrogate pair, which it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _object_text(value: str) -> str | None:
    """Returns the JSON text of the arguments object in a JSON value; None if there is none."""
    if value.startswith("{"):
        return value
    inner = json.loads(value)
    if inner is None:
        return "{}"
    try:
        is_object = isinstance(json.loads(inner or "{}"), dict)
    except (ValueError, RecursionError):
        return None
    return (inner or "{}") if is_object and _is_sendable(inner) else None
