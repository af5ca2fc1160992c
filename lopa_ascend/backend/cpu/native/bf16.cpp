// Linear layers in bfloat16, on x86 processors with AVX2, AVX-512, AVX512-BF16 or AMX.
//
// A weight lies in blocks of SIDE outputs and SIDE inputs, those of the same outputs one after another: each thread reads
// memory from front to back. A block is two tiles of LANES outputs; a tile has a row for each pair of inputs, and in
// it the pair of each output. So it is a tile of AMX as well as LANES vectors.
//
// The sum of a row and an output adds the products of one input, or of one pair, after another, from the first to the
// last, and always by the same instructions. Which rows are multiplied at once, how inputs are divided into chunks and
// which thread computes what changes no bit: a row has the same bits alone and among others.

#include <cstdlib>
#include <memory>

#include "vectors.h"

namespace {

using int64 = std::int64_t;
using word = std::uint32_t;  // a pair of bfloat16 numbers

constexpr int SIDE = 32;
constexpr int BLOCK = SIDE * SIDE;
constexpr int TILE = BLOCK / 2;
constexpr int CHUNK = 16;                             // blocks that stay in the cache while all rows are multiplied by them
constexpr int PART_BYTES = 1 << 20;                   // of the input, which stay in the cache beside a chunk
constexpr int PART_ROWS = 480;                        // rows whose sums are kept; a multiple of ROWS of every way
constexpr int AHEAD = 4 * BLOCK;                      // weights by which memory is read before, if once for all rows
constexpr int TASKS = 8;                              // for each thread, so that a slow one gets fewer

// Weights to fetch into the level-2 cache while others are multiplied: up to two cache lines for each pair of inputs.
struct Ahead {
  static constexpr int LINE = 64 / sizeof(bfloat16);
  const bfloat16* begin;
  int lines;
  void fetch(int block, int pair) const {
    const bfloat16* at = begin + (block * LANES + pair) * lines * LINE;
    for (int i = 0; i < lines; i++) __builtin_prefetch(at + i * LINE, 0, 2);
  }
  void fetch(int block) const {
    for (int pair = 0; pair < LANES; pair++) fetch(block, pair);
  }
};

// Some rows of the input, and blocks of the weight from the same input on. `sums` are [rows][SIDE].
template <typename Number>
struct Product {
  const Number* x;
  int64 inputs;  // of the whole layer
  const bfloat16* weight;
  int blocks;
  bool is_first;  // whether the sums begin with these blocks
  Ahead ahead;
  float* sums;
};

// ---- AMX ------------------------------------------------------------------------------------------------------------

struct Amx {
  using Number = bfloat16;
  static constexpr int ROWS = 2 * LANES;
  static constexpr int STEP = TILE;          // numbers of x from one block to the next
  static constexpr bool IS_PREPARED = true;  // x is in tiles of LANES rows
  struct alignas(64) Shape {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {LANES, LANES, LANES, LANES, LANES, LANES, LANES, LANES};
  };

  // 0 to 3 are sums of two by two tiles, 4 and 5 the weight's, 6 and 7 the input's.
  AMX static void begin(int64 rows) {
    Shape shape;
    if (rows < LANES) shape.rows[0] = shape.rows[1] = shape.rows[6] = static_cast<std::uint8_t>(rows);
    asm volatile("" : : "r"(&shape) : "memory");  // compilers believe that the next line reads eight bytes
    _tile_loadconfig(&shape);
  }
  AMX static void end() { _tile_release(); }
  AMX static void prepare(const bfloat16* x, int64 row, int64 inputs, bfloat16* tiles) {
    bfloat16* to = tiles + row / LANES * LANES * inputs + row % LANES * SIDE;
    for (int64 i = 0; i < inputs; i += SIDE) _mm512_store_si512(to + i * LANES, _mm512_loadu_si512(x + row * inputs + i));
  }
  static void multiply(const Product<bfloat16>& p, int rows) { rows > LANES ? multiply_two(p) : multiply_one(p); }
  AMX static void multiply_one(const Product<bfloat16>& p) {
    constexpr int stride = SIDE * sizeof(float);
    _tile_zero(0);
    _tile_zero(1);
    if (!p.is_first) {
      _tile_loadd(0, p.sums, stride);
      _tile_loadd(1, p.sums + LANES, stride);
    }
    for (int i = 0; i < p.blocks; i++) {
      _tile_loadd(4, p.weight + i * BLOCK, 64);
      _tile_loadd(6, p.x + i * TILE, 64);
      _tile_dpbf16ps(0, 6, 4);
      _tile_loadd(5, p.weight + i * BLOCK + TILE, 64);
      _tile_dpbf16ps(1, 6, 5);
      p.ahead.fetch(i);
    }
    _tile_stored(0, p.sums, stride);
    _tile_stored(1, p.sums + LANES, stride);
  }
  AMX static void multiply_two(const Product<bfloat16>& p) {
    constexpr int stride = SIDE * sizeof(float);
    float* const below = p.sums + LANES * SIDE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (!p.is_first) {
      _tile_loadd(0, p.sums, stride);
      _tile_loadd(1, p.sums + LANES, stride);
      _tile_loadd(2, below, stride);
      _tile_loadd(3, below + LANES, stride);
    }
    for (int i = 0; i < p.blocks; i++) {
      _tile_loadd(4, p.weight + i * BLOCK, 64);
      _tile_loadd(6, p.x + i * TILE, 64);
      _tile_dpbf16ps(0, 6, 4);
      _tile_loadd(5, p.weight + i * BLOCK + TILE, 64);
      _tile_dpbf16ps(1, 6, 5);
      _tile_loadd(7, p.x + LANES * p.inputs + i * TILE, 64);
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
      p.ahead.fetch(i);
    }
    _tile_stored(0, p.sums, stride);
    _tile_stored(1, p.sums + LANES, stride);
    _tile_stored(2, below, stride);
    _tile_stored(3, below + LANES, stride);
  }
};

// ---- vectors --------------------------------------------------------------------------------------------------------

// Calls Way::add<rows>(p), for 1 to ROWS rows.
template <typename Way, int ROWS = Way::ROWS>
void add_rows(const Product<typename Way::Number>& p, int rows) {
  if constexpr (ROWS == 1) {
    Way::template add<1>(p);
  } else if (rows == ROWS) {
    Way::template add<ROWS>(p);
  } else {
    add_rows<Way, ROWS - 1>(p, rows);
  }
}

// What the ways by vectors do not need.
struct Vectors {
  static constexpr int STEP = SIDE;
  static void begin(int64) {}
  static void end() {}
};

// x in float32, for processors without products of bfloat16 numbers.
struct Widened : Vectors {
  using Number = float;
  static constexpr bool IS_PREPARED = true;
  AVX2 static void prepare(const bfloat16* x, int64 row, int64 inputs, float* wide) {
    word* to = reinterpret_cast<word*>(wide) + row * inputs;
    for (int64 i = 0; i < inputs; i++) to[i] = static_cast<word>(x[row * inputs + i]) << 16;
  }
};

struct Avx512Bf16 : Vectors {
  using Number = bfloat16;
  static constexpr int ROWS = 12;  // 24 sums stay in registers
  static constexpr bool IS_PREPARED = false;
  static void prepare(const bfloat16*, int64, int64, bfloat16*) {}
  static void multiply(const Product<bfloat16>& p, int rows) { add_rows<Avx512Bf16>(p, rows); }
  template <int COUNT>
  AVX512 static void add(const Product<bfloat16>& p) {
    __m512 sums[COUNT][2];
    for (int row = 0; row < COUNT; row++)
      for (int half = 0; half < 2; half++)
        sums[row][half] = p.is_first ? _mm512_setzero_ps() : _mm512_load_ps(p.sums + row * SIDE + half * LANES);
    const bfloat16* weight = p.weight;
    const word* x = reinterpret_cast<const word*>(p.x);
    for (int i = 0; i < p.blocks; i++, weight += TILE) {
      for (int pair = 0; pair < LANES; pair++, weight += SIDE, x++) {
        p.ahead.fetch(i, pair);
        const __m512bh left = (__m512bh)_mm512_load_si512(weight), right = (__m512bh)_mm512_load_si512(weight + TILE);
        for (int row = 0; row < COUNT; row++) {
          const __m512bh inputs = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[row * p.inputs / 2]));
          sums[row][0] = _mm512_dpbf16_ps(sums[row][0], left, inputs);
          sums[row][1] = _mm512_dpbf16_ps(sums[row][1], right, inputs);
        }
      }
    }
    for (int row = 0; row < COUNT; row++)
      for (int half = 0; half < 2; half++) _mm512_store_ps(p.sums + row * SIDE + half * LANES, sums[row][half]);
  }
};

struct Avx512 : Widened {
  static constexpr int ROWS = 12;
  static void multiply(const Product<float>& p, int rows) { add_rows<Avx512>(p, rows); }
  template <int COUNT>
  AVX512 static void add(const Product<float>& p) {
    __m512 sums[COUNT][2];
    for (int row = 0; row < COUNT; row++)
      for (int half = 0; half < 2; half++)
        sums[row][half] = p.is_first ? _mm512_setzero_ps() : _mm512_load_ps(p.sums + row * SIDE + half * LANES);
    const __m512i high = _mm512_set1_epi32(-65536);
    const bfloat16* weight = p.weight;
    const float* x = p.x;
    for (int i = 0; i < p.blocks; i++, weight += TILE) {
      for (int pair = 0; pair < LANES; pair++, weight += SIDE) {
        p.ahead.fetch(i, pair);
        const __m512i left = _mm512_load_si512(weight), right = _mm512_load_si512(weight + TILE);
        for (int second = 0; second < 2; second++, x++) {
          const __m512 a = _mm512_castsi512_ps(second ? _mm512_and_si512(left, high) : _mm512_slli_epi32(left, 16));
          const __m512 b = _mm512_castsi512_ps(second ? _mm512_and_si512(right, high) : _mm512_slli_epi32(right, 16));
          for (int row = 0; row < COUNT; row++) {
            const __m512 input = _mm512_set1_ps(x[row * p.inputs]);
            sums[row][0] = _mm512_fmadd_ps(a, input, sums[row][0]);
            sums[row][1] = _mm512_fmadd_ps(b, input, sums[row][1]);
          }
        }
      }
    }
    for (int row = 0; row < COUNT; row++)
      for (int half = 0; half < 2; half++) _mm512_store_ps(p.sums + row * SIDE + half * LANES, sums[row][half]);
  }
};

struct Avx2 : Widened {
  static constexpr int ROWS = 6;
  static void multiply(const Product<float>& p, int rows) { add_rows<Avx2>(p, rows); }
  // All outputs at once up to three rows, then one tile after the other: 12 sums stay in registers.
  template <int COUNT>
  AVX2 static void add(const Product<float>& p) {
    constexpr int VECTORS = COUNT > 3 ? 2 : 4;
    for (int tile = 0; tile < 4 / VECTORS; tile++) add_outputs<COUNT, VECTORS>(p, tile);
  }
  template <int COUNT, int VECTORS>
  AVX2 static void add_outputs(const Product<float>& p, int tile) {
    constexpr int WIDTH = LANES / 2;
    __m256 sums[COUNT][VECTORS];
    float* const memory = p.sums + tile * LANES;
    for (int row = 0; row < COUNT; row++)
      for (int i = 0; i < VECTORS; i++)
        sums[row][i] = p.is_first ? _mm256_setzero_ps() : _mm256_load_ps(memory + row * SIDE + i * WIDTH);
    const __m256i high = _mm256_set1_epi32(-65536);
    const bfloat16* weight = p.weight + tile * TILE;
    const float* x = p.x;
    for (int i = 0; i < p.blocks; i++, weight += TILE) {
      for (int pair = 0; pair < LANES; pair++, weight += SIDE) {
        if (tile == 0) p.ahead.fetch(i, pair);
        for (int second = 0; second < 2; second++, x++) {
          __m256 a[VECTORS];
          for (int j = 0; j < VECTORS; j++) {
            const bfloat16* at = weight + j / 2 * TILE + j % 2 * LANES;
            const __m256i pairs = _mm256_load_si256(reinterpret_cast<const __m256i*>(at));
            a[j] = _mm256_castsi256_ps(second ? _mm256_and_si256(pairs, high) : _mm256_slli_epi32(pairs, 16));
          }
          for (int row = 0; row < COUNT; row++) {
            const __m256 input = _mm256_set1_ps(x[row * p.inputs]);
            for (int j = 0; j < VECTORS; j++) sums[row][j] = _mm256_fmadd_ps(a[j], input, sums[row][j]);
          }
        }
      }
    }
    for (int row = 0; row < COUNT; row++)
      for (int i = 0; i < VECTORS; i++) _mm256_store_ps(memory + row * SIDE + i * WIDTH, sums[row][i]);
  }
};

// ---- a layer --------------------------------------------------------------------------------------------------------

inline float widened(bfloat16 x) {
  const word bits = static_cast<word>(x) << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Sums and biases of SIDE outputs, rounded to the nearest bfloat16, ties to even. `bias` may be null.
AVX2 void round_rows(const float* sums, int64 rows, const bfloat16* bias, int64 outputs, bfloat16* out) {
  for (int64 row = 0; row < rows; row++)
    for (int i = 0; i < SIDE; i++) {
      const float sum = sums[row * SIDE + i] + (bias ? widened(bias[i]) : 0.0f);
      word bits;
      __builtin_memcpy(&bits, &sum, sizeof bits);
      const word rounded = bits + 0x7fff + (bits >> 16 & 1);
      out[row * outputs + i] = static_cast<bfloat16>((sum == sum ? rounded : bits | 0x400000) >> 16);
    }
}

int64 divided(int64 count, int64 size) { return (count + size - 1) / size; }

template <typename Way>
void compute(const bfloat16* x, const bfloat16* weight, const bfloat16* bias, int64 rows, int64 inputs, int64 outputs,
             bfloat16* out, int threads) {
  using Number = typename Way::Number;
  if (rows == 0) return;
  const int64 most = std::clamp<int64>(PART_BYTES / (inputs * sizeof(Number)), Way::ROWS, PART_ROWS);
  const int64 parts = divided(rows, most / Way::ROWS * Way::ROWS);
  const int64 part_rows = divided(divided(rows, parts), Way::ROWS) * Way::ROWS;
  const int64 strips = outputs / SIDE, blocks = inputs / SIDE, tasks = parts * strips;
  const int64 at_once = std::clamp<int64>(tasks / (threads * TASKS), 1, TASKS);
  const std::size_t size = Way::IS_PREPARED ? divided(rows, LANES) * LANES * inputs * sizeof(Number) : 0;
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, divided(size, 64) * 64), std::free);
  Number* const prepared = static_cast<Number*>(memory.get());
  const Number* const input = Way::IS_PREPARED ? prepared : reinterpret_cast<const Number*>(x);
#pragma omp parallel num_threads(threads)
  {
    alignas(64) static thread_local float sums[PART_ROWS * SIDE];
    Way::begin(rows);
    if (Way::IS_PREPARED) {
#pragma omp for
      for (int64 row = 0; row < rows; row++) Way::prepare(x, row, inputs, prepared);
    }
#pragma omp for schedule(dynamic, at_once) nowait
    for (int64 task = 0; task < tasks; task++) {
      const int64 first = task / strips * part_rows, output = task % strips * SIDE;
      const int count = static_cast<int>(std::min(part_rows, rows - first));
      for (int64 block = 0; block < blocks; block += CHUNK) {
        const bfloat16* chunk = weight + output * inputs + block * BLOCK;
        const int size = static_cast<int>(std::min<int64>(blocks - block, CHUNK));
        for (int row = 0; row < count; row += Way::ROWS) {
          // The first two of several rounds fetch half of the next chunk each.
          const bfloat16* half = chunk + size * BLOCK + (row ? size * BLOCK / 2 : 0);
          const Ahead ahead = count <= Way::ROWS ? Ahead{chunk + AHEAD, 2} : Ahead{half, row <= Way::ROWS ? 1 : 0};
          const Number* at = input + (first + row) * inputs + block * Way::STEP;
          Way::multiply({at, inputs, chunk, size, block == 0, ahead, sums + row * SIDE}, std::min(count - row, Way::ROWS));
        }
      }
      round_rows(sums, count, bias ? bias + output : nullptr, outputs, out + first * outputs + output);
    }
    Way::end();
  }
}

}  // namespace

// x [rows, inputs] times the transpose of a weight, plus bias [outputs] or null -> out [rows, outputs].
// `weight` is in blocks: [outputs / SIDE][inputs / SIDE][2 tiles][LANES pairs][LANES outputs][2], and outputs and inputs
// are multiples of SIDE. `instructions` are an index: AVX2, AVX-512, AVX512-BF16, AMX.
extern "C" void lopa_bf16_linear(const bfloat16* x, const bfloat16* weight, const bfloat16* bias, std::int64_t rows,
                                 std::int64_t inputs, std::int64_t outputs, bfloat16* out, std::int64_t instructions,
                                 int threads) {
  constexpr decltype(&compute<Amx>) ways[] = {compute<Avx2>, compute<Avx512>, compute<Avx512Bf16>, compute<Amx>};
  ways[instructions](x, weight, bias, rows, inputs, outputs, out, threads);
}
