"""Cost of the way between engine and client: latency, throughput, and CPU of the frontend."""
