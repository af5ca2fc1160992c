// The instructions of AVX512-BF16 that the kernels use, in plain C++: in tests it takes the place of the compiler's own
// header, so that the kernels run, slowly, on every processor.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

typedef float __m256 __attribute__((vector_size(32)));
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

static inline __m256 _mm256_load_ps(const void* x) { return from_memory<__m256>(x); }
static inline __m256i _mm256_load_si256(const __m256i* x) { return from_memory<__m256i>(x); }
static inline void _mm256_store_ps(void* out, __m256 x) { std::memcpy(out, &x, sizeof x); }

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
static inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
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
static inline __m256 _mm256_set1_ps(float x) { return x - __m256{}; }
static inline __m256i _mm256_set1_epi32(std::int32_t x) {
  typedef std::int32_t words __attribute__((vector_size(32)));
  return reinterpret_cast<__m256i>(x - words{});
}
static inline __m256 _mm256_setzero_ps() { return __m256{}; }
static inline __m256i _mm256_and_si256(__m256i a, __m256i b) { return a & b; }
static inline __m256i _mm256_slli_epi32(__m256i x, int bits) {
  typedef std::int32_t words __attribute__((vector_size(32)));
  return reinterpret_cast<__m256i>(reinterpret_cast<words>(x) << bits);
}
static inline __m256 _mm256_castsi256_ps(__m256i x) { return reinterpret_cast<__m256>(x); }
static inline __m256 _mm256_fmadd_ps(__m256 a, __m256 b, __m256 c) {
  for (int i = 0; i < 8; i++) c[i] = std::fma(a[i], b[i], c[i]);
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

// ---- sums of int8 products ------------------------------------------------------------------------------------------

template <typename Number, typename Vector>
static inline Number part(const Vector& x, int i) {
  return from_memory<Number>(reinterpret_cast<const Number*>(&x) + i);
}
static inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  for (int i = 0; i < 64; i++) sum[i / 4] += part<std::uint8_t>(a, i) * part<std::int8_t>(b, i);
  return sum;
}
static inline __m256i _mm256_maddubs_epi16(__m256i a, __m256i b) {
  __m256i out;
  FOR_EACH_LANE {
    std::int32_t sum = 0;
    for (int j = 2 * i; j < 2 * i + 2; j++) sum += part<std::uint8_t>(a, j) * part<std::int8_t>(b, j);
    out[i] = static_cast<std::int16_t>(std::clamp(sum, -32768, 32767));
  }
  return out;
}
static inline __m256i of_words(const std::int32_t* words) { return from_memory<__m256i>(words); }
static inline __m256i _mm256_madd_epi16(__m256i a, __m256i b) {
  std::int32_t words[8];
  for (int i = 0; i < 8; i++) words[i] = a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return of_words(words);
}
static inline __m256i _mm256_add_epi32(__m256i a, __m256i b) {
  std::int32_t words[8];
  for (int i = 0; i < 8; i++) words[i] = part<std::int32_t>(a, i) + part<std::int32_t>(b, i);
  return of_words(words);
}
static inline __m256i _mm256_add_epi16(__m256i a, __m256i b) { return a + b; }
static inline __m256i _mm256_setzero_si256() { return __m256i{}; }
static inline __m256i _mm256_set1_epi16(std::int16_t x) { return x - __m256i{}; }
static inline __m256i _mm256_set1_epi8(std::int8_t x) { return static_cast<std::int16_t>((x & 0xff) * 0x101) - __m256i{}; }
static inline __m256i _mm256_xor_si256(__m256i a, __m256i b) { return a ^ b; }
static inline __m256i _mm256_sign_epi8(__m256i a, __m256i b) {  // -128 stays itself, as in the instruction
  std::int8_t bytes[32];
  for (int i = 0; i < 32; i++) {
    const int sign = part<std::int8_t>(b, i);
    bytes[i] = static_cast<std::int8_t>(sign < 0 ? -part<std::int8_t>(a, i) : sign ? part<std::int8_t>(a, i) : 0);
  }
  return from_memory<__m256i>(bytes);
}
static inline __m256i _mm256_abs_epi8(__m256i x) { return _mm256_sign_epi8(x, x); }

// ---- tiles ----------------------------------------------------------------------------------------------------------

struct Tiles {
  std::uint16_t bytes[8];
  std::uint8_t rows[8], data[8][16][64];
};
static thread_local Tiles tiles;

static inline void _tile_loadconfig(const void* config) {
  const auto* at = static_cast<const std::uint8_t*>(config);
  std::memcpy(tiles.bytes, at + 16, sizeof tiles.bytes);
  std::memcpy(tiles.rows, at + 48, sizeof tiles.rows);
}
static inline void _tile_release() { tiles = {}; }
static inline void _tile_zero(int number) { std::memset(tiles.data[number], 0, sizeof tiles.data[number]); }
static inline void _tile_loadd(int number, const void* from, long stride) {
  _tile_zero(number);
  for (int row = 0; row < tiles.rows[number]; row++)
    std::memcpy(tiles.data[number][row], static_cast<const char*>(from) + row * stride, tiles.bytes[number]);
}
static inline void _tile_stored(int number, void* to, long stride) {
  for (int row = 0; row < tiles.rows[number]; row++)
    std::memcpy(static_cast<char*>(to) + row * stride, tiles.data[number][row], tiles.bytes[number]);
}
static inline void _tile_dpbsud(int out, int a, int b) {
  for (int row = 0; row < tiles.rows[out]; row++)
    for (int column = 0; column < 16; column++) {
      std::int32_t sum = from_memory<std::int32_t>(tiles.data[out][row] + 4 * column);
      for (int i = 0; i < tiles.bytes[a]; i++)
        sum += static_cast<std::int8_t>(tiles.data[a][row][i]) * tiles.data[b][i / 4][4 * column + i % 4];
      std::memcpy(tiles.data[out][row] + 4 * column, &sum, sizeof sum);
    }
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

static inline void _tile_dpbf16ps(int sums, int left, int right) {
  for (int row = 0; row < tiles.rows[left]; row++)
    for (int pair = 0; pair < 16; pair++) {
      const auto word = from_memory<std::int32_t>(tiles.data[left][row] + 4 * pair);
      const __m512bh columns = from_memory<__m512bh>(tiles.data[right][pair]);
      const __m512 sum = from_memory<__m512>(tiles.data[sums][row]);
      _mm512_store_ps(tiles.data[sums][row], _mm512_dpbf16_ps(sum, columns, (__m512bh)_mm512_set1_epi32(word)));
    }
}
