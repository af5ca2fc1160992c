"""The families of models in fused ops, a file each: all that is known of them but the forward pass. Without torch."""

from lopa_ascend.families.family import Family
from lopa_ascend.families.reading import read_config
from lopa_ascend.families.recommended import ignored_sampling, recommendations, recommended_decoding
from lopa_ascend.families.registry import FAMILIES, family_in, family_of, register_family, with_name
from lopa_ascend.families.table import HEAD, Row, Table

__all__ = [
    "FAMILIES",
    "HEAD",
    "Family",
    "Row",
    "Table",
    "family_in",
    "family_of",
    "ignored_sampling",
    "read_config",
    "recommendations",
    "recommended_decoding",
    "register_family",
    "with_name",
]
