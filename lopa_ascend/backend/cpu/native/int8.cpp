// Linear layers of int8 activations and weights in int8 or int4, on x86 processors with AVX2, AVX512-VNNI or AMX.
//
// Products are summed exactly, and what follows rounds in one order: a result has the same bits whatever instructions
// compute it, whatever rows are computed beside it, and whichever thread computes it.
//
// A weight is a stream in the order in which it is read: strips of STRIP outputs, each of which one thread computes.
// A strip is tiles of TILE inputs; a tile, for each of its two panels of LANES outputs, has a vector of 64 bytes for four
// inputs: those of the first output, then those of the next. int8 weights are stored as w + 128, without a sign. int4
// codes take half the bytes: the low halves of a vector hold four inputs, the high halves the next four.
//
// So both are numbers without a sign, from which a zero point is to be taken, and an instruction multiplies them by
// activations with a sign. The zero point times the sum of the activations is subtracted from the sum of products.

#include <cstring>
#include <memory>
#include <type_traits>

#include "vectors.h"

#ifndef VNNI  // tests define these as nothing, to compile for any processor
#define AVX2_INT8 __attribute__((target("avx2")))
#define VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define AMX_INT8 __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#endif

namespace {

using int8 = std::int8_t;
using uint8 = std::uint8_t;
using int32 = std::int32_t;
using int64 = std::int64_t;

constexpr int STRIP = 32;
constexpr int TILE = 64;
constexpr int HALF = TILE / 2;        // the smallest group of an int4 weight
constexpr int ROWS_AT_ONCE = 96;      // rows whose sums are kept beside a strip
constexpr int CHUNK = 8;              // tiles that stay in the first cache while several blocks of rows take them
constexpr int AHEAD = 8192;           // bytes by which a weight is fetched before it is read
constexpr int FETCH = 2;              // into the second cache
constexpr int INT4_ZERO = 8;          // where a weight has none of its own

// A sum: an exact one, or of scaled groups of an int4 weight.
union Total {
  int32 products;
  float scaled;
};
using Totals = Total[STRIP];  // of a row

// A linear layer and its input; the arguments of lopa_int8_linear.
struct Layer {
  const int8* codes;          // [inputs / TILE][rows][TILE] of ROWS_AT_ONCE rows, then of the next ones
  const float* scale;         // [rows]
  const uint8* weight;        // strips
  const float* weight_scale;  // int8: [outputs]; int4: [strips][inputs / group][STRIP]
  const uint8* zero;          // int4: [strips][inputs / group][STRIP], or null: INT4_ZERO
  const void* bias;           // [outputs] like out, or null
  void* out;                  // [rows][outputs]: bfloat16, or float
  int64 rows, inputs, outputs;
  int64 group;  // inputs of a group of an int4 weight; 0: it is int8
  bool is_narrow;
  const Total* sums;  // of the codes of each group and row, [groups][rows]; float if int4
  int64 groups;       // 1 if int8

  int64 place_of_codes(int64 tile, int64 row) const {
    const int64 first = row / ROWS_AT_ONCE * ROWS_AT_ONCE;
    return first * inputs + (tile * std::min<int64>(rows - first, ROWS_AT_ONCE) + row - first) * TILE;
  }
  const int8* codes_at(int64 tile, int64 row) const { return codes + place_of_codes(tile, row); }
};


#define TARGET AVX2_INT8
namespace avx2 {
constexpr int WIDTH = 8;           // outputs of a vector
constexpr int MOST_ROWS = 4;       // rows multiplied at once
constexpr int INT8_FORM_ZERO = 0;  // add_products takes the zero point off
using Vector = __m256i;
using Partial = __m256i;  // sums of 16 bits

TARGET inline Vector add_pairs(Vector sum, Vector pairs) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// The instruction adds two products in 16 bits and saturates: magnitudes up to 128 times activations up to 127 fit.
TARGET inline Vector add_products(Vector sum, Vector weight, Vector inputs) {
  const Vector centered = _mm256_xor_si256(weight, _mm256_set1_epi8(-128));
  return add_pairs(sum, _mm256_maddubs_epi16(_mm256_abs_epi8(centered), _mm256_sign_epi8(inputs, centered)));
}
// 16 products of int4 codes fit in 16 bits: those of half a tile.
TARGET inline Partial begin_few(Vector) { return _mm256_setzero_si256(); }
TARGET inline Partial add_few_products(Partial sum, Vector weight, Vector inputs) {
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(weight, inputs));
}
TARGET inline Vector end_few(Vector sum, Partial partial) { return add_pairs(sum, partial); }

#include "int8_strip.h"
}  // namespace avx2
#undef TARGET

#define TARGET VNNI
namespace vnni {
constexpr int WIDTH = 16;
constexpr int MOST_ROWS = 12;
constexpr int INT8_FORM_ZERO = 128;
using Vector = __m512i;
using Partial = __m512i;

TARGET inline Vector add_products(Vector sum, Vector weight, Vector inputs) {
  return _mm512_dpbusd_epi32(sum, weight, inputs);
}
TARGET inline Partial begin_few(Vector sum) { return sum; }
TARGET inline Partial add_few_products(Partial sum, Vector weight, Vector inputs) {
  return _mm512_dpbusd_epi32(sum, weight, inputs);
}
TARGET inline Vector end_few(Vector, Partial partial) { return partial; }

#include "int8_strip.h"
}  // namespace vnni
#undef TARGET

#if __GNUC__ >= 11 || defined(__clang__)
namespace amx {
constexpr int FEW[] = {8, 12};  // rows up to which vectors are faster: int8, int4
constexpr int TILE_ROWS = 16;  // a block has twice as many rows
constexpr int PANEL = TILE * LANES;

// The registers: 0 to 3 sums of the first and the second rows, with the first and then with the second panel; 4 and 5
// activations; 6 and 7 the panels.
struct alignas(64) Registers {
  uint8 palette = 1, start = 0, reserved[14] = {};
  std::uint16_t bytes[16] = {};
  uint8 rows[16] = {};
};

// The compiler does not know that instructions on tiles read memory, and would leave out or delay writing it.
inline void finish_writing(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

AMX_INT8 void configure(int rows, int inputs) {
  Registers registers;
  const auto set = [&](int number, int count, int bytes) AMX_INT8 {
    registers.rows[number] = static_cast<uint8>(count);
    registers.bytes[number] = static_cast<std::uint16_t>(count ? bytes : 0);
  };
  for (int i = 0; i < 2; i++) {
    const int count = std::clamp(rows - i * TILE_ROWS, 0, TILE_ROWS);
    set(i, count, 4 * LANES);
    set(2 + i, count, 4 * LANES);
    set(4 + i, count, inputs);
    set(6 + i, inputs / 4, 4 * LANES);
  }
  finish_writing(&registers);
  _tile_loadconfig(&registers);
}

AMX_INT8 void clear(bool has_second) {
  _tile_zero(0);
  _tile_zero(2);
  if (!has_second) return;
  _tile_zero(1);
  _tile_zero(3);
}

AMX_INT8 void load_sums(const void* from, bool has_second) {
  const auto* at = static_cast<const int32*>(from);
  _tile_loadd(0, at, sizeof(Totals));
  _tile_loadd(2, at + LANES, sizeof(Totals));
  if (!has_second) return;
  _tile_loadd(1, at + TILE_ROWS * STRIP, sizeof(Totals));
  _tile_loadd(3, at + TILE_ROWS * STRIP + LANES, sizeof(Totals));
}

AMX_INT8 void store_sums(void* to, bool has_second) {
  auto* at = static_cast<int32*>(to);
  _tile_stored(0, at, sizeof(Totals));
  _tile_stored(2, at + LANES, sizeof(Totals));
  if (!has_second) return;
  _tile_stored(1, at + TILE_ROWS * STRIP, sizeof(Totals));
  _tile_stored(3, at + TILE_ROWS * STRIP + LANES, sizeof(Totals));
}

// Adds the products of a block of rows and one tile of a strip, or half of it.
AMX_INT8 inline void add_tile(const int8* x, const uint8* weight, bool has_second) {
  _tile_loadd(4, x, TILE);
  _tile_loadd(6, weight, 4 * LANES);
  _tile_loadd(7, weight + PANEL, 4 * LANES);
  _tile_dpbsud(0, 4, 6);
  _tile_dpbsud(2, 4, 7);
  if (!has_second) return;
  _tile_loadd(5, x + TILE_ROWS * TILE, TILE);
  _tile_dpbsud(1, 5, 6);
  _tile_dpbsud(3, 5, 7);
}

// The codes of some tiles of an int4 weight, each in a byte, in the order of an int8 weight.
AMX_INT8 void unpack(const uint8* weight, int64 tiles, uint8* out) {
  const vnni::Words low_bits = 0x0f0f0f0f - vnni::Words{};
  for (int64 i = 0; i < tiles * 2 * PANEL; i += 2 * 64, weight += 64) {
    const auto pair = (vnni::Words)vnni::load_bytes(weight);
    __builtin_prefetch(weight + AHEAD, 0, FETCH);
    *reinterpret_cast<vnni::UnalignedBytes*>(out + i) = (vnni::Bytes)(pair & low_bits);
    *reinterpret_cast<vnni::UnalignedBytes*>(out + i + 64) = (vnni::Bytes)(pair >> 4 & low_bits);
  }
}

// Adds the sums of a group of an int4 weight, times its scales, to the totals of some rows.
AMX_INT8 void add_group(const Layer& layer, int64 strip, int64 group, int64 row, int rows, const int32* sums,
                        Totals* totals) {
  const int64 at = (strip * layer.groups + group) * STRIP;
  for (int place = 0; place < STRIP; place += LANES) {
    const vnni::Floats factor = vnni::load_floats(layer.weight_scale + at + place);
    const vnni::Floats zero = vnni::zeros_at(layer, at + place);
    for (int r = 0; r < rows; r++) {
      const auto products = *reinterpret_cast<const vnni::UnalignedInts*>(sums + r * STRIP + place);
      vnni::add_group(products, zero, layer.sums[group * layer.rows + row + r].scaled, factor, totals[r] + place);
    }
  }
}

template <bool IS_INT4>
AMX_INT8 void add_tiles(const Layer& layer, int64 strip, int64 tile, int64 end, int64 row, int rows,
                        const uint8* weight, Totals* totals) {
  const bool has_second = rows > TILE_ROWS, is_first = row % ROWS_AT_ONCE == 0;
  finish_writing(weight);
  finish_writing(totals);
  if constexpr (!IS_INT4) {
    load_sums(totals, has_second);
    for (int64 t = tile; t < end; t++, weight += 2 * PANEL) {
      if (is_first)
        for (int i = 0; i < 2 * PANEL; i += 64) __builtin_prefetch(weight + AHEAD + i, 0, FETCH);
      add_tile(layer.codes_at(t, row), weight, has_second);
    }
    store_sums(totals, has_second);
  } else {
    // A group is added while the tiles of the next one are multiplied.
    alignas(64) static thread_local int32 sums[2][2 * TILE_ROWS * STRIP];
    const int64 step = std::min<int64>(layer.group, TILE), begin = tile * TILE / layer.group;
    const int64 last = end * TILE / layer.group;
    for (int64 group = begin; group <= last; group++) {
      if (group < last) {
        clear(has_second);
        for (int64 i = group * layer.group; i < (group + 1) * layer.group; i += step)
          add_tile(layer.codes_at(i / TILE, row) + i % TILE, weight + (i / TILE - tile) * 2 * PANEL + i % TILE * LANES,
                   has_second);
        store_sums(sums[group % 2], has_second);
      }
      if (group > begin) add_group(layer, strip, group - 1, row, rows, sums[(group - 1) % 2], totals);
    }
  }
}

template <bool IS_INT4>
AMX_INT8 void compute_strip(const Layer& layer, int64 strip) {
  if (layer.rows <= FEW[IS_INT4]) return vnni::compute_strip<IS_INT4>(layer, strip);
  alignas(64) static thread_local Totals totals[ROWS_AT_ONCE];
  alignas(64) static thread_local uint8 unpacked[IS_INT4 ? CHUNK * 2 * PANEL : 64];
  constexpr int TILE_BYTES = 2 * PANEL / (IS_INT4 ? 2 : 1);
  const int64 tiles = layer.inputs / TILE;
  int configured = 0;
  for (int64 first = 0; first < layer.rows; first += ROWS_AT_ONCE) {
    const int64 rows = std::min<int64>(layer.rows - first, ROWS_AT_ONCE);
    const int64 chunk = IS_INT4 || rows > 2 * TILE_ROWS ? CHUNK : tiles;
    std::memset(totals, 0, rows * sizeof *totals);
    for (int64 tile = 0; tile < tiles; tile += chunk) {
      const int64 end = std::min(tile + chunk, tiles);
      const uint8* weight = layer.weight + (strip * tiles + tile) * TILE_BYTES;
      if (IS_INT4) {
        unpack(weight, end - tile, unpacked);
        weight = unpacked;
      }
      for (int64 row = 0; row < rows; row += 2 * TILE_ROWS) {
        const int count = static_cast<int>(std::min<int64>(rows - row, 2 * TILE_ROWS));
        if (count != configured) configure(count, static_cast<int>(std::min<int64>(layer.group ? layer.group : TILE, TILE)));
        configured = count;
        add_tiles<IS_INT4>(layer, strip, tile, end, first + row, count, weight, totals + row);
      }
    }
    for (int64 row = 0; row < rows; row++)
      layer.is_narrow ? vnni::finish<bfloat16>(layer, strip, first + row, totals[row])
                      : vnni::finish<float>(layer, strip, first + row, totals[row]);
  }
  _tile_release();
}
}  // namespace amx
#else
namespace amx = vnni;  // the compiler does not know the instructions
#endif

// The codes of a row [inputs] in the order of Layer, and the sum of each group.
AVX2_INT8 void prepare(const int8* codes, int64 inputs, int64 row, const Layer& layer, int8* tiles, Total* sums) {
  for (int64 i = 0; i < inputs; i += TILE) {
    int8* tile = tiles + layer.place_of_codes(i / TILE, row);
    if (inputs - i < TILE) std::memset(tile, 0, TILE);
    std::memcpy(tile, codes + i, std::min<int64>(TILE, inputs - i));
  }
  const int64 size = layer.group ? layer.group : inputs;
  for (int64 group = 0; group < layer.groups; group++) {
    int32 sum = 0;
    for (int64 i = group * size; i < std::min(group * size + size, inputs); i++) sum += codes[i];
    Total& total = sums[group * layer.rows + row];
    if (layer.group)
      total.scaled = static_cast<float>(sum);
    else
      total.products = sum;
  }
}

using Strip = void (*)(const Layer&, int64);
// By instruction set, as integers.py numbers them, for int8 and int4.
constexpr Strip STRIPS[][2] = {{avx2::compute_strip<false>, avx2::compute_strip<true>},
                               {vnni::compute_strip<false>, vnni::compute_strip<true>},
                               {amx::compute_strip<false>, amx::compute_strip<true>}};

}  // namespace

// codes [rows][inputs]; the other arguments are explained at Layer. The inputs of the weight are whole tiles.
extern "C" void lopa_int8_linear(const int8* codes, const float* scale, const uint8* weight, const float* weight_scale,
                                 const uint8* zero, const void* bias, void* out, int64 rows, int64 inputs,
                                 int64 outputs, int64 group, int64 is_narrow, int64 instructions, int threads) {
  const int64 tiles = (inputs + TILE - 1) / TILE, groups = group ? tiles * TILE / group : 1;
  const auto numbers = [](int64 count) { return std::unique_ptr<Total[]>(new Total[count]); };
  const auto ordered = numbers((tiles * rows + vnni::MOST_ROWS) * TILE / 4), sums = numbers(rows * groups);
  auto* own = reinterpret_cast<int8*>(ordered.get());
  const Layer layer{own,  scale,        weight,  weight_scale, zero,           bias,       out,
                    rows, tiles * TILE, outputs, group,        is_narrow != 0, sums.get(), groups};
  const Strip compute = STRIPS[instructions][group != 0];
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64 row = 0; row < rows; row++)
      prepare(codes + row * inputs, inputs, row, layer, own, sums.get());
#pragma omp for schedule(static)
    for (int64 strip = 0; strip < (outputs + STRIP - 1) / STRIP; strip++) compute(layer, strip);
  }
}
