"""Objects inside bodies, and the names in them that this server does not know."""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from frontend.api.http.unserved_parameters import is_off


class Nested(BaseModel):
    """An object of parameters. Unknown names in it are reported like those of the body."""

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)


class Returned(BaseModel):
    """An object of a conversation, which clients send back as they got it, from this server or another one. Unknown
    members are ignored: clients and gateways add their own.
    """

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)


def unknown_names(model: BaseModel) -> Iterator[str]:
    """Names of the members that a model does not declare and whose values ask for something; those of nested objects
    with the path that leads to them, as in "stream_options.x".
    """
    for name, value in (model.model_extra or {}).items():
        if not is_off(value):
            yield name
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, Nested):
            yield from (f"{field.alias or name}.{inner}" for inner in unknown_names(value))
