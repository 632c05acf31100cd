"""API keys and TLS certificates, reloaded when their files change."""
