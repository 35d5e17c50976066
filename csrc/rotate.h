// Rotations of groups of 2^k values: `rotate` and `unrotate` of reference_rotate.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "portable.h"

namespace thinwire {

// One stage takes neighbours 1 apart and leaves sums in the first half, differences in the second: that rotates the
// bits of the places by one, so that all stages are the same and the order is back after k of them.
template <std::size_t n> TW_INLINE void butterfly(const float* __restrict in, float* __restrict out) {
    for (std::size_t i = 0; i < n / 2; i++) {
        const float a = in[2 * i], b = in[2 * i + 1];
        out[i] = a + b;
        out[i + n / 2] = a - b;
    }
}

// out = H (in / n); inverse: n times that, kept finite.
template <std::size_t n, bool inverse> TW_INLINE void rotate_group(const f32* in, f32* out) {
    alignas(64) float a[n], b[n];
    for (std::size_t i = 0; i < n; i++) a[i] = in[i] * (1.0f / n);
    for (std::size_t left = n; left > 2; left /= 4) {
        butterfly<n>(a, b);
        butterfly<n>(b, a);
    }
    butterfly<n>(a, b);  // k is odd
    constexpr float top = std::numeric_limits<float>::max();
    for (std::size_t i = 0; i < n; i++) out[i] = inverse ? std::min(std::max(b[i] * n, -top), top) : b[i];
}

template <std::size_t n, bool inverse> TW_INLINE void rotate_groups(const f32* in, f32* out, std::size_t m) {
    constexpr float top = std::numeric_limits<float>::max();
    const float root = static_cast<float>(std::sqrt(inverse ? static_cast<double>(n) : 1.0 / n));
    std::size_t begin = 0;
    for (; begin + n <= m; begin += n) rotate_group<n, inverse>(in + begin, out + begin);
    for (std::size_t i = begin; i < m; i++) {
        const float value = in[i] * root;
        out[i] = inverse ? std::min(std::max(value, -top), top) : value;
    }
}

// Rotate m values in groups of 32 or 128; `in` may be `out`.
template <bool inverse> TW_INLINE void rotate(const f32* in, f32* out, std::size_t m, std::size_t rotation) {
    if (rotation == 32)
        rotate_groups<32, inverse>(in, out, m);
    else
        rotate_groups<128, inverse>(in, out, m);
}

}  // namespace thinwire
