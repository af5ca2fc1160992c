// Operations on the rows of matrices in bfloat16 or float32, each in one pass through memory, on x86 processors with
// AVX512-BF16. Arithmetic is in float32, and a result is rounded once.
//
// A row goes through the same operations in the same order, whatever rows are computed beside it and whichever thread
// computes it: its result has the same bits alone and among others. Row lengths are multiples of 16.

#include <cmath>
#include <limits>

#include "vectors.h"

namespace {

using int8 = std::int8_t;
using int64 = std::int64_t;

constexpr int LONGEST_ROW = 65536;

// silu(gate) * up.
template <typename T>
AVX512 void swiglu(const T* gate, const T* up, int64 size, T* out) {
  for (int64 i = 0; i < size; i += LANES) {
    const __m512 x = load(gate + i);
    const __m512 power = exponential(_mm512_sub_ps(_mm512_setzero_ps(), x));
    const __m512 silu = _mm512_div_ps(x, _mm512_add_ps(power, _mm512_set1_ps(1)));
    store(out + i, _mm512_mul_ps(silu, load(up + i)));
  }
}

// x as int8, and the scale: the largest magnitude / 127, NaN if an element is.
template <typename Load>
AVX512 inline float quantize(Load load_at, int64 size, int8* codes) {
  __m512 largest = _mm512_setzero_ps();
  __mmask16 is_nan = 0;  // the maximum of a number and NaN is the number
  for (int64 i = 0; i < size; i += LANES) {
    const __m512 value = load_at(i);
    largest = _mm512_max_ps(largest, _mm512_abs_ps(value));
    is_nan |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  }
  const float scale = is_nan ? std::nanf("") : _mm512_reduce_max_ps(largest) / 127;
  const __m512 divisor = _mm512_set1_ps(scale == 0 ? 1 : scale);
  for (int64 i = 0; i < size; i += LANES) {
    // To the nearest integer, ties to even. With a scale too small for full precision it may lie beyond 127.
    const __m512i code = _mm512_cvtps_epi32(_mm512_div_ps(load_at(i), divisor));
    const __m512i low = _mm512_max_epi32(code, _mm512_set1_epi32(-127));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtsepi32_epi8(low));
  }
  return scale;
}

// Adds x to the residual, if there is one, and returns 1 / the root mean square of the sum.
template <typename T>
AVX512 float add_and_measure(const T* x, T* residual, int64 size, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int64 i = 0; i < size; i += LANES) {
    __m512 value = load(x + i);
    if (residual) {
      store(residual + i, _mm512_add_ps(value, load(residual + i)));
      value = load(residual + i);
    }
    squares = _mm512_fmadd_ps(value, value, squares);
  }
  return 1 / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(size) + eps);
}

// The first `half` elements of a head and the others rotated; cos and sin [half].
template <typename T, typename Load>
AVX512 inline void rotate(Load load_at, const T* cos, const T* sin, int64 half, T* out) {
  for (int64 i = 0; i < half; i += LANES) {
    const __mmask16 wanted = lanes_below(static_cast<int>(half - i));
    const __m512 left = load_at(i, wanted), right = load_at(half + i, wanted);
    const __m512 c = load(cos + i, wanted), s = load(sin + i, wanted);
    store(out + i, _mm512_sub_ps(_mm512_mul_ps(left, c), _mm512_mul_ps(right, s)), wanted);
    store(out + half + i, _mm512_add_ps(_mm512_mul_ps(right, c), _mm512_mul_ps(left, s)), wanted);
  }
}

template <typename T>
AVX512 void rope(const T* x, const T* cos, const T* sin, int64 half, T* out) {
  rotate([&](int64 i, __mmask16 wanted) AVX512 { return load(x + i, wanted); }, cos, sin, half, out);
}

template <typename T>
AVX512 void norm_rope(const T* x, const T* weight, const T* cos, const T* sin, int64 half, float eps, T* out) {
  const __m512 factor = _mm512_set1_ps(add_and_measure<T>(x, nullptr, 2 * half, eps));
  const auto normed = [&](int64 i, __mmask16 wanted) AVX512 {
    return _mm512_mul_ps(_mm512_mul_ps(load(x + i, wanted), factor), load(weight + i, wanted));
  };
  rotate(normed, cos, sin, half, out);
}

AVX512 void swiglu_quant(const bfloat16* gate_up, int64 size, int8* codes, float* scale) {
  static thread_local bfloat16 row[LONGEST_ROW];
  swiglu(gate_up, gate_up + size, size, row);
  *scale = quantize([&](int64 i) AVX512 { return load(row + i); }, size, codes);
}

template <typename T>
AVX512 void norm(const T* x, T* residual, const T* weight, int64 size, float eps, T* out) {
  const __m512 factor = _mm512_set1_ps(add_and_measure(x, residual, size, eps));
  const T* total = residual ? residual : x;
  for (int64 i = 0; i < size; i += LANES)
    store(out + i, _mm512_mul_ps(_mm512_mul_ps(load(total + i), factor), load(weight + i)));
}

AVX512 void norm_quant(const bfloat16* x, bfloat16* residual, const bfloat16* weight, int64 size, float eps,
                       int8* codes, float* scale) {
  const __m512 factor = _mm512_set1_ps(add_and_measure(x, residual, size, eps));
  const bfloat16* total = residual ? residual : x;
  const auto normed = [&](int64 i) AVX512 {
    return _mm512_mul_ps(_mm512_mul_ps(load(total + i), factor), load(weight + i));
  };
  *scale = quantize(normed, size, codes);
}

// A product of int8 numbers times both scales, plus the bias, if there is one.
AVX512 void dequantize(const float* product, float scale, const float* weight_scale, const bfloat16* bias, int64 size,
                       bfloat16* out) {
  for (int64 i = 0; i < size; i += LANES) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(product + i), _mm512_loadu_ps(weight_scale + i));
    const __m512 x = _mm512_mul_ps(scaled, _mm512_set1_ps(scale));
    store(out + i, bias ? _mm512_add_ps(x, load(bias + i)) : x);
  }
}

// What `score/shards.py` wants to know of a row of logits: the largest one, the sum of exp x with x = logit - largest;
// with `has_dot` the sum of x exp x; the largest logit in the columns below `limit` but `mask`, and its first column.
template <typename T>
AVX512 void row_stats(const T* logits, int64 size, int64 mask, int64 limit, bool has_dot, float* stats) {
  constexpr int SUMS = 4;  // that are added to in turn
  const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 largest = lowest, best = lowest;
  __m512i column = _mm512_setzero_si512();
  __mmask16 is_nan = 0;  // the maximum of a number and NaN is the number
  const auto lanes_at = [size](int64 i) { return lanes_below(static_cast<int>(std::min<int64>(size - i, LANES))); };
  for (int64 i = 0; i < size; i += LANES) {
    const __mmask16 wanted = lanes_at(i);
    const __m512 x = _mm512_mask_mov_ps(lowest, wanted, load(logits + i, wanted));
    largest = _mm512_max_ps(largest, x);
    is_nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    __mmask16 allowed = lanes_below(static_cast<int>(std::clamp<int64>(limit - i, 0, LANES)));
    if (mask >= i && mask < i + LANES) allowed &= ~(1u << (mask - i));
    const __mmask16 better = allowed & _mm512_cmp_ps_mask(x, best, _CMP_GT_OQ);
    best = _mm512_mask_mov_ps(best, better, x);
    column = _mm512_mask_mov_epi32(column, better, _mm512_set1_epi32(static_cast<int>(i)));
  }
  const float high = is_nan ? std::nanf("") : _mm512_reduce_max_ps(largest);
  __m512 total[SUMS] = {}, dot[SUMS] = {};
  const __m512 reference = _mm512_set1_ps(high);
  for (int64 i = 0, turn = 0; i < size; i += LANES, turn = (turn + 1) % SUMS) {
    const __mmask16 wanted = lanes_at(i);
    const __m512 x = _mm512_sub_ps(load(logits + i, wanted), reference);
    // Lower than -87 it would be subnormal, which takes longer, and changes no sum with a 1 in it. NaN stays.
    const __m512 weight = _mm512_maskz_mov_ps(wanted, exponential(_mm512_max_ps(_mm512_set1_ps(-87), x)));
    total[turn] = _mm512_add_ps(total[turn], weight);
    if (has_dot) dot[turn] = _mm512_add_ps(dot[turn], _mm512_maskz_mov_ps(wanted, _mm512_mul_ps(x, weight)));
  }
  const auto sum = [](const __m512* x) AVX512 {
    return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3])));
  };
  float values[LANES];
  std::int32_t first[LANES];
  store(values, best);
  _mm512_storeu_si512(first, column);
  int lane = 0;
  for (int i = 1; i < LANES; i++)
    if (values[i] > values[lane] || (values[i] == values[lane] && first[i] + i < first[lane] + lane)) lane = i;
  *stats++ = high;
  const auto finite = [](float x) { return x - x == 0 ? x : std::nanf(""); };
  *stats++ = finite(high) == high ? sum(total) : std::nanf("");
  if (has_dot) *stats++ = finite(sum(dot));
  *stats++ = values[lane];
  *stats++ = static_cast<float>(first[lane] + lane);
}

}  // namespace

#define FOR_EACH_ROW                                           \
  _Pragma("omp parallel for num_threads(threads) schedule(static)") for (int64 r = 0; r < rows; r++)

extern "C" {

// Where a function has `wide`, elements are float32 if it is not 0, and otherwise bfloat16.

// gate_up [rows, 2 * size] -> out [rows, size].
void lopa_swiglu(const void* gate_up, int64 rows, int64 size, void* out, int wide, int threads) {
  by_type(wide, [&](auto type) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(gate_up);
    T* to = static_cast<T*>(out);
    FOR_EACH_ROW swiglu(from + 2 * r * size, from + (2 * r + 1) * size, size, to + r * size);
  });
}

// The same as int8 [rows, size], and a scale for each row [rows]. Rows of at most LONGEST_ROW.
void lopa_swiglu_quant(const bfloat16* gate_up, int64 rows, int64 size, int8* codes, float* scale, int threads) {
  FOR_EACH_ROW swiglu_quant(gate_up + 2 * r * size, size, codes + r * size, scale + r);
}

// x [rows, size], which is added to residual [rows, size] if that is not null -> out [rows, size].
void lopa_norm(const void* x, void* residual, const void* weight, int64 rows, int64 size, float eps, void* out,
               int wide, int threads) {
  by_type(wide, [&](auto type) {
    using T = decltype(type);
    const T *from = static_cast<const T*>(x), *factors = static_cast<const T*>(weight);
    T *sums = static_cast<T*>(residual), *to = static_cast<T*>(out);
    FOR_EACH_ROW norm(from + r * size, sums ? sums + r * size : nullptr, factors, size, eps, to + r * size);
  });
}

// The same as int8 [rows, size], and a scale for each row [rows].
void lopa_norm_quant(const bfloat16* x, bfloat16* residual, const bfloat16* weight, int64 rows, int64 size, float eps,
                     int8* codes, float* scale, int threads) {
  FOR_EACH_ROW norm_quant(x + r * size, residual ? residual + r * size : nullptr, weight, size, eps, codes + r * size,
                          scale + r);
}

// x [rows, heads, 2 * half], whose rows are `stride` elements apart, rotated by cos and sin [rows, angles, half] -> out.
// `angles` is `heads`, or 1 if all heads of a row are rotated alike. half is any number, but 2 * half whole vectors.
void lopa_rope(const void* x, int64 stride, const void* cos, const void* sin, int64 angles, int64 rows, int64 heads,
               int64 half, void* out, int wide, int threads) {
  by_type(wide, [&](auto type) {
    using T = decltype(type);
    const T *cosines = static_cast<const T*>(cos), *sines = static_cast<const T*>(sin), *from = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    FOR_EACH_ROW for (int64 h = 0; h < heads; h++) {
      const int64 angle = (r * angles + (angles == 1 ? 0 : h)) * half;
      rope(from + r * stride + 2 * h * half, cosines + angle, sines + angle, half, to + 2 * (r * heads + h) * half);
    }
  });
}

// The same, with one angle for all heads of a row, of the norm of every head with weight [2 * half].
void lopa_norm_rope(const void* x, int64 stride, const void* weight, const void* cos, const void* sin, int64 rows,
                    int64 heads, int64 half, float eps, void* out, int wide, int threads) {
  by_type(wide, [&](auto type) {
    using T = decltype(type);
    const T *from = static_cast<const T*>(x), *factors = static_cast<const T*>(weight);
    const T *cosines = static_cast<const T*>(cos), *sines = static_cast<const T*>(sin);
    T* to = static_cast<T*>(out);
    FOR_EACH_ROW for (int64 h = 0; h < heads; h++) {
      norm_rope(from + r * stride + 2 * h * half, factors, cosines + r * half, sines + r * half, half, eps,
                to + 2 * (r * heads + h) * half);
    }
  });
}

// The statistics of logits [rows, size], whose rows are `stride` elements apart -> stats [rows, 4], or [rows, 5] with
// `has_dot`.
void lopa_row_stats(const void* logits, int64 stride, int64 rows, int64 size, int64 mask, int64 limit, int has_dot,
                    float* stats, int wide, int threads) {
  by_type(wide, [&](auto type) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(logits);
    FOR_EACH_ROW row_stats(from + r * stride, size, mask, limit, has_dot, stats + r * (4 + has_dot));
  });
}

// product [rows, size] times scale [rows] and weight_scale [size], plus bias [size] if that is not null -> out.
void lopa_dequantize(const float* product, const float* scale, const float* weight_scale, const bfloat16* bias,
                     int64 rows, int64 size, bfloat16* out, int threads) {
  FOR_EACH_ROW dequantize(product + r * size, scale[r], weight_scale, bias, size, out + r * size);
}

}  // extern "C"
