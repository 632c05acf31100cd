"""Keeps gRPC from logging a traceback for each answer that it could not deliver because the client had left."""

import logging

import grpc.aio


def ignore_undelivered_answers() -> None:
    """Filters those records out of gRPC's log; may be called again."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_of_interest)


def _is_of_interest(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))
