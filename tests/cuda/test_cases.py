"""The calls with which the self-test examines a GPU, small and in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lopa_ascend.backend.cuda.ops import CudaOps
from tests.cuda.cases import MOST, cases
from tests.kernel_cases import RAGGED, Case, error_of

OPS = CudaOps(torch.device("cpu"))
SIZES = replace(RAGGED, hidden=72, inner=40, heads=4, kv_heads=2, dim=24, vocabulary=301, tokens=5, sequences=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_kernel(dtype: torch.dtype) -> None:
    errors = {case.name: (error_of(case, case.run()), case.most or MOST[dtype]) for case in cases(OPS, SIZES, dtype)}
    assert {name: errors[name] for name in errors if errors[name][0] > errors[name][1]} == {}
    assert len(errors) >= 26


def test_an_error_is_a_share_of_the_largest_value() -> None:
    right = torch.tensor([1.0, -4.0])
    case = Case("", lambda: right, lambda: right)
    assert error_of(case, right) == 0
    assert error_of(case, right + torch.tensor([0.0, 1.0])) == 0.25
    assert error_of(replace(case, read=lambda found: [found]), right * torch.nan) == torch.inf
