"""The CPU kernel of npu_fused_infer_attention_score, for paged keys and values.

The constraints are those of torch_npu's documents; for the layout TND, those of version 2 of the op. The documents of
version 1 exclude pages and grouped query heads in TND, although both run in practice. Heads in TND are those of the
kernel's source (ops-transformer).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.npu.lab.constraints import require, require_kind
from tests.npu.lab.kernels import kernel

NAME = "npu_fused_infer_attention_score"
KV_LENGTHS = "actual_seq_lengths_kv"
MAX_INT32 = 2**31 - 1
MIN_WORKSPACE = 512
SPLIT_QUERIES, SPLIT_KEYS = 16, 1024
"""Entries of no more queries are computed in parts of so many keys, whose results are then joined."""
UNLIMITED = MAX_INT32
"""The default of pre_tokens and next_tokens: every query attends to all keys."""


def query_spans(query: Tensor, lengths: Sequence[int] | None, layout: str, heads: int) -> list[Tensor]:
    """Checks a query tensor, and splits it into the queries [L, H, D] of every entry.

    Args:
        query: [T, H, D] in TND, [B, S, H * D] in BSH.
        lengths: in TND the cumulative numbers of queries, in BSH the number of each entry or None.
        layout: "TND" or "BSH".
        heads: query heads H.
    """
    if layout == "TND":
        require(query.dim() == 3 and query.shape[1] == heads, f"{NAME}: a TND query is [T, H, D]")
        require_kind(query.dtype == torch.bfloat16, f"{NAME}: TND takes bfloat16 alone")
        require_kind(query.shape[2] in range(16, 257, 16), f"{NAME}: TND takes heads of 16 to 256 in steps of 16")
        require(query.shape[0] <= 1 << 20, f"{NAME}: TND takes no more than 1 M tokens")
        require(lengths is not None, f"{NAME}: TND needs both length lists")
        assert lengths is not None
        require(len(lengths) <= 4096, f"{NAME}: TND takes no more than 4096 entries")
        ends = [0, *lengths]
        require(all(a <= b for a, b in pairwise(ends)), f"{NAME}: TND query lengths are cumulative")
        require(ends[-1] == query.shape[0], f"{NAME}: the last TND query length is the number of tokens")
        return [query[a:b] for a, b in pairwise(ends)]
    require(layout == "BSH", f"{NAME}: the laboratory knows the layouts TND and BSH")
    require(query.dim() == 3 and query.shape[2] % heads == 0, f"{NAME}: a BSH query is [B, S, H * D]")
    batch, span, width = query.shape
    require_kind(query.dtype in (torch.float16, torch.bfloat16), f"{NAME}: float16 or bfloat16")
    require(batch <= 65536 and width < 65535, f"{NAME}: BSH takes B <= 65536 and H * D < 65535")
    given = [span] * batch if lengths is None else list(lengths)
    require(len(given) in (1, batch), f"{NAME}: one query length, or one an entry")
    given = given * batch if len(given) == 1 else given
    require(all(length == span for length in given), f"{NAME}: the laboratory knows no padded BSH queries")
    return list(query.view(batch, span, heads, -1))


def check_pages(
    cache: Tensor, tables: Tensor, lengths: Sequence[int], spans: Sequence[Tensor], layout: str, page: int
) -> None:
    """Checks a cache of keys or of values against the page tables. A real device does not check page ids.

    Args:
        cache: [N, page, K * D].
        tables: page ids int32 [entries, pages].
        lengths: KV length of each entry.
        spans: queries of each entry.
        layout: "TND" or "BSH".
        page: positions of a page, as the call states them.
    """
    entries = len(spans)
    require(tables.dtype == torch.int32 and tables.dim() == 2, f"{NAME}: block_table is int32 [entries, pages]")
    require(tables.shape[0] == entries and len(lengths) == entries, f"{NAME}: one row and one kv length an entry")
    longest = max(len(span) for span in spans)
    sizes = range(16, 513, 16) if longest == 1 else range(128, 513, 128)
    require(page in sizes, f"{NAME}: block_size is a multiple of 128, at most 512 (of 16 for single queries)")
    if layout == "BSH":
        require(cache.dim() == 3, f"{NAME}: BSH takes a cache [N, page, K * D] alone")
    require(cache.dim() == 3 and cache.shape[1] == page, f"{NAME}: the laboratory knows caches [N, page, K * D]")
    require(cache.shape[2] <= 65535, f"{NAME}: K * D is at most 65535")
    require(cache.numel() <= MAX_INT32, f"{NAME}: a cache has no more elements than an int32 counts")
    pages = [-(-length // page) for length in lengths]
    require(min(lengths) >= 0 and max(pages) <= tables.shape[1], f"{NAME}: block_table has too few columns")
    require(sum(pages) <= cache.shape[0], f"{NAME}: N is no less than the pages of all entries, shared or not")
    for row, count in zip(tables, pages, strict=True):
        used = row[:count]
        require(bool(((used >= 0) & (used < cache.shape[0])).all()), f"{NAME}: a page id lies outside the cache")


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Tensor | None = None) -> Tensor:
    """Attention of queries [L, H, D] to keys and values [S, K, D], in float32 -> [L, H, D]. seen: bool [L, S], or None
    for all."""
    q, k, v = (x.float().transpose(0, 1) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], seen, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def attend_causally(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """As ``attend``; the last query sees all keys, and each one before it one less."""
    seen = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
    return attend(query, key, value, scale, seen)


def check_mask(mask: Tensor | None, sparse_mode: int, spans: Sequence[Tensor], kv_lengths: Sequence[int]) -> bool:
    """Whether a call is causal. By its documents the kernel takes one mask for ``sparse_mode`` 3, and does not look
    whether its content is right. They want fewer queries than keys in TND; but vllm-ascend calls the kernel in this way
    with the first tokens of each prompt, whose queries are as many as their keys."""
    if sparse_mode == 0:
        require(mask is None, f"{NAME}: the laboratory knows no mask with sparse_mode 0")
        return False
    require(sparse_mode == 3 and mask is not None, f"{NAME}: the laboratory knows sparse_mode 0, and 3 with a mask")
    assert mask is not None
    require(mask.shape == (2048, 2048) and mask.is_contiguous(), f"{NAME}: the mask is contiguous and [2048, 2048]")
    require(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"{NAME}: the mask is bool, int8 or uint8")
    require(bool((mask.bool() == torch.ones_like(mask).bool().triu(1)).all()), f"{NAME}: the mask hides what is behind")
    fits = all(len(span) <= length for span, length in zip(spans, kv_lengths, strict=True))
    require(fits, f"{NAME}: with sparse_mode 3 an entry has no more queries than keys")
    return True


@kernel(NAME)
def fused_infer_attention_score(  # noqa: PLR0913
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    scale: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    input_layout: str = "BSH",
    block_size: int = 0,
    atten_mask: Tensor | None = None,
    sparse_mode: int = 0,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    used = [name for name, given in others.items() if isinstance(given, Tensor) or given not in (None, 0, False)]
    require(not used, f"{NAME}: the laboratory knows no {', '.join(used)}")
    require(pre_tokens == next_tokens == UNLIMITED, f"{NAME}: the laboratory knows no bands")
    require(block_table is not None, f"{NAME}: the laboratory knows paged keys alone")
    require(actual_seq_lengths_kv is not None, f"{NAME}: paged keys need actual_seq_lengths_kv")
    assert block_table is not None
    assert actual_seq_lengths_kv is not None
    kv_heads = num_key_value_heads or num_heads
    require(num_heads <= 256 and num_heads % kv_heads == 0, f"{NAME}: at most 256 heads, a multiple of the KV heads")
    require(num_heads // kv_heads <= 64, f"{NAME}: at most 64 query heads a KV head")
    require(all(x.is_contiguous() for x in (query, key, value)), f"{NAME}: contiguous query, key and value")
    require(query.dtype == key.dtype == value.dtype and key.shape == value.shape, f"{NAME}: one dtype, equal caches")
    spans = query_spans(query, actual_seq_lengths, input_layout, num_heads)
    size = spans[0].shape[-1]
    require_kind(size % 16 == 0, f"{NAME}: heads of a multiple of 16")
    require(size <= 512, f"{NAME}: heads of at most 512")
    for cache in (key, value):
        check_pages(cache, block_table, actual_seq_lengths_kv, spans, input_layout, block_size)
        require(cache.shape[2] == kv_heads * size, f"{NAME}: a cache holds K * D elements a position")
    is_causal = check_mask(atten_mask, sparse_mode, spans, actual_seq_lengths_kv)
    compute = attend_causally if is_causal else attend
    out = query.new_empty((sum(map(len, spans)), num_heads, size))
    ends = accumulate(map(len, spans))
    for span, table, length, end in zip(spans, block_table.long(), actual_seq_lengths_kv, ends, strict=True):
        pages = table[: -(-length // block_size)]
        k, v = (cache[pages].view(-1, kv_heads, size)[:length] for cache in (key, value))
        out[end - len(span) : end] = compute(span, k, v, scale)
    return out.view(query.shape), query.new_zeros(1, dtype=torch.float32)


# In a captured graph, the workspace is allocated before the launch, and the kernel writes into tensors that are given.


def kernel_kind(*, input_layout: str = "BSH", actual_seq_lengths: Sequence[int] | None = None, **_others: Any) -> str:
    """The kernel that a call of attention is: the newer one for TND, and for BSH one for single queries and one for
    more. A task of a graph cannot become another one. That KV lengths do not choose it is taken from the sources of
    the tiling."""
    if input_layout == "TND":
        return "FusedInferAttentionScore (TND)"
    single = actual_seq_lengths is not None and max(actual_seq_lengths) == 1
    return "IncreFlashAttention" if single else "PromptFlashAttention"


def workspace_bytes(query: Tensor, num_heads: int, layout: str, kv_lengths: Sequence[int]) -> int:
    """Bytes that the kernel writes for partial results: entries of few queries are split by their keys."""
    heads = num_heads
    size = query.shape[-1] if layout == "TND" else query.shape[-1] // heads
    queries = query.shape[0] if layout == "TND" else query.shape[0] * query.shape[1]
    splits = max(-(-length // SPLIT_KEYS) for length in kv_lengths)
    is_split = queries <= SPLIT_QUERIES * len(kv_lengths) and splits > 1
    return MIN_WORKSPACE + (4 * queries * heads * (size + 2) * splits if is_split else 0)


@kernel(f"_{NAME}_get_max_workspace")
def max_workspace(query: Tensor, *_args: Any, **options: Any) -> Tensor:
    """For the most keys that the page tables hold, as the host computes it without the KV lengths."""
    entries, pages = options["block_table"].shape
    most = [pages * options["block_size"]] * entries
    size = workspace_bytes(query, options.get("num_heads", 1), options.get("input_layout", "BSH"), most)
    return query.new_empty(size, dtype=torch.uint8)


def require_workspace(query: Tensor, *_args: Any, workspace: Tensor | None = None, **options: Any) -> int:
    """The bytes that a call with these KV lengths writes to its workspace. Fails if that is smaller: a device does not
    compare, and writes into other tensors of the pool."""
    layout = options.get("input_layout", "BSH")
    needed = workspace_bytes(query, options.get("num_heads", 1), layout, options[KV_LENGTHS])
    has = 0 if workspace is None else workspace.numel()
    require(needed <= has, f"{NAME}: needs {needed} bytes of workspace for these KV lengths and has {has}")
    return needed


@kernel(f"{NAME}.out")
def fused_infer_attention_score_out(
    query: Tensor, key: Tensor, value: Tensor, *, workspace: Tensor | None = None, out: Sequence[Tensor], **options: Any
) -> tuple[Tensor, ...]:
    written = require_workspace(query, key, value, workspace=workspace, **options)
    assert workspace is not None
    workspace[:written].fill_(255)
    for target, result in zip(out, fused_infer_attention_score(query, key, value, **options), strict=True):
        target.copy_(result)
    return tuple(out)
