"""Routes requests to engines: connections, load balancing, failover, and the streams of requests under way."""
