"""Hugging Face checkpoints as models: configuration, weights, and a decoder with a small file per architecture."""
