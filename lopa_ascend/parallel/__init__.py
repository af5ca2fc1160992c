"""Several ranks: how they start and meet, the mesh, collectives, placement of branches, and the watch over processes.

The folder is the package ``lopa_ascend.parallel`` and has no other name.
"""

if __name__ != "lopa_ascend.parallel":  # pragma: no cover
    raise ImportError("parallel/ is the package lopa_ascend.parallel: import it by that name")
