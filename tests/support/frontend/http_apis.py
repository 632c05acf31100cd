"""All HTTP APIs without anything behind them, for tests of their routes."""

from frontend.api.anthropic.endpoints import Messages, messages_api
from frontend.api.http.endpoint import Api
from frontend.api.openai.endpoints import CompletionsHandler, openai_apis
from frontend.api.openai.info_routes import InfoRoutes
from frontend.api.openai.lora_routes import LoraRoutes
from frontend.api.openai.responses.endpoints import Responses, responses_api


def http_apis() -> list[Api]:
    """The APIs, as `frontend.app` lists them; their handlers cannot be called."""
    responses, messages = Responses.__new__(Responses), Messages.__new__(Messages)
    return [
        responses_api(responses),
        messages_api(messages),
        *openai_apis(
            CompletionsHandler.__new__(CompletionsHandler),
            InfoRoutes.__new__(InfoRoutes),
            LoraRoutes.__new__(LoraRoutes),
        ),
    ]
