"""Several frontend processes on the same ports (`--workers`): a parent starts, watches, replaces and drains them.

The kernel distributes connections (SO_REUSEPORT). Each worker is a complete frontend with its own engine stream. The
parent opens no connection and creates no gRPC object. It sends each worker one message on its standard input
(`order.py`); the worker reports line by line on its standard output (`report.py`).
"""
