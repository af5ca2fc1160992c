"""The arithmetic of a GPU's kernels by their shapes: tiles that are dealt out to its SMs in waves, and the L2 cache.

A wave takes as long as its last tile, so 144 tiles on 132 SMs take as long as 264. The libraries for bf16 and fp8
choose the best of several tiles, and split a product's inputs where it has few tiles. The operands of this project's
int8 kernel come from the L2 cache anew for each tile, and it does not split. Its attention reads the keys of a group of
rows once for each tile of them.
"""

from __future__ import annotations

import math

from scripts.bench.plan.devices import Device
from scripts.bench.plan.tasks import Task

TILES = ((64, 128), (128, 128), (128, 192), (128, 256), (256, 128))
"""(tokens, outputs) of a library's tile."""
SPLITS = (1, 2, 4, 8)
"""Parts into which it splits the inputs of a product."""
INT8_TILE = 128
"""Tokens and outputs of a tile of the int8 kernel, at most."""
KEYS_OF_A_PART = 512
"""No part of the keys has fewer."""


def seconds(task: Task, device: Device, precision: str) -> float:
    """The time of a product or an attention, without its fixed cost and the traffic of memory."""
    if task.kind == "attention":
        return _attention(task.shape, device, precision)
    if precision == "w8a8":
        return _int8_product(task.shape, device)
    efficiency = device.fp8_efficiency if precision == "fp8" else device.compute_efficiency
    rate = device.peak_flops(precision) * efficiency / device.sms
    return min(_library_product(task.shape, tile, splits, rate, device) for tile in TILES for splits in SPLITS)


def _waves(tiles: int, device: Device) -> int:
    return math.ceil(tiles / device.sms)


def _tiles(shape: tuple[int, ...], rows: int, columns: int) -> int:
    return math.ceil(shape[0] / rows) * math.ceil(shape[1] / columns)


def _library_product(shape: tuple[int, ...], tile: tuple[int, int], splits: int, rate: float, device: Device) -> float:
    """With a tile and a number of splits, at ``rate`` FLOP/s of an SM; float32 sums of the splits go through L2."""
    (tokens, outputs, inputs), (rows, columns) = shape, tile
    waves = _waves(splits * _tiles(shape, rows, columns), device)
    sums = 8 * splits * tokens * outputs / device.l2_bandwidth if splits > 1 else 0.0
    return waves * 2 * rows * columns * inputs / splits / rate + sums


def _int8_product(shape: tuple[int, ...], device: Device) -> float:
    tokens, outputs, inputs = shape
    rows = min(INT8_TILE, 2 ** math.ceil(math.log2(max(tokens, 16))))
    columns = 32 if outputs <= 8192 and tokens <= 256 else INT8_TILE
    tiles, rate = _tiles(shape, rows, columns), device.int8_flops * device.int8_efficiency / device.sms
    arithmetic = _waves(tiles, device) * 2 * rows * columns * inputs / rate
    return max(arithmetic, tiles * (rows + columns) * inputs / device.l2_bandwidth)


def _attention(shape: tuple[int, ...], device: Device, precision: str) -> float:
    """Keys are split where that gives more SMs a tile; the parts are merged by a kernel of their own."""
    rows, groups, keys, dim = shape
    tiles = groups * math.ceil(rows / device.attention_rows)
    splits = max(1, min(device.attention_splits, device.sms // tiles, keys // KEYS_OF_A_PART))
    of_tile = 4 * device.attention_rows * math.ceil(keys / splits) * dim
    rate = device.peak_flops(precision) * device.attention_efficiency / device.sms
    from_l2 = tiles * keys * 2 * dim * (4 if precision == "fp32" else 2) / device.l2_bandwidth
    merge = device.vector_kernel_s + device.gap_s if splits > 1 else 0.0
    return max(_waves(math.ceil(tiles * splits), device) * of_tile / rate, from_l2) + merge
