"""Start-up: builds model, KV cache, runner and scheduler from a configuration, and reports the progress."""
