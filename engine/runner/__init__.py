"""Runs plans on a model: packs the ragged batch, owns the KV cache tensors, samples."""
