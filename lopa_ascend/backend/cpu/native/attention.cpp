// Attention over pages, in bfloat16 or float32, on x86 processors with AVX512-BF16.
//
// A task is some queries of one entry, up to TASK_ROWS of those whose heads share a key/value head. It goes over the keys
// page by page: the products of queries and keys, a running softmax in float32, and the products of weights and values.
// Products are of words of 32 bits. A word is a float32 number, or a pair of bfloat16 numbers: the instruction vdpbf16ps
// multiplies such pairs and adds both products to a float32 number. So a page is first packed into words: neighbouring
// elements of a key, or the same element of two neighbouring values. Values in float32 are words where they lie.
//
// Every query goes through the same operations in the same order, whatever queries are computed beside it and whichever
// thread computes it: its result has the same bits alone and among others.

#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

using word = std::uint32_t;  // a float32 number or a pair of bfloat16 numbers
template <typename T>
constexpr int IN_WORD = sizeof(word) / sizeof(T);

constexpr int ROWS = 6;             // queries multiplied together: their 24 sums of a product stay in registers
constexpr int COLUMNS = 4 * LANES;  // columns multiplied together
constexpr int PAGE = 128;           // positions of a page
constexpr int TASK_ROWS = 32 * ROWS;
constexpr int MAX_DIM = 256;
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// What a task keeps in memory: up to 400 KiB, which fit in the level-2 cache.
struct Scratch {
  alignas(64) word keys[MAX_DIM * PAGE];        // [words of a key][PAGE]
  alignas(64) word values[PAGE / 2 * MAX_DIM];  // [PAGE / 2][D]: each element of values 2 i and 2 i + 1, in bfloat16
  alignas(64) float sums[TASK_ROWS * MAX_DIM];  // [rows][D]: values weighted by 2 ^ (score - largest)
  float largest[TASK_ROWS];                     // largest score so far, in units of ln 2
  float total[TASK_ROWS];                       // sum of 2 ^ (score - largest)
};

// Rows of numbers in memory.
template <typename T>
struct Rows {
  T* begin;
  std::int64_t stride;
  T* operator[](std::int64_t row) const { return begin + row * stride; }
};

// Transposes 16 vectors of 16 words.
AVX512 inline void transpose(__m512i* a) {
  __m512i t[LANES];
  for (int i = 0; i < LANES; i += 2) {
    t[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int half = 0; half < LANES; half += 8)
    for (int i = half; i < half + 4; i++) {
      t[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    }
  for (int quarter = 0; quarter < 8; quarter++) {
    a[quarter] = _mm512_shuffle_i32x4(t[quarter], t[quarter + 8], 0x88);
    a[quarter + 8] = _mm512_shuffle_i32x4(t[quarter], t[quarter + 8], 0xdd);
  }
}

// Keys [count][D] -> words [words of a key][PAGE]; keys behind the last one are zero.
template <typename T>
AVX512 void pack_keys(Rows<const T> keys, int count, int dim, word* packed) {
  const int words = dim / IN_WORD<T>;
  for (int first = 0; first < PAGE; first += LANES)
    for (int column = 0; column < words; column += LANES) {
      __m512i block[LANES];
      const __mmask16 present = lanes_below(words - column);
      for (int i = 0; i < LANES; i++)
        block[i] = first + i < count ? _mm512_maskz_loadu_epi32(present, keys[first + i] + column * IN_WORD<T>)
                                     : _mm512_setzero_si512();
      transpose(block);
      for (int i = 0; i < LANES && column + i < words; i++)
        _mm512_store_si512(packed + (column + i) * PAGE + first, block[i]);
    }
}

// Values [count][D] as words [..][D]; the other half of the last word is zero where count is odd.
Rows<const word> pack_values(Rows<const float> values, int, int, word*) {
  return {reinterpret_cast<const word*>(values.begin), values.stride};
}
AVX512 Rows<const word> pack_values(Rows<const bfloat16> values, int count, int dim, word* packed) {
  const auto widened = [&](int row, int column) AVX512 {
    if (row >= count) return _mm512_setzero_si512();
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values[row] + column)));
  };
  for (int pair = 0; pair < PAGE / 2; pair++)
    for (int column = 0; column < dim; column += LANES) {
      const __m512i low = widened(2 * pair, column), high = widened(2 * pair + 1, column);
      _mm512_store_si512(packed + pair * dim + column, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  return {packed, dim};
}

// sum + the products of words.
template <typename T>
AVX512 inline __m512 add_products(__m512 sum, __m512i a, __m512i b) {
  if constexpr (std::is_same_v<T, float>) return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// Adds to sums [ROWS][VECTORS * LANES] the products of left [ROWS][count] and right [count][VECTORS * LANES].
template <typename T, int VECTORS>
AVX512 inline void multiply(const word* const* left, int count, Rows<const word> right, float* const* sums) {
  __m512 sum[ROWS][VECTORS];
  for (int row = 0; row < ROWS; row++)
    for (int i = 0; i < VECTORS; i++) sum[row][i] = _mm512_load_ps(sums[row] + i * LANES);
  for (int k = 0; k < count; k++) {
    __m512i columns[VECTORS];
    for (int i = 0; i < VECTORS; i++) columns[i] = _mm512_loadu_si512(right[k] + i * LANES);
    for (int row = 0; row < ROWS; row++) {
      const __m512i same = _mm512_set1_epi32(static_cast<int>(left[row][k]));
      for (int i = 0; i < VECTORS; i++) sum[row][i] = add_products<T>(sum[row][i], columns[i], same);
    }
  }
  for (int row = 0; row < ROWS; row++)
    for (int i = 0; i < VECTORS; i++) _mm512_store_ps(sums[row] + i * LANES, sum[row][i]);
}

// The same for any number of columns that is a multiple of LANES.
template <typename T>
AVX512 void multiply_columns(const word* const* left, int count, Rows<const word> right, int columns, Rows<float> sums) {
  for (int first = 0; first < columns; first += COLUMNS) {
    float* begin[ROWS];
    for (int row = 0; row < ROWS; row++) begin[row] = sums[row] + first;
    const Rows<const word> part{right[0] + first, right.stride};
    switch (std::min(columns - first, COLUMNS) / LANES) {
      case 1: multiply<T, 1>(left, count, part, begin); break;
      case 2: multiply<T, 2>(left, count, part, begin); break;
      case 3: multiply<T, 3>(left, count, part, begin); break;
      default: multiply<T, 4>(left, count, part, begin);
    }
  }
}

// Scores of a query to the `count` keys of a page -> weights 2 ^ (score - largest); 0 up to a whole vector. Corrects what
// the query has summed up so far, if the largest score has changed.
template <typename T>
AVX512 void soften(const float* scores, int count, float scale, int dim, T* weights, float* sums, float& largest,
                   float& total) {
  const __m512 factor = _mm512_set1_ps(scale * LOG2_E), nothing = _mm512_set1_ps(MINUS_INFINITY);
  const int vectors = (count + LANES - 1) / LANES;
  __m512 scaled[PAGE / LANES], top = _mm512_set1_ps(largest), sum = _mm512_setzero_ps();
  for (int i = 0; i < vectors; i++) {
    const __m512 score = _mm512_load_ps(scores + i * LANES);
    scaled[i] = _mm512_mask_mul_ps(nothing, lanes_below(count - i * LANES), score, factor);
    top = _mm512_max_ps(top, scaled[i]);
  }
  const float now = _mm512_reduce_max_ps(top);
  for (int i = 0; i < vectors; i++) {
    const __m512 weight = power_of_two(_mm512_sub_ps(scaled[i], _mm512_set1_ps(now)));
    sum = _mm512_add_ps(sum, weight);
    store(weights + i * LANES, weight);
  }
  const float correction = std::exp2(largest - now);
  total = total * correction + _mm512_reduce_add_ps(sum);
  largest = now;
  if (correction == 1) return;
  for (int i = 0; i < dim; i += LANES)
    _mm512_store_ps(sums + i, _mm512_mul_ps(_mm512_load_ps(sums + i), _mm512_set1_ps(correction)));
}

// Queries of an entry whose heads share a key/value head, or their outputs: row r is that of head r % group of token
// r / group.
template <typename T>
struct Heads {
  T* begin;
  std::int64_t token_stride, group, dim;
  T* operator[](std::int64_t row) const { return begin + row / group * token_stride + row % group * dim; }
};

// The pages of one key/value head, of keys or of values.
template <typename T>
struct Pages {
  const T* begin;
  const std::int32_t* table;
  std::int64_t page_stride, position_stride;
  Rows<const T> operator[](std::int64_t page) const {
    return {begin + table[page] * page_stride, position_stride};
  }
};

// The attention of the rows from `first` on, of which there are up to TASK_ROWS. The last of `causal` tokens sees
// num_keys keys, and each one before it a key less; if `causal` is 0 all see num_keys.
template <typename T>
AVX512 void attend(const Heads<const T>& queries, const Heads<T>& out, std::int64_t first, int num_rows,
                   const Pages<T>& keys, const Pages<T>& values, std::int64_t num_keys, std::int64_t causal,
                   float scale, Scratch& scratch) {
  const int dim = static_cast<int>(queries.dim);
  const Rows<float> sums{scratch.sums, dim};
  const int used_rows = (num_rows + ROWS - 1) / ROWS * ROWS;
  std::fill_n(scratch.sums, used_rows * dim, 0.0f);
  std::fill_n(scratch.largest, used_rows, MINUS_INFINITY);
  std::fill_n(scratch.total, used_rows, 0.0f);
  for (std::int64_t page = 0; page * PAGE < num_keys; page++) {
    const int count = static_cast<int>(std::min<std::int64_t>(num_keys - page * PAGE, PAGE));
    const int columns = (count + LANES - 1) / LANES * LANES;
    pack_keys(keys[page], count, dim, scratch.keys);
    const Rows<const word> packed_values = pack_values(values[page], count, dim, scratch.values);
    for (int begin = 0; begin < num_rows; begin += ROWS) {
      alignas(64) float scores[ROWS][PAGE] = {};
      alignas(64) T weights[ROWS][PAGE];
      const word *query[ROWS], *weight[ROWS];
      for (int i = 0; i < ROWS; i++) {  // rows behind the last one repeat it; their sums are not read
        query[i] = reinterpret_cast<const word*>(queries[first + std::min(begin + i, num_rows - 1)]);
        weight[i] = reinterpret_cast<const word*>(weights[i]);
      }
      multiply_columns<T>(query, dim / IN_WORD<T>, {scratch.keys, PAGE}, columns, {scores[0], PAGE});
      for (int i = 0; i < ROWS; i++) {
        const std::int64_t token = (first + std::min(begin + i, num_rows - 1)) / queries.group;
        const std::int64_t hidden = causal ? causal - 1 - token : 0;
        const int seen = static_cast<int>(std::clamp<std::int64_t>(num_keys - hidden - page * PAGE, 0, count));
        const int written = (seen + LANES - 1) / LANES * LANES;
        if (seen)
          soften(scores[i], seen, scale, dim, weights[i], sums[begin + i], scratch.largest[begin + i],
                 scratch.total[begin + i]);
        std::fill_n(weights[i] + written, columns - written, T{0});
      }
      const int words = (count + IN_WORD<T> - 1) / IN_WORD<T>;
      multiply_columns<T>(weight, words, packed_values, dim, {sums[begin], dim});
    }
  }
  for (int row = 0; row < num_rows; row++) {
    T* result = out[first + row];
    const __m512 share = _mm512_set1_ps(1 / scratch.total[row]);
    for (int i = 0; i < dim; i += LANES) store(result + i, _mm512_mul_ps(_mm512_load_ps(sums[row] + i), share));
  }
}

struct Task {
  std::int64_t entry, first_token, kv_head, first_row, num_rows;
};

}  // namespace

// Attention of queries [T, heads, dim], whose tokens are `token_stride` elements apart, over the pages of two caches
// [N, PAGE, kv_heads, dim] -> out [T, heads, dim].
// `lengths` and `kv_lengths` are those of the entries; entry e reads the pages from tables + e * table_stride on.
// `causal` says of each entry whether it is causal; null: none is.
// `strides` are those of the first three dimensions of both caches, in elements. dim is a multiple of 16, and at most
// MAX_DIM. Elements are float32 if `wide` is not 0, and otherwise bfloat16.
extern "C" void lopa_attention(const void* queries, std::int64_t token_stride, const void* keys, const void* values,
                               void* out, const std::int64_t* lengths, const std::int64_t* kv_lengths,
                               const std::int64_t* causal, std::int64_t num_entries, const std::int32_t* tables,
                               std::int64_t table_stride, const std::int64_t* strides, std::int64_t heads,
                               std::int64_t kv_heads, std::int64_t dim, float scale, int wide, int threads) {
  const std::int64_t group = heads / kv_heads;
  std::vector<Task> tasks;
  for (std::int64_t entry = 0, token = 0; entry < num_entries; token += lengths[entry++])
    for (std::int64_t kv_head = 0; kv_head < kv_heads; kv_head++)
      for (std::int64_t row = 0, rows = lengths[entry] * group; row < rows; row += TASK_ROWS)
        tasks.push_back({entry, token, kv_head, row, std::min<std::int64_t>(rows - row, TASK_ROWS)});
  by_type(wide, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (std::size_t i = 0; i < tasks.size(); i++) {
      static thread_local Scratch scratch;
      const Task& task = tasks[i];
      const Heads<const T> rows{
          static_cast<const T*>(queries) + task.first_token * token_stride + task.kv_head * group * dim, token_stride,
          group, dim};
      const Heads<T> results{static_cast<T*>(out) + (task.first_token * heads + task.kv_head * group) * dim,
                             heads * dim, group, dim};
      const auto pages_of = [&](const void* cache, const std::int64_t* of) {
        return Pages<T>{static_cast<const T*>(cache) + task.kv_head * of[2], tables + task.entry * table_stride, of[0],
                        of[1]};
      };
      attend(rows, results, task.first_row, static_cast<int>(task.num_rows), pages_of(keys, strides),
             pages_of(values, strides + 3), kv_lengths[task.entry],
             causal && causal[task.entry] ? lengths[task.entry] : 0, scale, scratch);
    }
  });
}
