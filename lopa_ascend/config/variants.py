"""What ``config.json`` may ask for that models in fused ops cannot do.

Models in plain torch read such fields themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lopa_ascend.config.files import ConfigError, Fields
from lopa_ascend.config.int8_files import CONFIG_FIELD, uses_compressed_tensors

_ONLY_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "rope_scaling": (None,),
    "use_sliding_window": (False,),
}
"""Field -> the values that change nothing; the first one is also that of a missing field."""
_FULL = "full_attention"


def refuse_variants(fields: Fields, rope: Mapping[str, Any], num_layers: int) -> None:
    """Refuses activations, attention, positions and formats of weights that models in fused ops do not have.

    Args:
        fields: of ``config.json``.
        rope: its field ``rope_parameters``.
        num_layers: the model's.

    Raises:
        ConfigError: a field asks for one of them.
    """
    for name, allowed in _ONLY_VALUES.items():
        fields.expect(name, allowed, default=allowed[0])
    if not uses_compressed_tensors(fields.values):
        fields.expect(CONFIG_FIELD, (None,), default=None)
    layer_types = fields.values.get("layer_types")
    if layer_types is not None and layer_types != [_FULL] * num_layers:
        raise fields.error("layer_types", f"{num_layers} times {_FULL!r}: other kinds of attention are not supported")
    in_rope = Fields(rope, f"{fields.source}: rope_parameters")
    for name in rope:
        if name not in ("rope_theta", "rope_type", "type", "partial_rotary_factor"):
            raise ConfigError(f"{in_rope.source} has the field {name!r}, expected rope_theta and rope_type alone")
    in_rope.expect("rope_type", ("default",), default="default")
    in_rope.expect("type", ("default",), default="default")
    in_rope.expect("partial_rotary_factor", (1,), default=1)
