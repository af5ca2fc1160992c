// A strip of a linear layer by vectors of WIDTH outputs. int8.cpp includes this once for each instruction set, in a
// namespace that defines TARGET, WIDTH, MOST_ROWS, Vector, Partial and what adds products to them.

typedef uint8 Bytes __attribute__((vector_size(4 * WIDTH)));
typedef uint8 UnalignedBytes __attribute__((vector_size(4 * WIDTH), aligned(1), may_alias));
typedef int32 Ints __attribute__((vector_size(4 * WIDTH)));
typedef int32 UnalignedInts __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef std::uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef float UnalignedFloats __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint8 FewBytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));
typedef bfloat16 Halves __attribute__((vector_size(2 * WIDTH)));
typedef bfloat16 UnalignedHalves __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

constexpr int PAIRS = STRIP / (2 * WIDTH);             // pairs of vectors in a strip
constexpr int SECOND = WIDTH == LANES ? 1 : 0;         // panels from the first vector of a pair to the second
constexpr int BESIDE = WIDTH == LANES ? 0 : 4 * WIDTH;  // and bytes within a panel

TARGET inline Vector load_bytes(const uint8* x) { return (Vector)*reinterpret_cast<const UnalignedBytes*>(x); }
TARGET inline Floats load_floats(const float* x) { return *reinterpret_cast<const UnalignedFloats*>(x); }
TARGET inline Vector four_inputs(const int8* x) {
  int32 word;
  std::memcpy(&word, x, sizeof word);
  return (Vector)(word - Ints{});
}

// The zero points of some outputs in a group of an int4 weight.
TARGET inline Floats zeros_at(const Layer& layer, int64 place) {
  if (!layer.zero) return INT4_ZERO - Floats{};
  return __builtin_convertvector(*reinterpret_cast<const FewBytes*>(layer.zero + place), Floats);
}

// Adds the products of a group with some outputs, times their scales, to a row's totals. `sum`: of the row's codes.
TARGET inline void add_group(Ints products, Floats zero, float sum, Floats factor, Total* totals) {
  // Both terms are integers below 2^24, so the difference is exact.
  const Floats exact = __builtin_convertvector(products, Floats) - zero * sum;
  *reinterpret_cast<UnalignedFloats*>(totals) += exact * factor;
}

// Adds the products of half a tile of an int8 weight and some rows to their sums.
template <int ROWS>
TARGET inline void add_int8(const uint8* weight, const int8* x, Ints (&sums)[ROWS][2]) {
  for (int quad = 0; quad < HALF / 4; quad++) {
    const uint8* at = weight + quad * 4 * LANES;
    const Vector w0 = load_bytes(at), w1 = load_bytes(at + SECOND * TILE * LANES + BESIDE);
    __builtin_prefetch(at + AHEAD, 0, FETCH);
    __builtin_prefetch(at + AHEAD + TILE * LANES, 0, FETCH);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) {
      const Vector inputs = four_inputs(x + row * TILE + 4 * quad);
      sums[row][0] = (Ints)add_products((Vector)sums[row][0], w0, inputs);
      sums[row][1] = (Ints)add_products((Vector)sums[row][1], w1, inputs);
    }
  }
}

// The same of an int4 weight.
template <int ROWS>
TARGET inline void add_int4(const uint8* weight, const int8* x, Ints (&sums)[ROWS][2]) {
  Partial partial[ROWS][2];
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; row++)
    for (int v = 0; v < 2; v++) partial[row][v] = begin_few((Vector)sums[row][v]);
#pragma GCC unroll 4
  for (int eight = 0; eight < HALF / 8; eight++) {
    const uint8* at = weight + eight * 4 * LANES;
    const Bytes low_bits = 15 - Bytes{};
    const Bytes pair[2] = {(Bytes)load_bytes(at), (Bytes)load_bytes(at + SECOND * TILE * LANES / 2 + BESIDE)};
    __builtin_prefetch(at + AHEAD, 0, FETCH);
    __builtin_prefetch(at + AHEAD + TILE * LANES / 2, 0, FETCH);
#pragma GCC unroll 2
    for (int high = 0; high < 2; high++) {
      Vector w[2];
      for (int v = 0; v < 2; v++) w[v] = (Vector)((high ? (Bytes)((Words)pair[v] >> 4) : pair[v]) & low_bits);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++) {
        const Vector inputs = four_inputs(x + row * TILE + 8 * eight + 4 * high);
        for (int v = 0; v < 2; v++) partial[row][v] = add_few_products(partial[row][v], w[v], inputs);
      }
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; row++)
    for (int v = 0; v < 2; v++) sums[row][v] = (Ints)end_few((Vector)sums[row][v], partial[row][v]);
}

// Adds what some tiles of a strip contribute to the totals of ROWS rows, of which those from `count` on are any numbers.
template <int ROWS, bool IS_INT4>
TARGET void add_tiles(const Layer& layer, int64 strip, int64 tile, int64 end, int64 row, int count, Totals* totals) {
  constexpr int TILE_BYTES = TILE * STRIP / (IS_INT4 ? 2 : 1), HALF_PANEL = TILE_BYTES / 4;
  const uint8* weight = layer.weight + strip * (layer.inputs / TILE) * TILE_BYTES;
  for (int pair = 0; pair < PAIRS; pair++) {
    const int place = pair * 2 * WIDTH;  // within the strip
    Ints sums[ROWS][2];
    if constexpr (!IS_INT4) {
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < 2; v++)
          sums[r][v] = *reinterpret_cast<const UnalignedInts*>(totals[r] + place + v * WIDTH);
      for (int64 t = tile; t < end; t++)
        for (int half = 0; half < 2; half++)
          add_int8<ROWS>(weight + t * TILE_BYTES + pair * TILE_BYTES / 2 + half * HALF_PANEL,
                         layer.codes_at(t, row) + half * HALF, sums);
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < 2; v++) *reinterpret_cast<UnalignedInts*>(totals[r] + place + v * WIDTH) = sums[r][v];
    } else {
      const int64 size = layer.group / HALF;  // half tiles of a group
      for (int64 half = 2 * tile; half < 2 * end; half += size) {
        const int64 group = half / size, at = (strip * layer.groups + group) * STRIP + place;
        const int64 later = at + AHEAD * 2 / layer.group;
        for (int i = 0; i < 2 * WIDTH; i += LANES) __builtin_prefetch(layer.weight_scale + later + i, 0, FETCH);
        if (layer.zero) __builtin_prefetch(layer.zero + later, 0, FETCH);
        std::fill_n(&sums[0][0], 2 * ROWS, Ints{});
        for (int64 i = half; i < half + size; i++)
          add_int4<ROWS>(weight + i / 2 * TILE_BYTES + pair * TILE_BYTES / 2 + i % 2 * HALF_PANEL,
                         layer.codes_at(i / 2, row) + i % 2 * HALF, sums);
        for (int v = 0; v < 2; v++) {
          const Floats factor = load_floats(layer.weight_scale + at + v * WIDTH), zero = zeros_at(layer, at + v * WIDTH);
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; r++) {
            const float sum = layer.sums[group * layer.rows + row + std::min(r, count - 1)].scaled;
            add_group(sums[r][v], zero, sum, factor, totals[r] + place + v * WIDTH);
          }
        }
      }
    }
  }
}

template <bool IS_INT4>
TARGET void add_rows(const Layer& layer, int64 strip, int64 tile, int64 end, int64 row, int count, Totals* totals) {
  if (count == 1) return add_tiles<1, IS_INT4>(layer, strip, tile, end, row, count, totals);
  if (count == 2) return add_tiles<2, IS_INT4>(layer, strip, tile, end, row, count, totals);
  if (count <= 4) return add_tiles<4, IS_INT4>(layer, strip, tile, end, row, count, totals);
  if constexpr (MOST_ROWS > 4) {
    if (count <= 8) return add_tiles<8, IS_INT4>(layer, strip, tile, end, row, count, totals);
    add_tiles<MOST_ROWS, IS_INT4>(layer, strip, tile, end, row, count, totals);
  }
}

// Rounds to the nearest bfloat16, ties to even; NaN stays NaN.
TARGET inline Halves narrow(Floats x) {
  const Words bits = (Words)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Words is_nan = (Words)(x != x);
  return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), Halves);
}

// Writes the outputs of a strip for one row.
template <typename Number>
TARGET void finish(const Layer& layer, int64 strip, int64 row, Totals& totals) {
  const int64 begin = strip * STRIP, count = std::min<int64>(STRIP, layer.outputs - begin);
  const bool is_whole = count == STRIP;
  alignas(64) float factors[STRIP];
  alignas(64) Number offsets[STRIP], results[STRIP];
  const float* factor = layer.weight_scale + begin;
  const auto* bias = static_cast<const Number*>(layer.bias) + begin;
  auto* out = static_cast<Number*>(layer.out) + row * layer.outputs + begin;
  if (!is_whole && !layer.group) {
    std::memcpy(factors, factor, count * sizeof *factors);
    factor = factors;
  }
  if (!is_whole && layer.bias) {
    std::memcpy(offsets, bias, count * sizeof *offsets);
    bias = offsets;
  }
  for (int i = 0; i < STRIP; i += WIDTH) {
    Floats x = load_floats(&totals[i].scaled);
    if (!layer.group) {
      const int32 offset = INT8_FORM_ZERO * layer.sums[row].products;
      x = __builtin_convertvector((Ints)x - offset, Floats) * load_floats(factor + i);
    }
    x *= layer.scale[row];
    Number* to = (is_whole ? out : results) + i;
    if constexpr (sizeof(Number) == 2) {
      if (layer.bias) {
        const Halves narrow_bias = *reinterpret_cast<const UnalignedHalves*>(bias + i);
        x += (Floats)(__builtin_convertvector(narrow_bias, Words) << 16);
      }
      *reinterpret_cast<UnalignedHalves*>(to) = narrow(x);
    } else {
      if (layer.bias) x += load_floats(bias + i);
      *reinterpret_cast<UnalignedFloats*>(to) = x;
    }
  }
  if (!is_whole) std::memcpy(out, results, count * sizeof *out);
}

template <bool IS_INT4>
TARGET void compute_strip(const Layer& layer, int64 strip) {
  alignas(64) static thread_local Totals totals[ROWS_AT_ONCE + MOST_ROWS];
  const int64 tiles = layer.inputs / TILE;
  for (int64 first = 0; first < layer.rows; first += ROWS_AT_ONCE) {
    const int64 rows = std::min<int64>(layer.rows - first, ROWS_AT_ONCE);
    const int64 chunk = rows > MOST_ROWS ? CHUNK : tiles;
    std::memset(totals, 0, (rows + MOST_ROWS) * sizeof *totals);
    for (int64 tile = 0; tile < tiles; tile += chunk) {
      const int64 end = std::min(tile + chunk, tiles);
      for (int64 row = 0; row < rows; row += MOST_ROWS) {
        const int count = static_cast<int>(std::min<int64>(rows - row, MOST_ROWS));
        add_rows<IS_INT4>(layer, strip, tile, end, first + row, count, totals + row);
      }
    }
    for (int64 row = 0; row < rows; row++)
      layer.is_narrow ? finish<bfloat16>(layer, strip, first + row, totals[row])
                      : finish<float>(layer, strip, first + row, totals[row]);
  }
}
