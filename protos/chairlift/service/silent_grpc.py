"""Importing this module before grpc silences gRPC's C core, unless GRPC_VERBOSITY is set.

The core prints what peers send without escaping it, in lines that follow no log format. grpc reads the variable when
it is imported.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
