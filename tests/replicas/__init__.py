"""Replicas on Ray Serve, on clusters of simulated nodes. They need the extra ray."""

import os

# Ray reads it when it is imported: the nodes are on the loopback interface.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
