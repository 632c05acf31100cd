"""Comparisons of Chairlift with other systems: OpenVINO GenAI and `transformers`."""
