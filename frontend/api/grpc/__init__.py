"""The public gRPC service: handlers, statuses, API keys."""
