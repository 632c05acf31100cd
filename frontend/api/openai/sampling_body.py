"""Parameters of generation that all of OpenAI's endpoints share."""

from typing import Annotated, Any

from frontend.api.http.bodies import NoneIfEmpty, SamplingBody, Texts


class OpenAISamplingBody(SamplingBody):
    """Parameters of every generation in OpenAI's APIs, beside those of all APIs."""

    stop: Annotated[str | Texts | None, NoneIfEmpty] = None
    service_tier: Any = None

    @property
    def service_class(self) -> str:
        """See Body. Any value is accepted, as long as the server has no classes."""
        return "" if self.service_tier is None else str(self.service_tier)

    @property
    def stop_texts(self) -> list[str]:
        """Strings that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []
