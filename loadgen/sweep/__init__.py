"""Rising loads: latency against rate, and the highest rate that keeps the targets."""
