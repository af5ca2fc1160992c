"""Several ranks: launch, mesh, collectives, placement of branches, watch over processes. Imports as
``lopa_ascend.parallel``."""

if __name__ != "lopa_ascend.parallel":  # pragma: no cover
    raise ImportError("parallel/ is the package lopa_ascend.parallel: import it by that name")
