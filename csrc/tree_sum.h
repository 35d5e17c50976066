// Sums for scales, in the tree that every backend shares: `tree_sum` of reference.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "portable.h"

namespace thinwire {

inline constexpr std::size_t CHUNK = 1024;

// Term i of `width` after halving down to `half` terms.
template <std::size_t half, std::size_t width, typename Term> TW_INLINE double halved(Term term, std::size_t i) {
    if constexpr (half == width)
        return term(i);
    else
        return halved<2 * half, width>(term, i) + halved<2 * half, width>(term, i + half);
}

// Sum `width` terms, 64 or more, by halving, as `tree_sum` does: of 1024, term i gains term i + 512, then i + 256, ...
// term(i) is a double. The first stages stay in registers.
template <std::size_t width = CHUNK, typename Term> TW_INLINE double sum_chunk(Term term) {
    double sums[64];
    for (std::size_t i = 0; i < 64; i++) sums[i] = halved<64, width>(term, i);
    for (std::size_t half = 32; half > 0; half /= 2)
        for (std::size_t i = 0; i < half; i++) sums[i] = sums[i] + sums[i + half];
    return sums[0];
}

template <bool rms, std::size_t width = CHUNK> TW_INLINE double sum_floats(const f32* q) {
    return sum_chunk<width>([q](std::size_t i) __attribute__((always_inline)) {
        const double wide = q[i];
        return rms ? wide * wide : std::fabs(wide);
    });
}

// The same of m <= width elements and zeros. No term is below 0, so that zeros change nothing, however many they are.
template <bool rms, std::size_t width = CHUNK> TW_INLINE double sum_padded(const f32* q, std::size_t m) {
    if constexpr (width > 128)
        if (m <= width / 2) return sum_padded<rms, width / 2>(q, m);
    if (m == width) return sum_floats<rms, width>(q);
    f32 padded[width] = {};
    std::memcpy(padded, q, sizeof(float) * m);
    return sum_floats<rms, width>(padded);
}

// The levels of `tree_sum` above the first, in place.
TW_INLINE double sum_of_sums(double* sums, std::size_t count) {
    while (count > 1) {
        const std::size_t num_chunks = (count + CHUNK - 1) / CHUNK;
        for (std::size_t c = 0; c < num_chunks; c++) {
            double chunk[CHUNK] = {};
            std::memcpy(chunk, sums + c * CHUNK, sizeof(double) * std::min(CHUNK, count - c * CHUNK));
            sums[c] = sum_chunk([&chunk](std::size_t i) __attribute__((always_inline)) { return chunk[i]; });
        }
        count = num_chunks;
    }
    return sums[0];
}

// Sum q^2, or |q|, of m elements; `sums` has room for one number per chunk.
template <bool squares> TW_INLINE double sum_tree(const f32* q, std::size_t m, double* sums) {
    const std::size_t num_chunks = (m + CHUNK - 1) / CHUNK;
    for (std::size_t c = 0; c < num_chunks; c++)
        sums[c] = sum_padded<squares>(q + c * CHUNK, std::min<std::size_t>(CHUNK, m - c * CHUNK));
    return num_chunks ? sum_of_sums(sums, num_chunks) : 0.0;
}

}  // namespace thinwire
