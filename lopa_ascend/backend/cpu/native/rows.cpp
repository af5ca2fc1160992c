// Operations on the rows of matrices in bfloat16, each in one pass through memory, on x86 processors with AVX512-BF16.
//
// A row goes through the same operations in the same order, whatever rows are computed beside it and whichever thread
// computes it: its result has the same bits alone and among others. Row lengths are multiples of 16.

#include <cmath>

#include "vectors.h"

namespace {

using int8 = std::int8_t;
using int64 = std::int64_t;

constexpr int LONGEST_ROW = 65536;

// silu(gate) * up, rounded to bfloat16.
AVX512 void swiglu(const bfloat16* gate, const bfloat16* up, int64 size, bfloat16* out) {
  for (int64 i = 0; i < size; i += LANES) {
    const __m512 x = load(gate + i);
    const __m512 power = power_of_two(_mm512_mul_ps(x, _mm512_set1_ps(-LOG2_E)));
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
AVX512 float add_and_measure(const bfloat16* x, bfloat16* residual, int64 size, float eps) {
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
template <typename Load>
AVX512 inline void rotate(Load load_at, const bfloat16* cos, const bfloat16* sin, int64 half, bfloat16* out) {
  for (int64 i = 0; i < half; i += LANES) {
    const __m512 left = load_at(i), right = load_at(half + i), c = load(cos + i), s = load(sin + i);
    store(out + i, _mm512_sub_ps(_mm512_mul_ps(left, c), _mm512_mul_ps(right, s)));
    store(out + half + i, _mm512_add_ps(_mm512_mul_ps(right, c), _mm512_mul_ps(left, s)));
  }
}

AVX512 void rope(const bfloat16* x, const bfloat16* cos, const bfloat16* sin, int64 half, bfloat16* out) {
  rotate([&](int64 i) AVX512 { return load(x + i); }, cos, sin, half, out);
}

AVX512 void norm_rope(const bfloat16* x, const bfloat16* weight, const bfloat16* cos, const bfloat16* sin, int64 half,
                      float eps, bfloat16* out) {
  const __m512 factor = _mm512_set1_ps(add_and_measure(x, nullptr, 2 * half, eps));
  const auto normed = [&](int64 i) AVX512 {
    return _mm512_mul_ps(_mm512_mul_ps(load(x + i), factor), load(weight + i));
  };
  rotate(normed, cos, sin, half, out);
}

AVX512 void swiglu_quant(const bfloat16* gate_up, int64 size, int8* codes, float* scale) {
  static thread_local bfloat16 row[LONGEST_ROW];
  swiglu(gate_up, gate_up + size, size, row);
  *scale = quantize([&](int64 i) AVX512 { return load(row + i); }, size, codes);
}

AVX512 void norm(const bfloat16* x, bfloat16* residual, const bfloat16* weight, int64 size, float eps, bfloat16* out) {
  const __m512 factor = _mm512_set1_ps(add_and_measure(x, residual, size, eps));
  const bfloat16* total = residual ? residual : x;
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

}  // namespace

#define FOR_EACH_ROW                                           \
  _Pragma("omp parallel for num_threads(threads) schedule(static)") for (int64 r = 0; r < rows; r++)

extern "C" {

// gate_up [rows, 2 * size] -> out [rows, size].
void lopa_swiglu(const bfloat16* gate_up, int64 rows, int64 size, bfloat16* out, int threads) {
  FOR_EACH_ROW swiglu(gate_up + 2 * r * size, gate_up + (2 * r + 1) * size, size, out + r * size);
}

// The same as int8 [rows, size], and a scale for each row [rows]. Rows of at most LONGEST_ROW.
void lopa_swiglu_quant(const bfloat16* gate_up, int64 rows, int64 size, int8* codes, float* scale, int threads) {
  FOR_EACH_ROW swiglu_quant(gate_up + 2 * r * size, size, codes + r * size, scale + r);
}

// x [rows, size], which is added to residual [rows, size] if that is not null -> out [rows, size].
void lopa_norm(const bfloat16* x, bfloat16* residual, const bfloat16* weight, int64 rows, int64 size, float eps,
               bfloat16* out, int threads) {
  FOR_EACH_ROW norm(x + r * size, residual ? residual + r * size : nullptr, weight, size, eps, out + r * size);
}

// The same as int8 [rows, size], and a scale for each row [rows].
void lopa_norm_quant(const bfloat16* x, bfloat16* residual, const bfloat16* weight, int64 rows, int64 size, float eps,
                     int8* codes, float* scale, int threads) {
  FOR_EACH_ROW norm_quant(x + r * size, residual ? residual + r * size : nullptr, weight, size, eps, codes + r * size,
                          scale + r);
}

// x [rows, heads, 2 * half], whose rows are `stride` elements apart, rotated by cos and sin [rows, angles, half] -> out.
// `angles` is `heads`, or 1 if all heads of a row are rotated alike.
void lopa_rope(const bfloat16* x, int64 stride, const bfloat16* cos, const bfloat16* sin, int64 angles, int64 rows,
               int64 heads, int64 half, bfloat16* out, int threads) {
  FOR_EACH_ROW for (int64 h = 0; h < heads; h++) {
    const int64 angle = (r * angles + (angles == 1 ? 0 : h)) * half;
    rope(x + r * stride + 2 * h * half, cos + angle, sin + angle, half, out + 2 * (r * heads + h) * half);
  }
}

// The same, with one angle for all heads of a row, of the norm of every head with weight [2 * half].
void lopa_norm_rope(const bfloat16* x, int64 stride, const bfloat16* weight, const bfloat16* cos, const bfloat16* sin,
                    int64 rows, int64 heads, int64 half, float eps, bfloat16* out, int threads) {
  FOR_EACH_ROW for (int64 h = 0; h < heads; h++) {
    norm_rope(x + r * stride + 2 * h * half, weight, cos + r * half, sin + r * half, half, eps,
              out + 2 * (r * heads + h) * half);
  }
}

// product [rows, size] times scale [rows] and weight_scale [size], plus bias [size] if that is not null -> out.
void lopa_dequantize(const float* product, const float* scale, const float* weight_scale, const bfloat16* bias,
                     int64 rows, int64 size, bfloat16* out, int threads) {
  FOR_EACH_ROW dequantize(product + r * size, scale[r], weight_scale, bias, size, out + r * size);
}

}  // extern "C"
