// Uniforms for the encoders: as philox.h writes them down, or by AVX-512 where the machine has it.
#include "philox.h"

#include <cstring>

#ifdef TW_HAS_CLONES
#include <immintrin.h>
#endif

namespace thinwire {
namespace {

#ifdef TW_HAS_CLONES

using Wide [[gnu::vector_size(64)]] = std::uint64_t;

#define TW_WIDE __attribute__((target("arch=x86-64-v4")))

// Products of the low halves.
TW_WIDE inline Wide low_product(Wide c, std::uint64_t m) {
    return reinterpret_cast<Wide>(_mm512_maskz_mul_epu32(0xFF, reinterpret_cast<__m512i>(c), _mm512_set1_epi64(m)));
}

// By hand, since compilers miss that these products need the low half of each lane only: twice as fast as their code.
// Every second one of sixteen counters, its words in the low halves of 64 bits; what the high halves hold is not used.
TW_WIDE void wide_chunk(const EncodeJob& job, std::uint64_t chunk, float* __restrict u) {
    const std::uint64_t first = LANES * chunk;
    Wide words[2][4];
    for (std::uint64_t odd = 0; odd < 2; odd++) {
        Wide c0 = Wide{0, 2, 4, 6, 8, 10, 12, 14} + (first + odd), c1 = Wide{} + (first >> 32);
        Wide c2 = Wide{} + job.step, c3 = Wide{} + job.stream;
        auto k0 = static_cast<std::uint32_t>(job.key), k1 = static_cast<std::uint32_t>(job.key >> 32);
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            const Wide p0 = low_product(c0, 0xD2511F53), p1 = low_product(c2, 0xCD9E8D57);
            c0 = (p1 >> 32) ^ c1 ^ std::uint64_t{k0};
            c1 = p1;
            c2 = (p0 >> 32) ^ c3 ^ std::uint64_t{k1};
            c3 = p0;
            k0 += 0x9E3779B9;
            k1 += 0xBB67AE85;
        }
        words[odd][0] = c0;
        words[odd][1] = c1;
        words[odd][2] = c2;
        words[odd][3] = c3;
    }
    for (std::size_t w = 0; w < 4; w++) {
        const Wide sixteen = (words[0][w] & 0xFFFFFFFF) | words[1][w] << 32;
        std::uint32_t word[LANES];
        std::memcpy(word, &sixteen, sizeof word);
        to_uniforms(word, u + 2 * LANES * w);
    }
}

#endif

TW_CLONES void plain_chunks(const EncodeJob& job, std::uint64_t first, std::uint64_t end, float* u) {
    for (std::uint64_t chunk = first; chunk < end; chunk++) uniform_chunk(job, chunk, u + UNIFORM_CHUNK * (chunk - first));
}

}  // namespace

void uniform_chunks(const EncodeJob& job, std::uint64_t first, std::uint64_t end, float* u) {
#ifdef TW_HAS_CLONES
    static const bool wide = __builtin_cpu_supports("x86-64-v4");
    if (wide) {
        for (std::uint64_t chunk = first; chunk < end; chunk++) wide_chunk(job, chunk, u + UNIFORM_CHUNK * (chunk - first));
        return;
    }
#endif
    plain_chunks(job, first, end, u);
}

}  // namespace thinwire
