"""What the replicas said of themselves last, as the routers of this process have heard it.

Ray Serve copies a router's class with the globals of its module, so that what it shares must lie in another module.
"""

from __future__ import annotations

from typing import Any

reported: dict[str, dict[str, dict[str, Any]]] = {}
"""By deployment and replica; empty until a replica has reported."""
