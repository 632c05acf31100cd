"""Several frontend processes on the same ports (`--workers`): a small parent starts, watches, replaces and drains them.

The kernel deals connections out (SO_REUSEPORT); each worker is a whole frontend with an engine stream of its own. The
parent opens no connection and makes no gRPC object. The two talk over pipes: the parent says once what to be
(`order.py`), the worker says line by line how it goes (`report.py`).
"""
