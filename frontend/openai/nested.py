"""Objects inside bodies. As in a body itself, what nobody knows is refused by name, unless it is null."""

from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator

from frontend.openai.error_object import BodyError


class Nested(BaseModel):
    """An object that is part of a body.

    Attributes:
        where: the body's parameter that it belongs to.
    """

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    where: ClassVar[str]

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                raise BodyError(
                    400,
                    f"{name[:64]!r} of {self.where} is not a parameter of this server",
                    param=self.where,
                    code="unknown_parameter",
                )
        return self
