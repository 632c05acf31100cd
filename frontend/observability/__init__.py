"""Metrics, traces and the request log. Every metric is in docs/metrics.md; only `otlp.py` needs OpenTelemetry."""
