"""Communication between nodes and their coordinator: gRPC over mutual TLS."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # Phalanx reports errors itself
