"""Settings that must stand before torch is imported, and one hypothesis profile for everyone.

This file imports no torch, and neither do the tests in ``unit/``.
"""

import os

# With the torch_npu wheel installed but no CANN, a plain `import torch` fails unless this is off.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# OpenMP's default, spinning, collapses as soon as another process wants a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["HF_HUB_OFFLINE"] = "1"

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
