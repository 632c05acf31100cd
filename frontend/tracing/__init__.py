"""Traces of requests for OpenTelemetry, off unless a collector is named. Only `otlp.py` needs its packages."""
