// Values of sparse kinds on the wire: 32, 16 or 8 bits each.
#pragma once

#include "elements.h"
#include "half.h"
#include "kernels.h"

namespace thinwire {

inline std::size_t value_nbytes(Number number) {
    return number == Number::float32 ? 4 : number == Number::natural ? 1 : 2;
}

// A natural code c, below its sign, stands for 2**(c - 91), whose exponent field is c + 36; 0 stands for 0.
inline constexpr std::int32_t EXPONENT_OFFSET = 36;

TW_INLINE float natural_to_float(std::uint8_t code) {
    const std::uint32_t bits = (static_cast<std::uint32_t>(code & 127) + EXPONENT_OFFSET) << 23;
    return std::bit_cast<float>(code & 127 ? bits | static_cast<std::uint32_t>(code & 128) << 24 : 0u);
}

// Round `values` to what travels, write them, and take what was sent out of them; returns the largest magnitude sent.
TW_INLINE std::int32_t send_halves(f32* __restrict values, std::size_t k, u16* __restrict out) {
    std::int32_t peak = 0;
    for (std::size_t j = 0; j < k; j++) {
        const std::uint16_t half = float_to_half(values[j]);
        const float sent = half_to_float(half);
        out[j] = half;
        values[j] = values[j] - sent;
        peak = std::max(peak, magnitude(sent));
    }
    return peak;
}

TW_INLINE std::int32_t send_bfloats(f32* __restrict values, std::size_t k, u16* __restrict out) {
    std::int32_t peak = 0;
    for (std::size_t j = 0; j < k; j++) {
        const std::uint16_t bfloat = float_to_bfloat(values[j]);
        const float sent = bfloat_to_float(bfloat);
        out[j] = bfloat;
        values[j] = values[j] - sent;
        peak = std::max(peak, magnitude(sent));
    }
    return peak;
}

// To the nearest power of two, half-way up: half of the last step of the exponent field, then the field alone.
TW_INLINE std::int32_t send_naturals(f32* __restrict values, std::size_t k, std::uint8_t* __restrict out) {
    std::int32_t largest = 0;
    for (std::size_t j = 0; j < k; j++) {
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(static_cast<float>(values[j]));
        const auto code = static_cast<std::int32_t>(((bits & 0x7FFFFFFF) + 0x400000) >> 23) - EXPONENT_OFFSET;
        const auto byte = static_cast<std::uint8_t>(code > 0 ? std::min(code, 127) | (bits >> 31 << 7) : 0);
        out[j] = byte;
        values[j] = values[j] - natural_to_float(byte);
        largest = std::max(largest, code);
    }
    return largest > 127 ? INF_BITS : 0;
}

TW_INLINE std::int32_t send_values(f32* values, std::size_t k, std::uint8_t* out, Number number) {
    switch (number) {
        case Number::float16: return send_halves(values, k, reinterpret_cast<u16*>(out));
        case Number::bfloat16: return send_bfloats(values, k, reinterpret_cast<u16*>(out));
        case Number::natural: return send_naturals(values, k, out);
        default:
            std::memcpy(out, values, 4 * k);
            std::memset(values, 0, 4 * k);
            return 0;  // they were looked at when q was formed
    }
}

// Value number j.
template <Number number> TW_INLINE float value_at(const std::uint8_t* values, std::size_t j) {
    if constexpr (number == Number::float32) return reinterpret_cast<const f32*>(values)[j];
    if constexpr (number == Number::float16) return half_to_float(reinterpret_cast<const u16*>(values)[j]);
    if constexpr (number == Number::bfloat16) return bfloat_to_float(reinterpret_cast<const u16*>(values)[j]);
    if constexpr (number == Number::natural) return natural_to_float(values[j]);
}

// Call run<number>() with the number as a constant.
#define TW_FOR_NUMBER(number, run)                                            \
    switch (number) {                                                         \
        case Number::float32: run.template operator()<Number::float32>(); break;   \
        case Number::float16: run.template operator()<Number::float16>(); break;   \
        case Number::bfloat16: run.template operator()<Number::bfloat16>(); break; \
        case Number::natural: run.template operator()<Number::natural>(); break;   \
    }

}  // namespace thinwire
