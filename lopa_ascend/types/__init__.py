"""The nouns that every room shares: plain data, without torch and without imports of ours."""

from lopa_ascend.types.decode import (
    BranchRecord,
    Edit,
    Fill,
    GappedText,
    RowPlan,
    RowResult,
    SequencePlan,
    StepRecord,
    winner_rank,
)
from lopa_ascend.types.grammar import Grammar, GrammarError
from lopa_ascend.types.model import DREAM, ModelProperties
from lopa_ascend.types.output import Alternatives, GenerationOutput, Progress, TokenRun, Update
from lopa_ascend.types.stats import EngineStats, GraphStats, RankReport, Traffic
from lopa_ascend.types.step import KVShape, PageCopy, Scoring
from lopa_ascend.types.thinking import Thinking

__all__ = [
    "DREAM",
    "Alternatives",
    "BranchRecord",
    "EngineStats",
    "Edit",
    "Fill",
    "GappedText",
    "GenerationOutput",
    "Grammar",
    "GrammarError",
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
    "StepRecord",
    "Thinking",
    "TokenRun",
    "Traffic",
    "Update",
    "winner_rank",
]
