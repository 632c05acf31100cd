"""Stops gRPC's C core from printing, unless GRPC_VERBOSITY is set: it prints what peers send, as it came, and in lines
that no log format has. To be imported before grpc, which reads the variable then.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
