"""How long a test waits before it takes what it waits for to hang.

Tests wait for conditions. These limits only end a wait that would never end: no machine that works is so slow, and a
test that passes never waits for them. They suit two cores of half today's usual speed at load 20.
"""

HANG_S = 300.0
"""Longest wait for one event: an answer, a line of a log, the end of a process that was asked to end."""

START_HANG_S = 600.0
"""Longest wait for a process that compiles all CPU kernels first."""
