"""The nouns that every room shares: plain data, without torch and without imports of ours."""

from lopa_ascend.types.decode import BranchRecord, Fill, RowPlan, RowResult, SequencePlan, StepRecord, winner_rank
from lopa_ascend.types.model import SERVED, ModelProperties
from lopa_ascend.types.output import Alternatives, GenerationOutput, Progress, Update
from lopa_ascend.types.stats import EngineStats, GraphStats, RankReport, Traffic
from lopa_ascend.types.step import (
    Demand,
    KVShape,
    PageCopy,
    Scoring,
    SequenceResult,
    SequenceStep,
    Share,
    StepPlan,
    StepResult,
)

__all__ = [
    "SERVED",
    "Alternatives",
    "BranchRecord",
    "Demand",
    "EngineStats",
    "Fill",
    "GenerationOutput",
    "GraphStats",
    "KVShape",
    "ModelProperties",
    "PageCopy",
    "Progress",
    "RankReport",
    "RowPlan",
    "RowResult",
    "Scoring",
    "SequencePlan",
    "SequenceResult",
    "SequenceStep",
    "Share",
    "StepPlan",
    "StepRecord",
    "StepResult",
    "Traffic",
    "Update",
    "winner_rank",
]
