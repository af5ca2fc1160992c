"""How many types of ours a request passes through."""

from __future__ import annotations

import pytest

from ci.types import MOST, types_of


@pytest.mark.parametrize("kind", MOST)
def test_a_request_passes_through_few_types(kind: str) -> None:
    names = types_of(kind)
    assert len(names) <= MOST[kind], "\n".join(names)
    assert {"lopa_ascend.core.Request", "lopa_ascend.core.Step", "lopa_ascend.types.output.Update"} <= {*names}
    assert ("lopa_ascend.graph.inputs.HostView" in names) == (kind == "graph")
