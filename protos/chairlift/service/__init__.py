"""What engine and frontend share to run as services: flags, logs, health, signals, process limits, TLS files.

They may not import each other; this package imports neither of them.
"""
