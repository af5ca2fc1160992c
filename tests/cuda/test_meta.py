"""Whole compiled steps on tensors without memory: nothing waits for the device or lies elsewhere, and their kernels.

The interpreter runs on the CPU, where a forgotten ``.to(device)`` is not seen; here it is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from lopa_ascend.backend.cuda.ops import CudaOps
from lopa_ascend.config import ModelConfig
from lopa_ascend.families import FAMILIES
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.inputs import empty_states
from lopa_ascend.graph.step import DecodeStep
from lopa_ascend.graph.tensors import Storage, flatten, input_size, make_constants, view_inputs
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.model.registry import find_decoder
from lopa_ascend.parallel.collectives import ALONE
from lopa_ascend.score.greedy import GreedyScore
from tests.made_weights import made_weights

META = torch.device("meta")
VOCABULARY = 512
MAKES_NOTHING = {"empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view", "_reshape_alias"}
"""Ops besides views that launch no kernel."""


class Kernels(TorchDispatchMode):
    """Counts the kernels that are launched while it is entered. Tensors must lie on ``META``.

    Attributes:
        counts: by the names of torch's ops and of our kernels.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        monkeypatch.setattr(GridExecutor, "__call__", self._launch)

    def _note(self, name: str, arguments: Any) -> None:
        elsewhere = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor) and x.device != META]
        assert not elsewhere, f"{name} takes a tensor that is not on the device: {elsewhere}"
        self.counts[name] += 1

    @property
    def _launch(self) -> Any:
        return lambda kernel, *args, **kwargs: self._note(kernel.fn.__name__, (args, kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in MAKES_NOTHING:
            self._note(name, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def config(model_type: str, num_layers: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_layers=num_layers, num_heads=4, num_kv_heads=2,
        head_dim=16, max_position_embeddings=512, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=False,
        attention_bias=model_type == "Dream", mask_token_id=VOCABULARY - 1, eos_token_ids=(0,), dtype="bfloat16",
        model_type=model_type,
    )  # fmt: skip


def kernels_of(
    monkeypatch: pytest.MonkeyPatch, model_type: str, num_layers: int, *, is_int8: bool, confidence: str = "max_prob",
    acceptance: str = "published", is_full: bool = False,
) -> Counter[str]:  # fmt: skip
    """The kernels of a step of 2 requests with 3 branches each."""
    ops, sizes, family = CudaOps(META), config(model_type, num_layers), FAMILIES[model_type]
    weights = made_weights(
        family, sizes, lambda _, shape, dtype: torch.empty(shape, dtype=dtype, device=META), is_int8=is_int8
    )
    model = find_decoder(family)(family, sizes, weights, ops, ALONE, 512)
    bucket = Bucket(
        sequences=2, blocks=2, pages=2, branches=3, slots=3, block_length=32, max_blocks=2, full_attention=is_full,
        logit_shift=model.properties.logit_shift,
    )  # fmt: skip
    hidden = torch.empty(2 * (1 + bucket.max_blocks) + bucket.tokens, 64, dtype=torch.bfloat16, device=META)
    constants = make_constants(bucket, 8 * PAGE_SIZE)
    cache = torch.empty(2, num_layers, 16, PAGE_SIZE, 2, 16, dtype=torch.bfloat16, device=META)
    given = flatten(
        view_inputs(torch.empty(input_size(bucket), dtype=torch.int32, device=META), bucket),
        type(constants)(*(tensor.to(META) for tensor in constants)),
        Storage(empty_states(2, bucket).to(META), hidden),
        (cache[0].unbind(), cache[1].unbind()),
    )
    score = GreedyScore(range(VOCABULARY), VOCABULARY - 1, VOCABULARY, ALONE, ops, confidence)
    step = DecodeStep(bucket, model, score, ALONE, acceptance)
    lengths = torch.empty(2 * 3 * bucket.entries, dtype=torch.int32, device=META)
    with Kernels(monkeypatch) as kernels:
        step(given, lengths)
    return kernels.counts


def counts(monkeypatch: pytest.MonkeyPatch, model_type: str, **options: Any) -> tuple[Counter[str], int]:
    """The kernels of a layer, and the number of those beside the layers."""
    one, two = (kernels_of(monkeypatch, model_type, number, **options) for number in (1, 2))
    layer = two - one
    return layer, one.total() - layer.total()


@pytest.mark.parametrize("model_type", ["Dream", "sdar"])
def test_kernels_of_a_layer(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    attention = {"norm_rows": 2, "rope_and_write": 1, "attend_tile": 1}
    layer, beside = counts(monkeypatch, model_type, is_int8=False)
    products = {"addmm": 1, "mm": 3} if model_type == "Dream" else {"mm": 4}  # with biases of q, k and v, or none
    assert (layer, beside) == ({**attention, **products, "swiglu_rows": 1}, 104)
    layer, beside = counts(monkeypatch, model_type, is_int8=True)
    assert (layer, beside) == ({**attention, "multiply_int8": 4, "quantize_rows": 2}, 104)


@pytest.mark.parametrize(("acceptance", "number"), [("published", 104), ("verified", 123), ("exact", 144)])
@pytest.mark.parametrize(("confidence", "more"), [("max_prob", 0), ("margin", 2), ("neg_entropy", 0)])
def test_kernels_beside_the_layers(
    monkeypatch: pytest.MonkeyPatch, acceptance: str, number: int, confidence: str, more: int
) -> None:
    options = {"is_int8": False, "confidence": confidence, "acceptance": acceptance}
    assert counts(monkeypatch, "Dream", **options)[1] == number + more
    assert counts(monkeypatch, "Dream", **options, is_full=True)[1] == number + more + 8


def test_what_lies_elsewhere_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(3, 16, device=META)
    with (
        Kernels(monkeypatch),
        pytest.raises(AssertionError, match="norm_rows takes a tensor that is not on the device"),
    ):
        CudaOps(META).rms_norm(x, torch.ones(16), 1e-6)
    with Kernels(monkeypatch), pytest.raises(RuntimeError, match="meta"):
        x.sum().item()
