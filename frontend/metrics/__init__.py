"""What Prometheus is told: how requests go, and what the engine says of itself. Every metric is in docs/metrics.md."""
