// What the kernels share: vectors of 16 float32 numbers, on x86 processors with AVX512-BF16.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#ifndef AVX512  // tests define them as nothing, to compile for any processor
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define AVX2 __attribute__((target("avx2,fma")))
#define AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl")))
#endif

namespace {

using bfloat16 = std::uint16_t;

constexpr int LANES = 16;  // float32 numbers of a vector
constexpr float LOG2_E = 1.44269504f;

inline __mmask16 lanes_below(int count) {
  return count >= LANES ? 0xffff : (1u << std::max(count, 0)) - 1;
}

// Loads a vector, with 0 in the lanes that are not `wanted`.
AVX512 inline __m512 load(const bfloat16* x, __mmask16 wanted = 0xffff) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(wanted, x)), 16));
}
AVX512 inline __m512 load(const float* x, __mmask16 wanted = 0xffff) { return _mm512_maskz_loadu_ps(wanted, x); }

// Writes the `wanted` lanes. In bfloat16 it rounds to the nearest number, ties to even.
AVX512 inline void store(bfloat16* out, __m512 x, __mmask16 wanted = 0xffff) {
  _mm256_mask_storeu_epi16(out, wanted, (__m256i)_mm512_cvtneps_pbh(x));
}
AVX512 inline void store(float* out, __m512 x, __mmask16 wanted = 0xffff) { _mm512_mask_storeu_ps(out, wanted, x); }

// 2 ^ x with a relative error below 3e-7; 0 far below, infinity far above.
AVX512 inline __m512 power_of_two(__m512 x) {
  const __m512 limited = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-200)), _mm512_set1_ps(200));
  const __m512 whole = _mm512_roundscale_ps(limited, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(limited, whole);
  __m512 power = _mm512_set1_ps(1.5403530e-4f);  // ln(2) ^ i / i!, from i = 6 down to 0
  for (float coefficient : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(coefficient));
  return _mm512_scalef_ps(power, whole);
}

// exp x with a relative error below 2e-7; 0 far below, infinity far above.
AVX512 inline __m512 exponential(__m512 x) {
  const __m512 limited = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-140)), _mm512_set1_ps(140));
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(limited, _mm512_set1_ps(LOG2_E)),
                                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // ln 2 in two parts, so that the rest is exact to the last bit.
  __m512 rest = _mm512_fmadd_ps(whole, _mm512_set1_ps(-0.693359375f), limited);
  rest = _mm512_fmadd_ps(whole, _mm512_set1_ps(2.12194440e-4f), rest);
  __m512 power = _mm512_set1_ps(1.0f / 5040);  // 1 / i!, from i = 7 down to 0
  for (float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(coefficient));
  return _mm512_scalef_ps(power, whole);
}

// Calls a function with a number of the type of a tensor's elements: float32 if they are wide, otherwise bfloat16.
template <typename Function>
void by_type(int wide, Function function) {
  wide ? function(float{}) : function(bfloat16{});
}

}  // namespace
