"""Chairlift's frontend and SMG, a gateway in Rust, before the same engine."""
