// float16 and bfloat16 in integer arithmetic without branches, so that it vectorises on any machine.
#pragma once

#include <bit>
#include <cstdint>

#include "portable.h"

namespace thinwire {

// Round to nearest even. NaN becomes infinity: the message is flagged in either case.
TW_INLINE std::uint16_t float_to_half(float value) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7FFFFFFF;
    // Below 2**-14 a half counts units of 2**-24: the last place of a float32 near 1/2. Adding 1/2 rounds there.
    const std::uint32_t small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000;
    const std::uint32_t normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    std::uint32_t half = magnitude < 0x38800000 ? small : normal;
    half = magnitude >= 0x47800000 ? 0x7C00 : half;
    return static_cast<std::uint16_t>(half | sign);
}

TW_INLINE float half_to_float(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000) << 16;
    const std::uint32_t shifted = static_cast<std::uint32_t>(half & 0x7FFF) << 13;
    const float small = std::bit_cast<float>(shifted + 0x38800000) - 0x1p-14f;  // m * 2**-24
    std::uint32_t bits = shifted < 0x00800000 ? std::bit_cast<std::uint32_t>(small) : shifted + 0x38000000;
    bits = shifted >= 0x0F800000 ? shifted | 0x7F800000 : bits;  // infinity and NaN
    return std::bit_cast<float>(bits | sign);
}

// Round to nearest even. NaN may become anything: the message is flagged in either case.
TW_INLINE std::uint16_t float_to_bfloat(float value) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

TW_INLINE float bfloat_to_float(std::uint16_t bfloat) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bfloat) << 16);
}

}  // namespace thinwire
