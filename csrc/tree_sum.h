// Sums for scales, in the tree that every backend shares: `tree_sum` of reference.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "portable.h"

namespace thinwire {

inline constexpr std::size_t CHUNK = 1024;

// Sum 1024 terms by halving, as `tree_sum` does: term i gains term i + 512, then i + 256, ... term(i) is a double.
template <typename Term> TW_INLINE double sum_chunk(Term term) {
    double sums[CHUNK / 2];
    for (std::size_t i = 0; i < CHUNK / 2; i++) sums[i] = term(i) + term(i + CHUNK / 2);
    for (std::size_t half = CHUNK / 4; half > 0; half /= 2)
        for (std::size_t i = 0; i < half; i++) sums[i] = sums[i] + sums[i + half];
    return sums[0];
}

template <bool rms> TW_INLINE double sum_floats(const f32* q) {
    return sum_chunk([q](std::size_t i) __attribute__((always_inline)) {
        const double wide = q[i];
        return rms ? wide * wide : std::fabs(wide);
    });
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
    for (std::size_t c = 0; c < num_chunks; c++) {
        const std::size_t left = std::min<std::size_t>(CHUNK, m - c * CHUNK);
        if (left == CHUNK) {
            sums[c] = sum_floats<squares>(q + c * CHUNK);
        } else {
            f32 padded[CHUNK] = {};
            std::memcpy(padded, q + c * CHUNK, sizeof(float) * left);
            sums[c] = sum_floats<squares>(padded);
        }
    }
    return num_chunks ? sum_of_sums(sums, num_chunks) : 0.0;
}

}  // namespace thinwire
