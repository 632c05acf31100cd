"""The twin of an engine and of a fleet: the production scheduler, block pool and placement under virtual time.

The one package of the load generator that imports other services: `engine.core`, `engine.errors` and
`frontend.routing.placement`, all pure. It reads no clock and opens no socket; what it replays are the load generator's
traces.
"""
