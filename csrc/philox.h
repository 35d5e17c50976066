// Philox-4x32-10, sixteen counters side by side: the uniforms of random.py.
#pragma once

#include <cstdint>

#include "jobs.h"

namespace thinwire {

inline constexpr std::size_t LANES = 16;
inline constexpr std::size_t UNIFORM_CHUNK = 8 * LANES;  // elements served by sixteen counters: 8 halfwords each

// The ten rounds, in place.
TW_INLINE void philox_rounds(std::uint32_t& c0, std::uint32_t& c1, std::uint32_t& c2, std::uint32_t& c3,
                             std::uint32_t k0, std::uint32_t k1) {
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        const std::uint64_t p0 = std::uint64_t{0xD2511F53} * c0, p1 = std::uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<std::uint32_t>(p1);
        c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<std::uint32_t>(p0);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
}

// Two uniforms of each of sixteen words: one of the low halves, then one of the high halves.
TW_INLINE void to_uniforms(const std::uint32_t* __restrict words, float* __restrict u) {
    for (std::size_t lane = 0; lane < LANES; lane++) {
        // Through int32: vector units convert signed integers.
        const auto even = static_cast<std::int32_t>(words[lane] & 0xFFFF);
        const auto odd = static_cast<std::int32_t>(words[lane] >> 16);
        u[lane] = (static_cast<float>(even) + 0.5f) * 0x1p-16f;
        u[LANES + lane] = (static_cast<float>(odd) + 0.5f) * 0x1p-16f;
    }
}

// Uniforms of elements [128 * chunk, 128 * chunk + 128) of the parameter.
TW_INLINE void uniform_chunk(const EncodeJob& job, std::uint64_t chunk, float* __restrict u) {
    const std::uint64_t first = LANES * chunk;  // the low word of first + lane never carries
    const auto low = static_cast<std::uint32_t>(first), high = static_cast<std::uint32_t>(first >> 32);
    const auto key0 = static_cast<std::uint32_t>(job.key), key1 = static_cast<std::uint32_t>(job.key >> 32);
    std::uint32_t words[4][LANES];
    for (std::uint32_t lane = 0; lane < LANES; lane++) {
        std::uint32_t c0 = low + lane, c1 = high, c2 = job.step, c3 = job.stream;
        philox_rounds(c0, c1, c2, c3, key0, key1);
        words[0][lane] = c0;
        words[1][lane] = c1;
        words[2][lane] = c2;
        words[3][lane] = c3;
    }
    for (std::size_t w = 0; w < 4; w++) to_uniforms(words[w], u + 2 * LANES * w);
}

// The same of chunks [first, end).
void uniform_chunks(const EncodeJob& job, std::uint64_t first, std::uint64_t end, float* u);

// How many floats `uniforms` needs for m elements.
inline std::size_t uniforms_size(std::size_t m) { return m + 2 * UNIFORM_CHUNK; }

// Uniforms of elements [begin, begin + m) of the job; they start at the returned place in `buffer`.
TW_INLINE const float* uniforms(const EncodeJob& job, std::size_t begin, std::size_t m, float* buffer) {
    const std::uint64_t first = job.offset + begin, first_chunk = first / UNIFORM_CHUNK;
    const std::uint64_t end_chunk = (first + m + UNIFORM_CHUNK - 1) / UNIFORM_CHUNK;
    uniform_chunks(job, first_chunk, end_chunk, buffer);
    return buffer + first % UNIFORM_CHUNK;
}

// Who draws, and from where on: struct format "<2Q2I" in packing.py.
struct Stream {
    std::uint64_t key;
    std::uint64_t offset;
    std::uint32_t step;
    std::uint32_t stream;
};
static_assert(sizeof(Stream) == 24);

inline constexpr std::size_t WORD_CHUNK = 4 * LANES;

// Words [64 * chunk, 64 * chunk + 64) of `words` in random.py.
TW_INLINE void word_chunk(const Stream& s, std::uint64_t chunk, std::uint32_t* __restrict words) {
    for (std::uint32_t lane = 0; lane < LANES; lane++) {
        const std::uint64_t counter = s.offset + LANES * chunk + lane;
        std::uint32_t c0 = static_cast<std::uint32_t>(counter), c1 = static_cast<std::uint32_t>(counter >> 32);
        std::uint32_t c2 = s.step, c3 = s.stream;
        philox_rounds(c0, c1, c2, c3, static_cast<std::uint32_t>(s.key), static_cast<std::uint32_t>(s.key >> 32));
        words[4 * lane] = c0;
        words[4 * lane + 1] = c1;
        words[4 * lane + 2] = c2;
        words[4 * lane + 3] = c3;
    }
}

}  // namespace thinwire
