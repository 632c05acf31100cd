"""Experiments that start servers of their own and measure them with the load generator's clients."""
