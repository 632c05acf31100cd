"""The public service over gRPC: handlers, errors as statuses, keys."""
