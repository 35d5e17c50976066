// Sign bits of an encoder: plainly, or by AVX-512, whose comparisons give bits.
#include "signs.h"

#include "elements.h"

#ifdef TW_HAS_CLONES
#include <immintrin.h>
#endif

namespace thinwire {
namespace {

#ifdef TW_HAS_CLONES

TW_WIDE std::int32_t wide_signs(const f32* q, std::size_t m, std::uint8_t* out) {
    const __m512i size = _mm512_set1_epi32(0x7FFFFFFF);
    __m512i peaks = _mm512_setzero_si512();
    const auto sixteen = [&](__m512 values) __attribute__((always_inline, target("arch=x86-64-v4"))) {
        peaks = _mm512_maskz_max_epi32(0xFFFF, peaks, _mm512_and_si512(_mm512_castps_si512(values), size));
        return _mm512_cmp_ps_mask(values, _mm512_setzero_ps(), _CMP_LT_OQ);
    };
    std::size_t i = 0;
    for (; i + 16 <= m; i += 16) {
        const __mmask16 negative = sixteen(_mm512_loadu_ps(q + i));
        std::memcpy(out + i / 8, &negative, 2);
    }
    if (i < m) {
        const auto real = static_cast<__mmask16>((1u << (m - i)) - 1);
        const __mmask16 negative = sixteen(_mm512_maskz_loadu_ps(real, q + i));
        std::memcpy(out + i / 8, &negative, (m - i + 7) / 8);
    }
    alignas(64) std::int32_t last[16];
    _mm512_store_si512(last, peaks);
    return *std::max_element(last, last + 16);
}

#endif

TW_CLONES std::int32_t plain_signs(const f32* __restrict q, std::size_t m, std::uint8_t* __restrict out) {
    alignas(64) std::uint64_t words[CHUNK / 8];
    const std::size_t num_words = (m + 7) / 8;
    words[num_words - 1] = 0;
    auto* flags = reinterpret_cast<std::uint8_t*>(words);
    for (std::size_t i = 0; i < m; i++) flags[i] = q[i] < 0.0f;
    // The product moves the flag of element 8 * j + i, byte i of a word, to bit 56 + i.
    for (std::size_t j = 0; j < num_words; j++)
        out[j] = static_cast<std::uint8_t>((words[j] * 0x0102040810204080u) >> 56);
    return peak_magnitude(q, m);
}

}  // namespace

std::int32_t pack_signs(const f32* q, std::size_t m, std::uint8_t* out) {
#ifdef TW_HAS_CLONES
    static const bool wide = __builtin_cpu_supports("x86-64-v4");
    if (wide) return wide_signs(q, m, out);
#endif
    return plain_signs(q, m, out);
}

}  // namespace thinwire
