"""The wire between nodes and their coordinator: gRPC over mutual TLS."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what went wrong is said in our own words
