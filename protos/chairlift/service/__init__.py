"""What engine and frontend need alike to run as services: log format, process limits, health listing.

Both import it beside the stubs, because they may not import each other. It imports neither of them.
"""
