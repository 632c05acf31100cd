"""Servers that can be measured: our gRPC API, OpenAI-compatible HTTP, and one that is not there."""
