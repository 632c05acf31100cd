"""Metrics, traces and the request log. Every metric is in docs/metrics.md; `otlp.py` alone needs OpenTelemetry."""
