// Uniform quantisation: codes that are multiples of one scale, rounded to nearest or by chance.
#pragma once

#include <limits>

#include "elements.h"

namespace thinwire {

// 1.5 * 2**23: adding it rounds to an integer, ties to even, and leaves that integer in the low bits.
inline constexpr float SHIFT = 12582912.0f;

inline constexpr float levels_of(int bits) { return static_cast<float>((1 << (bits - 1)) - 1); }

// The largest scale with levels * scale still finite: `max_scale` of reference.py.
TW_INLINE float max_scale(float levels) {
    float scale = std::numeric_limits<float>::max() / levels;
    while (magnitude(scale * levels) >= INF_BITS) scale = std::bit_cast<float>(std::bit_cast<std::int32_t>(scale) - 1);
    return scale;
}

// The scale with which `levels` reach `largest`: up one ulp where levels * scale falls short, then clamped.
TW_INLINE float scale_of(float largest, float levels) {
    if (magnitude(largest) >= INF_BITS) return 0.0f;  // flagged: its bytes are unspecified
    float scale = largest / levels;
    if (scale * levels < largest) scale = std::bit_cast<float>(std::bit_cast<std::int32_t>(scale) + 1);
    return std::min(scale, max_scale(levels));
}

// SHIFT + code of q. |q / scale| is at most levels and a few ulps, so that SHIFT rounds it rightly.
template <bool stochastic> TW_INLINE float shifted_code(float q, float scale, float levels, float u) {
    float y = q / scale;
    if constexpr (stochastic) {
        // In integers, since compilers make conditions slow; bits of floats above 0 order as they do.
        y = y + u;
        const float nearest = y + SHIFT;
        std::int32_t code = std::bit_cast<std::int32_t>(nearest);
        code += std::bit_cast<std::int32_t>(y - (nearest - SHIFT)) >> 31;  // down
        code = std::min(code, std::bit_cast<std::int32_t>(SHIFT + levels));
        return std::bit_cast<float>(std::max(code, std::bit_cast<std::int32_t>(SHIFT - levels)));
    }
    y = y > levels ? levels : y;
    y = y < -levels ? -levels : y;
    return y + SHIFT;
}

// Codes of m elements, one a byte; `residual` holds q and is left as q - code * scale. The code is taken back from its
// integer, so a code of 0 is +0 and leaves q as it is.
template <bool stochastic, bool has_residual>
TW_INLINE void uniform_codes(const f32* __restrict x, f32* __restrict residual, std::size_t m, float scale,
                             float levels, const float* __restrict u, std::uint8_t* __restrict out) {
    for (std::size_t i = 0; i < m; i++) {
        const float q = has_residual ? residual[i] : x[i];
        const float code = shifted_code<stochastic>(q, scale, levels, stochastic ? u[i] : 0.0f);
        out[i] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(code));
        if constexpr (has_residual) residual[i] = q - (code - SHIFT) * scale;
    }
}

// Values of m codes, two's complement of `bits` bits, one a byte.
template <bool accumulate>
TW_INLINE void uniform_values(const std::uint8_t* __restrict codes, f32* __restrict out, std::size_t m, int bits,
                              float scale, float alpha) {
    const auto sign = static_cast<std::uint8_t>(1 << (bits - 1)), mask = static_cast<std::uint8_t>(2 * sign - 1);
    for (std::size_t i = 0; i < m; i++) {
        const auto code = static_cast<std::int8_t>(static_cast<std::uint8_t>(((codes[i] & mask) ^ sign) - sign));
        deliver<accumulate>(out[i], static_cast<float>(code) * scale, alpha);
    }
}

}  // namespace thinwire
