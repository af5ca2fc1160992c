"""DreamReasoner-8B, which is SDAR's network with the ``model_type`` of Dream."""

from __future__ import annotations

from typing import ClassVar

from lopa_ascend.checkpoint import Architecture
from lopa_ascend.config.families import FAMILIES
from lopa_ascend.model.sdar import TENSORS, Sdar


class DreamReasoner(Sdar):
    """See ``decoder.py``."""

    architecture: ClassVar = Architecture("DreamReasoner", TENSORS.tensors, FAMILIES["DreamReasoner"])
