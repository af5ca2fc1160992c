"""Compiled decode steps, and the fusion of models in plain torch; imports as ``lopa_ascend.graph``."""

if __name__ != "lopa_ascend.graph":  # pragma: no cover
    raise ImportError("graph/ is the package lopa_ascend.graph: import it by that name")
