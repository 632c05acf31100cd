"""Writes the flags of both programs into the schema of the chart's values, so that a mistyped one is refused by helm.

    python deploy/chart_flags.py

Only names and forms are listed: a number out of range is refused by the program, in one line, when it starts. Flags
that the chart sets itself are left out.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from frontend.config import FrontendConfig

SCHEMA = Path(__file__).parent / "helm" / "chairlift" / "values.schema.json"
# Set by templates from other values, or of no use in a pod.
SET_BY_CHART = {
    "engineFlags": {
        "device", "exit_on_stdin_close", "host", "insecure_bind", "master_addr", "model", "nnodes", "node_rank",
        "pipeline_parallel_size", "port", "served_model_name", "shutdown_timeout_s", "step_log",
        "tensor_parallel_size", "tls_cert", "tls_client_ca", "tls_key", "uds",
    },
    "frontendFlags": {
        "admin_api_key", "admin_api_key_file", "api_key", "api_key_file", "chat_template", "engine", "engine_tls_ca",
        "engine_tls_client_cert", "engine_tls_client_key", "host", "http", "http_host", "http_port", "insecure_bind",
        "max_connection_age_s", "port", "retry_ticket_key_file", "reuse_port", "service_classes",
        "shutdown_timeout_s", "tls_cert", "tls_client_ca", "tls_key", "tokenizer",
    },
}  # fmt: skip
CONFIGS = {"engineFlags": EngineConfig, "frontendFlags": FrontendConfig}


def definitions() -> dict[str, Any]:
    """Returns the definitions of the schema: by name, that of the flags which values may set."""
    return {name: _flags(config, SET_BY_CHART[name]) for name, config in CONFIGS.items()}


def _flags(config: type, left_out: set[str]) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(config)}
    if unknown := left_out - fields.keys():
        raise ValueError(f"SET_BY_CHART names flags that are gone: {', '.join(sorted(unknown))}")
    flags = {
        name.removesuffix("_s").replace("_", "-"): _form(field.metadata["flag"].kind)
        for name, field in fields.items()
        if name not in left_out
    }
    return {"type": "object", "additionalProperties": False, "properties": dict(sorted(flags.items()))}


def _form(kind: Any) -> dict[str, Any]:
    scalar = {"type": ["string", "number"]}
    if kind.allowed.startswith("one of 1, true"):  # a switch
        return {"type": "boolean"}
    return scalar if kind.separator is None else {"type": "array", "items": scalar}


def main() -> None:
    """Rewrites the schema."""
    schema = json.loads(SCHEMA.read_text())
    schema["$defs"] |= definitions()
    SCHEMA.write_text(json.dumps(schema, indent=2) + "\n")


if __name__ == "__main__":
    main()
