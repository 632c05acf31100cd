"""Checks and converts requests of clients, and fills in defaults."""
