"""The Triton kernels of the CUDA backend.

Every kernel computes in float32 and rounds once, as ``backend/cpu/definition.py`` says, and no row or attention entry
depends on those beside it: a program handles whole rows, or a tile whose rows are products and sums of their own. Sizes
have the letters of ``backend/interface.py``. Sizes that change from step to step are not specialised, nor is the
alignment of what may begin at any row, so that serving compiles nothing. A model's sizes are: only if a row is known to
begin at a multiple of 16 bytes does Triton load so many at a time.
"""

# Triton reads the annotations, so they must not become texts: no "from __future__ import annotations" here.
import triton
import triton.language as tl

# ---- rows ------------------------------------------------------------------------------------------------------------


@triton.jit
def magnitudes(x):
    """|x|, and infinity for NaN. A scale of infinity makes the whole row NaN where it is used: maxima skip NaN."""
    return tl.where(x != x, float("inf"), tl.abs(x))


@triton.jit
def scale_of(largest, codes):
    """The scale of a row with this largest magnitude, in the number format of a tensor of codes."""
    return tl.div_rn(largest, 127.0 if codes.dtype.element_ty == tl.int8 else 448.0)


@triton.jit
def as_codes(x, scale, codes):
    """x / scale in the number format of ``codes``, rounded half to even: beside 1.5 * 2^23 a float32 has no room for a
    fraction. In float8 e4m3 the last place is 2^-3 of the power of 2 below the number, but at least 2^-9; the
    conversion, which in Triton's interpreter drops carries, then rounds nothing."""
    quotient = tl.div_rn(x, tl.where(scale == 0, 1.0, scale) + tl.zeros_like(x))
    if codes.dtype.element_ty == tl.int8:
        within = tl.minimum(tl.maximum(quotient, -127.0), 127.0)
        beside = 12582912.0
    else:
        within = tl.minimum(tl.maximum(quotient, -448.0), 448.0)
        power = (within.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        beside = tl.maximum(power, 0.015625) * 1572864.0
    return ((within + beside) - beside).to(codes.dtype.element_ty)


@triton.jit
def norm_rows(
    x, residual, weight, out, scales, size, eps,
    ADDS: tl.constexpr, QUANTIZES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RMSNorm of one row of x, or of x + residual, which then replaces the residual; as codes if QUANTIZES."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    at = row * size + column
    value = tl.load(x + at, mask=inside, other=0.0)
    if ADDS:
        other = tl.load(residual + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        tl.store(residual + at, value, mask=inside)
    wide = value.to(tl.float32)
    mean = tl.sum(wide * wide) / size
    normed = wide / tl.sqrt_rn(mean + eps) * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if QUANTIZES:
        scale = scale_of(tl.max(magnitudes(normed)), out)
        tl.store(out + at, as_codes(normed, scale, out), mask=inside)
        tl.store(scales + row, scale)
    else:
        tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated(gate_up, row, column, size, inside):
    """silu(gate) * up of columns of one row [2 * size], rounded to its dtype."""
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate)) * up).to(gate_up.dtype.element_ty)


@triton.jit
def swiglu_rows(gate_up, out, size, BLOCK: tl.constexpr):
    """SwiGLU of BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    tl.store(out + row * size + column, gated(gate_up, row, column, size, inside), mask=inside)


@triton.jit
def quantize_rows(x, codes, scales, size, GATES: tl.constexpr, BLOCK: tl.constexpr):
    """One row of x as codes, or of SwiGLU of x if GATES. It is read twice, the second time from the cache, so that a
    row of any length fits into registers."""
    row = tl.program_id(0).to(tl.int64)
    largest = 0.0
    for begin in range(0, size, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < size
        if GATES:
            value = gated(x, row, column, size, inside).to(tl.float32)
        else:
            value = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(magnitudes(tl.where(inside, value, 0.0))))
    scale = scale_of(largest, codes)
    tl.store(scales + row, scale)
    for begin in range(0, size, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < size
        if GATES:
            value = gated(x, row, column, size, inside).to(tl.float32)
        else:
            value = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(codes + row * size + column, as_codes(value, scale, codes), mask=inside)


@triton.jit
def rotate_heads(
    x, weight, cos, sin, out, first, heads, eps,
    HALF: tl.constexpr, ANGLE_STRIDE: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Rotates BLOCK_HEADS heads from ``first`` on of one token, and norms each before if there is a weight. x, out:
    [heads, 2 * HALF]. cos, sin: of the first head [HALF]; of the next one ANGLE_STRIDE further."""
    head = first + tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < heads) & (pair < HALF)
    at = head * (2 * HALF) + pair
    left = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        mean = (tl.sum(left * left, 1) + tl.sum(right * right, 1)) / (2 * HALF)
        root = tl.sqrt_rn(mean + eps)[:, None]
        by_head = weight + pair + head * 0  # so that it is loaded as x is
        left = left / root * tl.load(by_head, mask=inside, other=0.0).to(tl.float32)
        right = right / root * tl.load(by_head + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = head * ANGLE_STRIDE + pair
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (left * c - right * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + HALF, (right * c + left * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_heads(
    x, weight, cos, sin, out, row_stride, heads, angle_heads, eps,
    ANGLE_STRIDE: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """``rotate_heads`` of some heads of one token. cos, sin: [T, angle_heads, HALF]."""
    token = tl.program_id(0).to(tl.int64)
    angle = token * angle_heads * HALF
    rotate_heads(
        x + token * row_stride, weight, cos + angle, sin + angle, out + token * heads * (2 * HALF),
        tl.program_id(1) * BLOCK_HEADS, heads, eps, HALF, ANGLE_STRIDE, BLOCK_HEADS, BLOCK_HALF,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "written"], do_not_specialize_on_alignment=["slots", "sources"])
def rope_and_write(
    qkv, q_weight, k_weight, cos, sin, out, k_cache, v_cache, slots, sources, row_stride, angle_heads, eps,
    tokens, written, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    ANGLE_STRIDE: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """``rotate_heads`` of some query heads of one token, or of some key heads into one flat cache position, or a copy
    of as many value heads there. The second number of a program says which of them it handles, in this order.

    qkv: rows of HEADS + 2 * KV_HEADS heads. cos, sin: [T, angle_heads, HALF].
    """
    index = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    DIM: tl.constexpr = 2 * HALF
    if block < Q_BLOCKS:
        if index < tokens:
            angle = index * angle_heads * HALF
            rotate_heads(
                qkv + index * row_stride, q_weight, cos + angle, sin + angle, out + index * HEADS * DIM,
                block * BLOCK_HEADS, HEADS, eps, HALF, ANGLE_STRIDE, BLOCK_HEADS, BLOCK_HALF,
            )  # fmt: skip
    elif index < written:
        slot = tl.load(slots + index).to(tl.int64) * (KV_HEADS * DIM)
        token = index
        if sources is not None:
            token = tl.load(sources + index).to(tl.int64)
        keys = qkv + token * row_stride + HEADS * DIM
        if block < Q_BLOCKS + KV_BLOCKS:
            angle = token * angle_heads * HALF + HEADS * ANGLE_STRIDE
            rotate_heads(
                keys, k_weight, cos + angle, sin + angle, k_cache + slot,
                (block - Q_BLOCKS) * BLOCK_HEADS, KV_HEADS, eps, HALF, ANGLE_STRIDE, BLOCK_HEADS, BLOCK_HALF,
            )  # fmt: skip
        else:
            first = (block - Q_BLOCKS - KV_BLOCKS) * BLOCK_HEADS * DIM
            column = first + tl.arange(0, 2 * BLOCK_HEADS * BLOCK_HALF)
            inside = (column < KV_HEADS * DIM) & (column < first + BLOCK_HEADS * DIM)
            value = tl.load(keys + KV_HEADS * DIM + column, mask=inside)
            tl.store(v_cache + slot + column, value, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots", "sources"])
def write_rows(k, v, k_cache, v_cache, slots, sources, k_stride, v_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the keys and values of one token to one flat cache position."""
    index = tl.program_id(0)
    slot = tl.load(slots + index).to(tl.int64)
    token = index.to(tl.int64)
    if sources is not None:
        token = tl.load(sources + index).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    tl.store(k_cache + slot * SIZE + column, tl.load(k + token * k_stride + column, mask=inside), mask=inside)
    tl.store(v_cache + slot * SIZE + column, tl.load(v + token * v_stride + column, mask=inside), mask=inside)


# ---- int8 product ----------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["scales"])
def multiply_int8(
    codes, scales, weight, weight_scales, bias, out, rows, outputs, inputs,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """A tile of int8 codes [rows, inputs] times the transpose of an int8 weight [outputs, inputs], scaled. Sums of
    integers are exact, so no tile size changes a bit."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    step = tl.arange(0, BLOCK_INPUTS)
    a = codes + row.to(tl.int64)[:, None] * inputs + step[None, :]
    b = weight + output.to(tl.int64)[None, :] * inputs + step[:, None]
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.int32)
    for begin in range(0, inputs, BLOCK_INPUTS):
        left = inputs - begin
        x = tl.load(a + begin, mask=(row[:, None] < rows) & (step[None, :] < left), other=0)
        w = tl.load(b + begin, mask=(output[None, :] < outputs) & (step[:, None] < left), other=0)
        total = tl.dot(x, w, total, out_dtype=tl.int32)
    by_output = tl.load(weight_scales + output, mask=output < outputs, other=0.0)
    by_row = tl.load(scales + row, mask=row < rows, other=0.0)
    value = total.to(tl.float32) * by_output[None, :] * by_row[:, None]
    if bias is not None:
        value += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    inside = (row[:, None] < rows) & (output[None, :] < outputs)
    at = row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


# ---- experts ---------------------------------------------------------------------------------------------------------


@triton.jit
def first_best(values, number):
    """The lowest number that has the largest value."""
    return tl.min(tl.where(values == tl.max(values), number, values.shape[0] - 1))


@triton.jit
def route_rows(
    logits, bias, ids, weights, scale,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The experts of one token, the best first, and their weights [tokens, COUNT], from the router's outputs."""
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCK)
    is_expert = number < EXPERTS
    logit = tl.load(logits + token * EXPERTS + number, mask=is_expert, other=0.0)
    score = 1.0 / (1.0 + tl.exp(-logit))
    ranking = tl.where(is_expert, score + tl.load(bias + number, mask=is_expert, other=0.0), float("-inf"))
    if KEPT < GROUPS:
        group = number // (EXPERTS // GROUPS)
        sums = tl.full((BLOCK,), float("-inf"), tl.float32)  # of a group, at its number
        for each in range(GROUPS):
            members = tl.where(group == each, ranking, float("-inf"))
            second = tl.max(tl.where(number == first_best(members, number), float("-inf"), members))
            sums = tl.where(number == each, tl.max(members) + second, sums)
        is_kept = number < 0
        for _ in range(KEPT):
            kept = first_best(sums, number)
            is_kept = is_kept | (group == kept)
            sums = tl.where(number == kept, float("-inf"), sums)
        ranking = tl.where(is_kept, ranking, float("-inf"))
    found, total = tl.zeros((BLOCK,), tl.float32), 0.0  # the weight of a place, at its number
    for place in range(COUNT):
        best = first_best(ranking, number)
        tl.store(ids + token * COUNT + place, best)
        weight = tl.sum(tl.where(number == best, score, 0.0))
        found = tl.where(number == place, weight, found)
        total += weight
        ranking = tl.where(number == best, float("-inf"), ranking)
    if COUNT > 1:
        found = found / (total + 1e-20)
    tl.store(weights + token * COUNT + number, found * scale, mask=number < COUNT)


@triton.jit
def multiply_experts(
    x, scales, weight, weight_scales, out, order, ends, outputs, inputs,
    SHARE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """A tile of the products of pairs of a token and an expert, with the transpose of that expert's weight
    [outputs, inputs]. A tile has pairs of one expert. It reads row pair / SHARE of x, and writes the pair's row of
    ``out``.

    scales: of the rows of x, float32, if x and the weight are int8; then ``weight_scales`` are [EXPERTS, outputs].
    order: the pairs, sorted by expert [pairs]. ends: how many pairs the experts up to each have together, int32
    [EXPERTS]. They lie on the device, so the grid has as many programs as there can be tiles, and those without a tile
    return.
    """
    number = tl.arange(0, BLOCK_EXPERTS)
    is_expert = number < EXPERTS
    end = tl.load(ends + number, mask=is_expert, other=0)
    count = end - tl.load(ends + number - 1, mask=is_expert & (number > 0), other=0)
    tiles = tl.cumsum((count + BLOCK_ROWS - 1) // BLOCK_ROWS)
    is_before = tiles <= tl.program_id(0)
    expert = tl.sum(is_before.to(tl.int32))
    if expert >= EXPERTS:
        return
    tile = tl.program_id(0) - tl.max(tl.where(is_before, tiles, 0))
    row = tl.max(tl.where(is_before, end, 0)) + tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_pair = row < tl.load(ends + expert)
    pair = tl.load(order + row, mask=is_pair, other=0).to(tl.int64)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    step = tl.arange(0, BLOCK_INPUTS)
    at_output = expert.to(tl.int64) * outputs + output
    a = x + (pair // SHARE)[:, None] * inputs + step[None, :]
    b = weight + at_output[None, :] * inputs + step[:, None]
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32 if scales is None else tl.int32)
    for begin in range(0, inputs, BLOCK_INPUTS):
        left = inputs - begin
        value = tl.load(a + begin, mask=is_pair[:, None] & (step[None, :] < left), other=0)
        w = tl.load(b + begin, mask=(output[None, :] < outputs) & (step[:, None] < left), other=0)
        total = tl.dot(value, w, total, input_precision="ieee", out_dtype=total.dtype)
    if scales is not None:
        by_output = tl.load(weight_scales + at_output, mask=output < outputs, other=0.0)
        by_row = tl.load(scales + pair // SHARE, mask=is_pair, other=0.0)
        total = total.to(tl.float32) * by_output[None, :] * by_row[:, None]
    inside = is_pair[:, None] & (output[None, :] < outputs)
    tl.store(out + pair[:, None] * outputs + output[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_experts(outputs, weights, shared, out, size, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of the weighted sum of a token's COUNT outputs, one after another, and of ``shared``."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(COUNT):
        pair = token * COUNT + place
        value = tl.load(outputs + pair * size + column, mask=inside, other=0.0).to(tl.float32)
        total += value * tl.load(weights + pair)
    if shared is not None:
        total += tl.load(shared + token * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=inside)


# ---- attention -------------------------------------------------------------------------------------------------------


@triton.jit
def attend_part(
    query, k_cache, v_cache, table, head, num_keys, seen_keys, begin, end, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Attention of the rows of a tile over the keys ``begin`` to ``end``: the largest score of each row, the sum of
    2^(score - largest), and the sum of the values with these weights."""
    d = tl.arange(0, BLOCK_DIM)
    key = tl.arange(0, BLOCK_KEYS)
    # Not -inf, which cannot be subtracted from itself.
    highest = tl.full((BLOCK_ROWS,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    mixed = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    for at_key in range(begin, end, BLOCK_KEYS):
        page = tl.load(table + at_key // PAGE).to(tl.int64)
        at = ((page * PAGE + at_key % PAGE + key) * KV_HEADS + head) * DIM
        # Keys and values after the last may be NaN, so they are not read.
        seen = (at_key + key < num_keys)[:, None] & (d < DIM)[None, :]
        k = tl.load(k_cache + at[:, None] + d[None, :], mask=seen, other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((at_key + key)[None, :] < seen_keys[:, None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(v_cache + at[:, None] + d[None, :], mask=seen, other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = higher
    return highest, total, mixed


@triton.jit
def merge_parts(highest, total, mixed, next_highest, next_total, next_mixed):
    """Joins the results of ``attend_part`` for some keys and for the next part."""
    higher = tl.maximum(highest, next_highest)
    fade, next_fade = tl.exp2(highest - higher), tl.exp2(next_highest - higher)
    total = total * fade + next_total * next_fade
    mixed = mixed * fade[:, None] + next_mixed * next_fade[:, None]
    return higher, total, mixed


@triton.jit
def span_of(entry, starts, length):
    """The first query of an entry, and how many it has."""
    if starts is not None:
        first = tl.load(starts + entry)
        count = tl.load(starts + entry + 1) - first
    else:
        first, count = entry * length, length
    return first, count


@triton.jit(
    do_not_specialize=["table_stride", "length", "tokens", "parts"],
    do_not_specialize_on_alignment=["tables", "kv_lengths", "starts", "causal"],
)
def attend_tile(
    q, k_cache, v_cache, out, stats, tables, kv_lengths, starts, causal, q_stride, table_stride, length, tokens, parts,
    scale, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PART: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr, ALL_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Attention of some queries of one entry and one KV head, read from pages where they lie.

    A row of the tile is one query of one of the GROUP query heads that share the KV head, so each key is read once for
    all of them. BLOCK_KEYS divides PAGE, a block of keys lies in one page, and PART is a multiple of PAGE.

    Every PART keys are attended to on their own, and merged with those before. Programs may share the parts: then each
    handles one, and ``merge_rows`` merges, in the same order and with the same operations. So neither the bits of a
    query depend on who merges, nor on what is computed beside it.

    out: [tokens, heads, DIM], or of parts that programs share float32 [parts, tokens, heads, DIM], unmerged.
    stats: their largest scores and sums of weights, float32 [parts, 2, tokens, heads]; None: programs share none.
    starts: the first query of each entry, and the number of all [entries + 1]; None if each has ``length`` of them.
    causal: of each entry 1 if it is causal, else 0; None: none is, or with ALL_CAUSAL all are.
    scale: of the scores, times log2(e), because powers of 2 are what the device computes.
    """
    entry, head = tl.program_id(1), tl.program_id(2)
    first, count = span_of(entry, starts, length)
    begin_row = tl.program_id(0) // parts * BLOCK_ROWS
    part = tl.program_id(0) % parts
    num_keys = tl.load(kv_lengths + entry)
    if begin_row >= count * GROUP or part * PART >= num_keys:
        return
    row = begin_row + tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_DIM)
    token = (first + row // GROUP).to(tl.int64)
    own_head = head * GROUP + row % GROUP
    in_span = row < count * GROUP
    in_row = in_span[:, None] & (d < DIM)[None, :]
    query = tl.load(q + token[:, None] * q_stride + own_head[:, None] * DIM + d[None, :], mask=in_row, other=0.0)
    seen_keys = tl.full((BLOCK_ROWS,), 0, tl.int32) + num_keys
    if ALL_CAUSAL:
        seen_keys -= count - 1 - row // GROUP
    elif causal is not None:
        seen_keys -= tl.load(causal + entry) * (count - 1 - row // GROUP)
    table = tables + entry.to(tl.int64) * table_stride
    heads = GROUP * KV_HEADS
    at = token * heads + own_head
    if stats is not None:
        highest, total, mixed = attend_part(
            query, k_cache, v_cache, table, head, num_keys, seen_keys, part * PART, min(num_keys, (part + 1) * PART),
            scale, KV_HEADS, DIM, PAGE, BLOCK_ROWS, BLOCK_KEYS, BLOCK_DIM,
        )  # fmt: skip
        size = tokens.to(tl.int64) * heads
        tl.store(stats + 2 * part * size + at, highest, mask=in_span)
        tl.store(stats + (2 * part + 1) * size + at, total, mask=in_span)
        tl.store(out + (part * size + at)[:, None] * DIM + d[None, :], mixed, mask=in_row)
    else:
        highest = tl.full((BLOCK_ROWS,), -3.0e38, tl.float32)
        total = tl.zeros((BLOCK_ROWS,), tl.float32)
        mixed = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
        for begin in range(0, num_keys, PART):
            next_highest, next_total, next_mixed = attend_part(
                query, k_cache, v_cache, table, head, num_keys, seen_keys, begin, min(num_keys, begin + PART),
                scale, KV_HEADS, DIM, PAGE, BLOCK_ROWS, BLOCK_KEYS, BLOCK_DIM,
            )  # fmt: skip
            highest, total, mixed = merge_parts(highest, total, mixed, next_highest, next_total, next_mixed)
        result = (mixed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] * DIM + d[None, :], result, mask=in_row)


@triton.jit(do_not_specialize=["length", "tokens"], do_not_specialize_on_alignment=["kv_lengths", "starts"])
def merge_rows(
    mixes, stats, out, kv_lengths, starts, length, tokens,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Merges the parts of some rows of one entry and one KV head; see ``attend_tile``, whose ``out`` is ``mixes``."""
    entry, head = tl.program_id(1), tl.program_id(2)
    first, count = span_of(entry, starts, length)
    begin_row = tl.program_id(0) * BLOCK_ROWS
    if begin_row >= count * GROUP:
        return
    row = begin_row + tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_DIM)
    in_span = row < count * GROUP
    in_row = in_span[:, None] & (d < DIM)[None, :]
    heads = GROUP * KV_HEADS
    at = (first + row // GROUP).to(tl.int64) * heads + head * GROUP + row % GROUP
    size = tokens.to(tl.int64) * heads
    highest = tl.full((BLOCK_ROWS,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    mixed = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    for part in range(0, tl.cdiv(tl.load(kv_lengths + entry), PART)):
        next_highest = tl.load(stats + 2 * part * size + at, mask=in_span, other=0.0)
        next_total = tl.load(stats + (2 * part + 1) * size + at, mask=in_span, other=1.0)
        next_mixed = tl.load(mixes + (part * size + at)[:, None] * DIM + d[None, :], mask=in_row, other=0.0)
        highest, total, mixed = merge_parts(highest, total, mixed, next_highest, next_total, next_mixed)
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * DIM + d[None, :], result, mask=in_row)


# ---- scores ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def score_rows(
    logits, never_chosen, stats, ids, row_stride, size, rows,
    MARGIN: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``row_stats`` of one row of logits, which is read once. stats [4, rows]: best, log_share, log_total, rest."""
    row = tl.program_id(0).to(tl.int64)
    high, total, dot, strange = -3.0e38, 0.0, 0.0, 0  # not -inf, see attend_tile
    best, best_id = float("-inf"), 0
    other = float("-inf")  # the largest logit but that of best_id
    for begin in range(0, size, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < size
        x = tl.load(logits + row * row_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
        strange += tl.sum(((x != x) | (x == float("inf"))).to(tl.int32))
        higher = tl.maximum(high, tl.max(x))
        weight = tl.exp(x - higher)
        fade = tl.exp(high - higher)
        if ENTROPY:
            products = tl.where(inside, weight * (x - higher), 0.0)
            dot = fade * (dot + total * (high - higher)) + tl.sum(products)
        total = total * fade + tl.sum(weight)
        high = higher
        choosable = x + tl.load(never_chosen + column, mask=inside, other=float("-inf"))
        here = tl.max(choosable)
        here_id = tl.min(tl.where(choosable == here, column, size))
        is_better = here > best
        if MARGIN:
            others = tl.max(tl.where(column == here_id, float("-inf"), x))
            if is_better:
                other = tl.maximum(tl.maximum(other, best), others)
            else:
                other = tl.maximum(other, tl.max(x))
        if is_better:
            best, best_id = here, here_id
    log_total = high + tl.log(total)
    if strange > 0:
        log_total = float("nan")
    tl.store(stats + row, best)
    tl.store(stats + rows + row, best - log_total)
    tl.store(stats + 2 * rows + row, log_total)
    if MARGIN:
        tl.store(stats + 3 * rows + row, other - log_total)
    if ENTROPY:
        tl.store(stats + 3 * rows + row, dot / total + high - log_total)
    tl.store(ids + row, best_id)
