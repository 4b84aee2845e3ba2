"""The test cluster, the independent checkers, worlds and fixtures."""

import os

# Tests run commands as other users, which forks; gRPC's handlers for forks can end such a child with
# SIGSEGV while other threads use gRPC. It runs another program at once, so it needs none of them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
