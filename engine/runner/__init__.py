"""Runs plans on a model: packs the ragged batch, keeps the cache tensors, samples."""
