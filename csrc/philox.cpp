// Uniforms for the encoders: as philox.h writes them down, or by AVX-512 where the machine has it.
#include "philox.h"

#ifdef TW_HAS_CLONES
#include <immintrin.h>
#endif

namespace thinwire {
namespace {

#ifdef TW_HAS_CLONES

using Wide [[gnu::vector_size(64)]] = std::uint64_t;
using Words [[gnu::vector_size(64)]] = std::uint32_t;
using Floats [[gnu::vector_size(64), gnu::aligned(1), gnu::may_alias]] = float;

// Products of the low halves. By hand, since compilers miss that no more of each lane is needed.
TW_WIDE TW_INLINE Wide low_product(Wide c, std::uint64_t m) {
    return reinterpret_cast<Wide>(_mm512_maskz_mul_epu32(0xFF, reinterpret_cast<__m512i>(c), _mm512_set1_epi64(m)));
}

// Two uniforms of each of sixteen words, half of them in `even` and half in `odd`. A uniform, h / 2^16 + 1 / 2^17, is a
// float in [1, 2) whose mantissa has the bits of h and one more, less 1.
TW_WIDE TW_INLINE void wide_uniforms(Wide even, Wide odd, float* u) {
    const Words words = reinterpret_cast<Words>((even & 0xFFFFFFFF) | odd << 32);
    const Words low = (words << 7 & 0x7FFF80) | 0x3F800040, high = (words >> 9 & 0x7FFF80) | 0x3F800040;
    *reinterpret_cast<Floats*>(u) = reinterpret_cast<Floats>(low) - 1.0f;
    *reinterpret_cast<Floats*>(u + LANES) = reinterpret_cast<Floats>(high) - 1.0f;
}

// States of eight counters, every second one of a chunk, lie in the low halves of 64 bits; what the high halves hold is
// not used. Two chunks at a time: a round waits for its products, and there are registers to do others meanwhile.
template <std::size_t num_chunks>
TW_WIDE TW_INLINE void wide_chunks(const EncodeJob& job, std::uint64_t chunk, float* __restrict u) {
    constexpr std::size_t states = 2 * num_chunks;
    Wide c0[states], c1[states], c2[states], c3[states];
#pragma GCC unroll 4
    for (std::size_t s = 0; s < states; s++) {
        const std::uint64_t first = LANES * (chunk + s / 2);
        c0[s] = Wide{0, 2, 4, 6, 8, 10, 12, 14} + (first + s % 2);
        c1[s] = Wide{} + (first >> 32);
        c2[s] = Wide{} + job.step;
        c3[s] = Wide{} + job.stream;
    }
    auto k0 = static_cast<std::uint32_t>(job.key), k1 = static_cast<std::uint32_t>(job.key >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
#pragma GCC unroll 4
        for (std::size_t s = 0; s < states; s++) {
            const Wide p0 = low_product(c0[s], 0xD2511F53), p1 = low_product(c2[s], 0xCD9E8D57);
            c0[s] = (p1 >> 32) ^ c1[s] ^ std::uint64_t{k0};
            c1[s] = p1;
            c2[s] = (p0 >> 32) ^ c3[s] ^ std::uint64_t{k1};
            c3[s] = p0;
        }
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
#pragma GCC unroll 2
    for (std::size_t c = 0; c < num_chunks; c++, u += UNIFORM_CHUNK) {
        wide_uniforms(c0[2 * c], c0[2 * c + 1], u);
        wide_uniforms(c1[2 * c], c1[2 * c + 1], u + 2 * LANES);
        wide_uniforms(c2[2 * c], c2[2 * c + 1], u + 4 * LANES);
        wide_uniforms(c3[2 * c], c3[2 * c + 1], u + 6 * LANES);
    }
}

TW_WIDE void wide_chunks(const EncodeJob& job, std::uint64_t first, std::uint64_t end, float* u) {
    for (; first + 2 <= end; first += 2, u += 2 * UNIFORM_CHUNK) wide_chunks<2>(job, first, u);
    if (first < end) wide_chunks<1>(job, first, u);
}

#endif

TW_CLONES void plain_chunks(const EncodeJob& job, std::uint64_t first, std::uint64_t end, float* u) {
    for (std::uint64_t chunk = first; chunk < end; chunk++) uniform_chunk(job, chunk, u + UNIFORM_CHUNK * (chunk - first));
}

}  // namespace

void uniform_chunks(const EncodeJob& job, std::uint64_t first, std::uint64_t end, float* u) {
#ifdef TW_HAS_CLONES
    static const bool wide = __builtin_cpu_supports("x86-64-v4");
    if (wide) return wide_chunks(job, first, end, u);
#endif
    plain_chunks(job, first, end, u);
}

}  // namespace thinwire
