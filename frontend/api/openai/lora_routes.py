"""Routes that load and unload LoRA adapters, in vLLM's format."""

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from frontend.api.active_calls import ActiveCalls
from frontend.api.http.bodies import Body
from frontend.api.http.endpoint import Endpoint
from frontend.api.http.request_body import read_body
from frontend.api.http.unknown_parameters import UnknownParameters
from frontend.errors import InvalidRequest
from frontend.routing.adapter_control import AdapterControl


class LoadLoraAdapterBody(Body):
    """Body of /v1/load_lora_adapter."""

    lora_name: str = Field("", description="name of the adapter in requests")
    lora_path: str = Field("", description="its folder on the engines' disks, in one of --lora-dir")
    load_inplace: bool = Field(False, description="whether it may replace a loaded adapter of this name")


class UnloadLoraAdapterBody(Body):
    """Body of /v1/unload_lora_adapter."""

    lora_name: str = Field("", description="name of the adapter")


class LoraRoutes:
    """Handles the routes.

    Args:
        adapters: changes the adapters of the engines.
        calls: counts active calls.
        unknown_parameters: policy for unknown parameters.
        body_timeout_s: seconds that a body may take to arrive.
    """

    def __init__(
        self,
        adapters: AdapterControl,
        calls: ActiveCalls,
        unknown_parameters: UnknownParameters,
        *,
        body_timeout_s: float,
    ) -> None:
        self._adapters = adapters
        self._calls = calls
        self._unknown_parameters = unknown_parameters
        self._body_timeout_s = body_timeout_s

    def endpoints(self) -> list[Endpoint]:
        """Returns the routes."""
        text = ("text/plain",)
        return [
            Endpoint(
                "POST", "/v1/load_lora_adapter", self.load, "Load a LoRA adapter into all engines", LoadLoraAdapterBody,
                answers=text, is_admin=True,
            ),
            Endpoint(
                "POST", "/v1/unload_lora_adapter", self.unload, "Unload a LoRA adapter", UnloadLoraAdapterBody,
                answers=text, is_admin=True,
            ),
        ]  # fmt: skip

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter."""
        body = await read_body(request, LoadLoraAdapterBody, timeout_s=self._body_timeout_s)
        headers = self._unknown_parameters.headers(body)
        if not body.lora_name or not body.lora_path:
            raise InvalidRequest("lora_name and lora_path must be given")
        with self._calls.call():
            await self._adapters.load(body.lora_name, body.lora_path, replace=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.", headers=headers)

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter."""
        body = await read_body(request, UnloadLoraAdapterBody, timeout_s=self._body_timeout_s)
        headers = self._unknown_parameters.headers(body)
        if not body.lora_name:
            raise InvalidRequest("lora_name must be given")
        with self._calls.call():
            await self._adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", headers=headers)
