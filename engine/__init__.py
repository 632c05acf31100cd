"""The engine: scheduling, KV cache and the model step loop. It sees token ids, never text."""

__version__ = "0.1.0"
