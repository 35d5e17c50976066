// Natural dithering: values rounded by chance to powers of two, relative to a scale.
#pragma once

#include <algorithm>

#include "elements.h"

namespace thinwire {

// 2^(code - levels), or 0.
TW_INLINE float natural_level(std::uint32_t code, std::uint32_t levels) {
    return std::bit_cast<float>(code ? (code + 127 - levels) << 23 : 0);
}

// Codes of m elements, one a byte, plus `sign` where negative; `residual` holds q and is left as q - level * scale.
template <bool has_residual>
TW_INLINE void natural_codes(const f32* __restrict x, f32* __restrict residual, std::size_t m, float scale,
                             std::uint32_t levels, std::uint32_t sign, const float* __restrict u,
                             std::uint8_t* __restrict out) {
    const auto lowest = static_cast<std::int32_t>((128 - levels) << 23);      // bits of 2^(1 - levels)
    const float lowest_inverse = std::bit_cast<float>((126 + levels) << 23);  // levels <= 127: at most 2^126
    for (std::size_t i = 0; i < m; i++) {
        const float q = has_residual ? residual[i] : x[i];
        const float y = std::bit_cast<float>(magnitude(q)) / scale;
        // A random fraction added to the bits of a float carries into its exponent with the probability of its mantissa.
        const std::uint32_t fraction = std::bit_cast<std::uint32_t>(u[i] + 1.0f);  // and 127 in the exponent
        const auto carried =
            static_cast<std::int32_t>(((std::bit_cast<std::uint32_t>(y) + fraction) >> 23) - 254 + levels);
        // Integers instead of conditions, which compilers make slow: 1 where y * lowest_inverse + u >= 1.
        const auto low = static_cast<std::int32_t>(
            (0x3F7FFFFF - std::bit_cast<std::uint32_t>(y * lowest_inverse + u[i])) >> 31);
        const std::int32_t level = magnitude(y) < lowest ? low : carried;
        const auto code = static_cast<std::uint32_t>(std::min(level, static_cast<std::int32_t>(levels)));
        const std::uint32_t negative = std::bit_cast<std::uint32_t>(q) & (0 - code) & 0x80000000;  // 0 where code is
        out[i] = static_cast<std::uint8_t>(code + ((0 - (negative >> 31)) & sign));
        if constexpr (has_residual) {
            const float value = natural_level(code, levels) * scale;
            residual[i] = q - std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) ^ negative);
        }
    }
}

template <bool accumulate>
TW_INLINE void natural_values(const std::uint8_t* __restrict codes, f32* __restrict out, std::size_t m,
                              std::uint32_t levels, std::uint32_t sign, float scale, float alpha) {
    for (std::size_t i = 0; i < m; i++) {
        const std::uint32_t code = codes[i];
        const float value = natural_level(code & (sign - 1), levels) * scale;
        deliver<accumulate>(out[i], code & sign ? -value : value, alpha);
    }
}

}  // namespace thinwire
