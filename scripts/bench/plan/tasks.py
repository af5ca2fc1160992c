"""What one rank computes in a decoding step, task by task: counts, bytes and FLOPs of a compiled step.

Tests hold the list of an NPU to the tasks that npugraph_ex captures of Dream-7B (tests/data/captured_tasks.json), and
that of a GPU to the kernels of a captured step. Compiled steps compute every row whole, so positions that branches
share count once for each row, unless ``computed`` leaves them out. Left out: padding to buckets, prompts, and rounds
without branches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lopa_ascend.config import ExpertsConfig, ModelConfig
from lopa_ascend.families import FAMILIES
from scripts.arguments import InputError

PRECISIONS = ("bf16", "w8a8", "fp8", "fp32")
"""Number formats of the linear layers' weights. Embedding, head, keys and values are bf16 with "w8a8" and "fp8"."""
NARROW = ("w8a8", "fp8")
"""Formats of one byte, with a float32 scale for each output channel."""
EXCHANGED = 8
"""Bytes of a position that branch-parallel groups exchange: token and probability."""
MERGED = 16
"""Bytes of a position that a tensor-parallel rank tells of its shard: best token, its logit and share, the total."""
OTHER_TASKS = 110
"""Small tasks of a step outside its layers, beside those that move logits: embedding, policy, states."""
GPU_OTHER_TASKS = 99
"""The same on a GPU, where one kernel reads the logits."""
LOGIT_PASSES = {"cast": 6, "mask": 8, "maximum": 4, "softmax": 8}
"""Bytes of each logit that is read or written, by task: from the model's dtype, and then as float32."""
SPLIT_TASKS = 3
"""q, k and v are copied out of their product."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one group of ranks decodes at a time."""

    precision: str = "bf16"
    tp: int = 1
    bp: int = 1
    k: int = 3
    """Lookahead branches beside the anchor."""
    window: int = 128
    """Positions of a branch that one pass computes."""
    context: int = 1024
    """Positions in front of the window whose keys and values are cached."""
    requests: int = 1
    tpf: float = 1.0
    """Tokens per forward pass of each request."""
    block: int = 32
    """Positions that are committed together."""
    computed: float = 1.0
    """Share of the rows' blocks that the step computes: those of a lookahead that lie before its own cell equal the
    anchor's."""
    predicted: float = 1.0
    """Share of the computed positions that go through the output head."""

    @property
    def rows(self) -> int:
        """Rows that the busiest rank computes."""
        return self.requests * -(-(self.k + 1) // self.bp)

    @property
    def tokens(self) -> int:
        """Positions that the busiest rank computes."""
        return math.ceil(self.rows * self.window * self.computed)

    @property
    def head_tokens(self) -> int:
        """Those of them whose logits it computes."""
        return math.ceil(self.tokens * self.predicted)


class Task(NamedTuple):
    """A kernel, or a collective, and how often a step has it."""

    kind: str
    """"product", "head", "attention", "small", "sum" (an all-reduce), "merge" or "exchange" (all-gathers of the tensor
    and of the branch parallel ranks)."""
    bytes: float
    """That it moves from and to memory; of a collective those of its result."""
    flops: float = 0
    times: int = 1
    shape: tuple[int, ...] = ()
    """Of a product: tokens, outputs and inputs. Of an attention: rows that share keys, such groups of rows, keys, and
    the size of a head."""


def head_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Weights of the output head on a rank."""
    return model.vocab_shard(tp) * model.hidden_size


def _products(model: ModelConfig, tp: int, width: int) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of a layer's products on a rank: q, k and v; o; gate and up; down. ``width``: of the MLP, or of
    the one that all tokens take beside their experts."""
    heads, inner = model.local_heads(tp) * model.head_dim, width // tp
    hidden, qkv = model.hidden_size, heads + 2 * model.local_kv_heads(tp) * model.head_dim
    return (qkv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)


def _layers(model: ModelConfig) -> tuple[tuple[int, int, ExpertsConfig | None], ...]:
    """Number of layers, width of their MLP and their experts, for each kind of layer that the model has."""
    experts = model.experts
    if experts is None:
        return ((model.num_layers, model.intermediate_size, None),)
    dense = (experts.first_layer, model.intermediate_size, None)
    return dense, (model.num_layers - experts.first_layer, experts.shared_inner, experts)


def weight_bytes(model: ModelConfig, precision: str, tp: int = 1) -> tuple[float, int]:
    """Bytes of linear layers and of the head on a rank. A step reads them all, of experts those that its tokens take.

    The head of a model in a narrow format stays bf16, and routers are float32. The embedding's rows are left out.
    """
    layers = 0.0
    for count, width, experts in _layers(model):
        each = sum(_product(precision, 0, *product).bytes for product in _products(model, tp, width))
        if experts is not None:
            of_expert = sum(_product(precision, 0, *product).bytes for product in _expert_products(model, tp, experts))
            each += experts.num_experts * (of_expert + 4 * model.hidden_size)
        layers += count * each
    return layers, head_parameters(model, tp) * element_bytes(precision)


def _product(precision: str, tokens: int, outputs: int, inputs: int, layers: float = 1) -> Task:
    """A product with the weights of so many linear layers, each of which takes its share of the tokens."""
    size = element_bytes(precision)
    weight_size, scale = (1, 4) if precision in NARROW else (size, 0)
    moved = layers * outputs * (inputs * weight_size + scale) + tokens * (inputs * weight_size + outputs * size)
    return Task("product", moved, 2 * tokens * outputs * inputs, shape=(tokens, outputs, inputs))


def _expert_products(model: ModelConfig, tp: int, experts: ExpertsConfig) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of an expert's products on a rank: gate and up; down."""
    return (2 * experts.inner // tp, model.hidden_size), (model.hidden_size, experts.inner // tp)


def element_bytes(precision: str) -> int:
    """Bytes of a number in the head, in activations, and in keys and values."""
    return 4 if precision == "fp32" else 2


def kv_bytes_per_position(model: ModelConfig, precision: str, tp: int = 1) -> int:
    """Bytes of a position's keys and values in all layers of a rank."""
    return 2 * model.num_layers * model.local_kv_heads(tp) * model.head_dim * element_bytes(precision)


def all_reduce_bytes(model: ModelConfig, work: Workload) -> int:
    """Bytes of the hidden states that tensor-parallel ranks sum up in one all-reduce."""
    return work.tokens * model.hidden_size * element_bytes(work.precision)


def memory_bytes(model: ModelConfig, work: Workload) -> float:
    """Bytes that a rank must hold: weights with the whole embedding, and keys and values of its rows.

    The positions in front of the window are shared by a request's rows. A tied head is held beside the embedding,
    transposed for the product, as on an NPU.
    """
    layers, head = weight_bytes(model, work.precision, work.tp)
    cached = work.requests * work.context + work.tokens
    held = model.vocab_size * model.hidden_size * element_bytes(work.precision)
    return layers + head + held + cached * kv_bytes_per_position(model, work.precision, work.tp)


def step_tasks(model: ModelConfig, work: Workload, *, on_gpu: bool = False) -> Iterator[Task]:
    """The tasks of a step, on an NPU or on a GPU. InputError if the model cannot be split over ``tp`` ranks, or the
    precision is unknown."""
    if work.tp not in model.tensor_parallel_sizes():
        sizes = ", ".join(map(str, model.tensor_parallel_sizes()))
        raise InputError(f"tp is {work.tp}, but the model can be split over {sizes} ranks")
    if work.precision not in PRECISIONS:
        raise InputError(f"unknown precision {work.precision!r}; choose one of {', '.join(PRECISIONS)}")
    for count, width, experts in _layers(model):
        of_layer = [
            *_layer_tasks(model, work, width, on_gpu),
            *(_expert_tasks(model, work, experts) if experts else ()),
        ]
        for task in of_layer:
            yield task._replace(times=task.times * count)
    yield from _other_tasks(model, work, on_gpu)


def _expert_tasks(model: ModelConfig, work: Workload, experts: ExpertsConfig) -> Iterator[Task]:
    """What a mixture of experts adds to a layer. All experts are equally likely, so that n tokens take
    E (1 - (1 - taken / E) ** n) of them; a step of one request reads fewer, as its tokens are alike."""
    size, tokens, hidden = element_bytes(work.precision), work.tokens, model.hidden_size
    number, pairs = experts.num_experts, tokens * experts.per_token
    taken = number * (1 - (1 - experts.per_token / number) ** tokens)
    yield Task("product", 4 * (number * hidden + tokens * (hidden + number)), 2 * tokens * number * hidden)  # router
    for outputs, inputs in _expert_products(model, work.tp, experts):
        yield _product(work.precision, pairs, outputs, inputs, taken)._replace(shape=())
    per_token = {
        "cast": (size + 4) * hidden,
        "choice": 8 * number,
        "sort by expert": (1 + experts.per_token) * hidden * size,
        "swiglu": experts.per_token * 3 * (experts.inner // work.tp) * size,
        "sum": (1 + experts.per_token) * hidden * size,
    }
    for moved in per_token.values():
        yield Task("small", tokens * moved)


def _layer_tasks(model: ModelConfig, work: Workload, width: int, on_gpu: bool) -> Iterator[Task]:
    size, tokens = element_bytes(work.precision), work.tokens
    for outputs, inputs in _products(model, work.tp, width):
        yield _product(work.precision, tokens, outputs, inputs)
    heads, kv = model.local_heads(work.tp) * model.head_dim, model.local_kv_heads(work.tp) * model.head_dim
    seen = work.context + work.window
    keys = work.rows * seen * 2 * kv * size
    queries, kv_heads = min(work.block, work.window), model.local_kv_heads(work.tp)
    groups = -(-tokens // queries) * kv_heads
    shape = (queries * model.local_heads(work.tp) // kv_heads, groups, seen, model.head_dim)
    yield Task("attention", 2 * tokens * heads * size + keys, 4 * tokens * seen * heads, shape=shape)
    vectors = {
        "norms": (2, 8 * model.hidden_size),  # each reads a sum and its addend, and writes the norm and the sum
        "swiglu": (1, 3 * width // work.tp),
        "rope": (1, 4 * (heads + 2 * kv)),  # reads and writes q, k and v, and reads cosines and sines of each head
        "split": (SPLIT_TASKS, 2 * (heads + 2 * kv)),
        "keys and values": (1, 4 * kv),
    }
    if family := FAMILIES.get(model.model_type):
        normed = [row for row in family.table.layer if row.ours in ("q_norm.weight", "k_norm.weight")]
        vectors["norms of q and k"] = (min(len(normed), 1) if on_gpu else len(normed), 2 * (heads + kv))
    if on_gpu:  # cosines and sines are half as many there, and kernels read q, k and v where their product wrote them
        vectors |= {"rope": (1, 3 * (heads + 2 * kv)), "split": (0, 0)}
    for count, elements in filter(all, vectors.values()):
        yield Task("small", tokens * elements * size / count, times=count)
    if (
        work.precision in NARROW
    ):  # norms and SwiGLU have forms that quantise; the input of the output projection needs a kernel
        yield Task("small", tokens * heads * (size + 1))
    if work.tp > 1:
        yield Task("sum", all_reduce_bytes(model, work), times=2)


def _other_tasks(model: ModelConfig, work: Workload, on_gpu: bool) -> Iterator[Task]:
    tokens, size, shard = work.tokens, element_bytes(work.precision), model.vocab_shard(work.tp)
    parameters, predicted = head_parameters(model, work.tp), work.head_tokens
    moved = parameters * size + predicted * (model.hidden_size + shard) * size
    yield Task("head", moved, 2 * predicted * parameters, shape=(predicted, shard, model.hidden_size))
    for per_logit in (size,) if on_gpu else LOGIT_PASSES.values():
        yield Task("small", predicted * shard * per_logit)
    # The embedding, the hidden states that predict and those that are kept are each read and written.
    others = GPU_OTHER_TASKS if on_gpu else OTHER_TASKS
    yield Task("small", 10 * tokens * model.hidden_size * size / others, times=others)
    if work.tp > 1:
        yield Task("merge", MERGED * work.tp * tokens)
    if work.bp > 1:
        yield Task("exchange", EXCHANGED * work.bp * tokens)
