// The instructions of AVX512-BF16 that the kernels use, in plain C++: in tests it takes the place of the compiler's own
// header, so that the kernels run, slowly, on every processor.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

typedef float __m512 __attribute__((vector_size(64)));
typedef std::int32_t __m512i __attribute__((vector_size(64)));
typedef std::int16_t __m512bh __attribute__((vector_size(64)));
typedef std::int16_t __m256i __attribute__((vector_size(32)));
typedef std::int16_t __m256bh __attribute__((vector_size(32)));
typedef std::int8_t __m128i __attribute__((vector_size(16)));
typedef std::uint16_t __mmask16;

enum { _CMP_UNORD_Q = 3, _CMP_GT_OQ = 30, _MM_FROUND_TO_NEAREST_INT = 0, _MM_FROUND_NO_EXC = 8 };

#define FOR_EACH_LANE for (int i = 0; i < 16; i++)

template <typename Vector>
static inline Vector from_memory(const void* memory) {
  Vector vector;
  std::memcpy(&vector, memory, sizeof vector);
  return vector;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

static inline __m512 _mm512_load_ps(const void* x) { return from_memory<__m512>(x); }
static inline __m512 _mm512_loadu_ps(const void* x) { return from_memory<__m512>(x); }
static inline __m512i _mm512_load_si512(const void* x) { return from_memory<__m512i>(x); }
static inline __m256i _mm256_loadu_si256(const __m256i* x) { return from_memory<__m256i>(x); }
static inline __m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const void* x) {
  __m512i out = {};
  FOR_EACH_LANE if (mask >> i & 1) std::memcpy(&out[i], static_cast<const std::int32_t*>(x) + i, 4);
  return out;
}
static inline __m512i _mm512_loadu_si512(const void* x) { return from_memory<__m512i>(x); }
static inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* x) {
  return reinterpret_cast<__m512>(_mm512_maskz_loadu_epi32(mask, x));
}
static inline __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* x) {
  __m256i out = {};
  FOR_EACH_LANE if (mask >> i & 1) std::memcpy(&out[i], static_cast<const std::int16_t*>(x) + i, 2);
  return out;
}
static inline void _mm512_mask_storeu_ps(void* out, __mmask16 mask, __m512 x) {
  FOR_EACH_LANE if (mask >> i & 1) static_cast<float*>(out)[i] = x[i];
}
static inline void _mm256_mask_storeu_epi16(void* out, __mmask16 mask, __m256i x) {
  FOR_EACH_LANE if (mask >> i & 1) static_cast<std::int16_t*>(out)[i] = x[i];
}
static inline void _mm512_storeu_si512(void* out, __m512i x) { std::memcpy(out, &x, sizeof x); }
static inline void _mm512_store_ps(void* out, __m512 x) { std::memcpy(out, &x, sizeof x); }
static inline void _mm512_store_si512(void* out, __m512i x) { std::memcpy(out, &x, sizeof x); }
static inline void _mm_storeu_si128(__m128i* out, __m128i x) { std::memcpy(out, &x, sizeof x); }

// ---- numbers --------------------------------------------------------------------------------------------------------

static inline __m512 _mm512_set1_ps(float x) { return x - __m512{}; }
static inline __m512i _mm512_set1_epi32(std::int32_t x) { return x - __m512i{}; }
static inline __m512 _mm512_setzero_ps() { return __m512{}; }
static inline __m512i _mm512_setzero_si512() { return __m512i{}; }
static inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
static inline __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
static inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
static inline __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }
static inline __m512 _mm512_max_ps(__m512 a, __m512 b) { return a > b ? a : b; }  // b where one of them is NaN
static inline __m512 _mm512_min_ps(__m512 a, __m512 b) { return a < b ? a : b; }
static inline __m512i _mm512_max_epi32(__m512i a, __m512i b) { return a > b ? a : b; }
static inline __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
static inline __m512i _mm512_slli_epi32(__m512i x, unsigned bits) { return x << static_cast<int>(bits); }
static inline __m512 _mm512_castsi512_ps(__m512i x) { return reinterpret_cast<__m512>(x); }
static inline __m512 _mm512_abs_ps(__m512 x) {
  FOR_EACH_LANE x[i] = std::fabs(x[i]);
  return x;
}
static inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  FOR_EACH_LANE c[i] = std::fma(a[i], b[i], c[i]);
  return c;
}
static inline __m512 _mm512_mask_mul_ps(__m512 otherwise, __mmask16 mask, __m512 a, __m512 b) {
  FOR_EACH_LANE if (mask >> i & 1) otherwise[i] = a[i] * b[i];
  return otherwise;
}
static inline __m512 _mm512_mask_mov_ps(__m512 otherwise, __mmask16 mask, __m512 x) {
  FOR_EACH_LANE if (mask >> i & 1) otherwise[i] = x[i];
  return otherwise;
}
static inline __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 x) { return _mm512_mask_mov_ps(__m512{}, mask, x); }
static inline __m512i _mm512_mask_mov_epi32(__m512i otherwise, __mmask16 mask, __m512i x) {
  FOR_EACH_LANE if (mask >> i & 1) otherwise[i] = x[i];
  return otherwise;
}
static inline __m512 _mm512_roundscale_ps(__m512 x, int) {
  FOR_EACH_LANE x[i] = std::nearbyint(x[i]);
  return x;
}
static inline __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
  FOR_EACH_LANE a[i] = static_cast<float>(std::ldexp(a[i], static_cast<int>(b[i])));
  return a;
}
static inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int kind) {
  __mmask16 mask = 0;
  FOR_EACH_LANE {
    const bool holds = kind == _CMP_GT_OQ ? a[i] > b[i] : std::isnan(a[i]) || std::isnan(b[i]);
    mask |= static_cast<__mmask16>(holds << i);
  }
  return mask;
}
static inline float _mm512_reduce_add_ps(__m512 x) {  // halves are added to each other
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
}
static inline float _mm512_reduce_max_ps(__m512 x) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
  return x[0];
}

// ---- conversions ----------------------------------------------------------------------------------------------------

static inline __m512i _mm512_cvtepu16_epi32(__m256i x) {
  __m512i out;
  FOR_EACH_LANE out[i] = static_cast<std::uint16_t>(x[i]);
  return out;
}
static inline __m256bh _mm512_cvtneps_pbh(__m512 x) {
  __m256bh out;
  FOR_EACH_LANE {
    std::uint32_t bits;
    const float number = x[i];
    std::memcpy(&bits, &number, 4);
    bits = std::isnan(number) ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
    out[i] = static_cast<std::int16_t>(bits >> 16);
  }
  return out;
}
static inline __m512i _mm512_cvtps_epi32(__m512 x) {
  __m512i out;
  FOR_EACH_LANE {
    const float whole = std::nearbyint(x[i]);
    const bool fits = whole >= -2147483648.0f && whole < 2147483648.0f;  // false for NaN
    out[i] = fits ? static_cast<std::int32_t>(whole) : std::numeric_limits<std::int32_t>::min();
  }
  return out;
}
static inline __m128i _mm512_cvtsepi32_epi8(__m512i x) {
  __m128i out;
  FOR_EACH_LANE out[i] = static_cast<std::int8_t>(std::clamp(x[i], -128, 127));
  return out;
}

// ---- pairs of bfloat16 numbers, and transposing ---------------------------------------------------------------------

static inline float from_bfloat16(std::int16_t x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(static_cast<std::uint16_t>(x)) << 16;
  return from_memory<float>(&bits);
}
static inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  FOR_EACH_LANE {
    sum[i] += from_bfloat16(a[2 * i + 1]) * from_bfloat16(b[2 * i + 1]);
    sum[i] += from_bfloat16(a[2 * i]) * from_bfloat16(b[2 * i]);
  }
  return sum;
}
// Each works within the quarters of 128 bits: four words, or two pairs of words.
static inline __m512i unpack(__m512i a, __m512i b, int first, int width) {
  __m512i out;
  for (int quarter = 0; quarter < 16; quarter += 4)
    for (int i = 0; i < 4; i++) {
      const int word = quarter + first + i / (2 * width) * width + i % width;
      out[quarter + i] = i / width % 2 ? b[word] : a[word];
    }
  return out;
}
static inline __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) { return unpack(a, b, 0, 1); }
static inline __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) { return unpack(a, b, 2, 1); }
static inline __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) { return unpack(a, b, 0, 2); }
static inline __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) { return unpack(a, b, 2, 2); }
static inline __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int quarters) {
  __m512i out;
  FOR_EACH_LANE out[i] = (i < 8 ? a : b)[4 * (quarters >> i / 4 * 2 & 3) + i % 4];
  return out;
}
