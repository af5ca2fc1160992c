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

AVX512 inline __mmask16 lanes_below(int count) {
  return count >= LANES ? 0xffff : (1u << std::max(count, 0)) - 1;
}

AVX512 inline __m512 load(const bfloat16* x) {
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// Rounds to the nearest bfloat16, ties to even.
AVX512 inline void store(bfloat16* out, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(x));
}

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

}  // namespace
