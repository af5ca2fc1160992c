"""The Muon optimizer, for matrices."""

from __future__ import annotations

import math

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x x^T x and (x x^T)^2 x in one step."""


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz steps (Jordan et al. 2024), batched over equal shapes.

    torch.optim.Muon does the same in bfloat16, one matrix at a time; on CPUs without bf16 units that is several times
    slower.

    Args:
        params: matrices.
        lr: learning rate.
        dtype: of the products of the Newton-Schulz steps.
        momentum: share of the old momentum that is kept.
        weight_decay: as a share of ``lr``.
    """

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        lr: float,
        dtype: torch.dtype = torch.float32,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for param in group["params"]:
                by_shape.setdefault(param.shape, []).append(param)
            decay = 1 - group["lr"] * group["weight_decay"]
            for params in by_shape.values():
                momenta = torch.stack([self._momentum(param, group["momentum"]) for param in params])
                directions = orthogonalise(momenta, self.dtype)
                scale = 0.2 * math.sqrt(max(directions.shape[-2:]))
                for param, direction in zip(params, directions, strict=True):
                    param.mul_(decay).add_(direction, alpha=-group["lr"] * scale)

    def _momentum(self, param: torch.nn.Parameter, momentum: float) -> torch.Tensor:
        """Updates a parameter's momentum; returns the gradient with Nesterov momentum."""
        assert param.grad is not None
        average = self.state[param].setdefault("momentum", torch.zeros_like(param))
        average.lerp_(param.grad, 1 - momentum)
        return param.grad.lerp(average, momentum)


def orthogonalise(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Five Newton-Schulz steps, in ``dtype``, from each matrix [n, rows, columns] towards the nearest semi-orthogonal
    one."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        xx = x @ x.mT
        x = a * x + (b * xx + c * xx @ xx) @ x
    return (x.mT if tall else x).to(matrices.dtype)
