// Codes of 1 to 8 bits in bytes: limbs of 8, 4, 2 and 1 bits, each planar. kernels/codes.py says which bit lies where.
#pragma once

#include <cstdint>
#include <cstring>

#include "portable.h"

namespace thinwire {

// Codes lie one a byte in buffers that are this much longer: the last plane of a limb may be filled up.
inline constexpr std::size_t CODES_SLACK = 8;

inline std::size_t packed_nbytes(int bits, std::size_t m) {
    std::size_t total = 0;
    for (std::size_t width = 8; width > 0; width /= 2)
        if (bits & width) total += (m * width + 7) / 8;
    return total;
}

// Pack one limb of m codes; returns what follows.
template <int width, int low>
TW_INLINE std::uint8_t* pack_limb(const std::uint8_t* codes, std::size_t m, std::uint8_t* __restrict out) {
    constexpr std::size_t planes = 8 / width;
    constexpr unsigned mask = (1u << width) - 1;
    const std::size_t h = (m + planes - 1) / planes;
    for (std::size_t j = 0; j < h; j++) {
        std::uint8_t byte = 0;
#pragma GCC unroll 8
        for (std::size_t k = 0; k < planes; k++)
            byte = static_cast<std::uint8_t>(byte | (((codes[j + k * h] >> low) & mask) << (k * width)));
        out[j] = byte;
    }
    return out + h;
}

// Take one limb of m codes out; the first one taken sets the codes, the others add their bits.
template <int width, int low>
TW_INLINE const std::uint8_t* unpack_limb(const std::uint8_t* __restrict packed, std::size_t m, std::uint8_t* codes) {
    constexpr std::size_t planes = 8 / width;
    constexpr unsigned mask = (1u << width) - 1;
    const std::size_t h = (m + planes - 1) / planes;
#pragma GCC unroll 8
    for (std::size_t k = 0; k < planes; k++) {
        std::uint8_t* __restrict plane = codes + k * h;
        for (std::size_t j = 0; j < h; j++) {
            const auto limb = static_cast<std::uint8_t>(((packed[j] >> (k * width)) & mask) << low);
            plane[j] = low == 0 ? limb : static_cast<std::uint8_t>(plane[j] | limb);
        }
    }
    return packed + h;
}

template <int bits> TW_INLINE void pack_bits(std::uint8_t* codes, std::size_t m, std::uint8_t* out) {
    std::memset(codes + m, 0, CODES_SLACK);
    if constexpr (bits & 4) out = pack_limb<4, 0>(codes, m, out);
    if constexpr (bits & 2) out = pack_limb<2, bits & 4>(codes, m, out);
    if constexpr (bits & 1) pack_limb<1, bits & 6>(codes, m, out);
}

template <int bits> TW_INLINE void unpack_bits(const std::uint8_t* packed, std::size_t m, std::uint8_t* codes) {
    if constexpr (bits & 4) packed = unpack_limb<4, 0>(packed, m, codes);
    if constexpr (bits & 2) packed = unpack_limb<2, bits & 4>(packed, m, codes);
    if constexpr (bits & 1) unpack_limb<1, bits & 6>(packed, m, codes);
}

// Pack m codes of fewer than 8 bits. `codes` has room for CODES_SLACK more, which are overwritten.
TW_INLINE void pack_codes(int bits, std::uint8_t* codes, std::size_t m, std::uint8_t* out) {
    switch (bits) {
        case 1: return pack_bits<1>(codes, m, out);
        case 2: return pack_bits<2>(codes, m, out);
        case 3: return pack_bits<3>(codes, m, out);
        case 4: return pack_bits<4>(codes, m, out);
        case 5: return pack_bits<5>(codes, m, out);
        case 6: return pack_bits<6>(codes, m, out);
        default: return pack_bits<7>(codes, m, out);
    }
}

TW_INLINE void unpack_codes(int bits, const std::uint8_t* packed, std::size_t m, std::uint8_t* codes) {
    switch (bits) {
        case 1: return unpack_bits<1>(packed, m, codes);
        case 2: return unpack_bits<2>(packed, m, codes);
        case 3: return unpack_bits<3>(packed, m, codes);
        case 4: return unpack_bits<4>(packed, m, codes);
        case 5: return unpack_bits<5>(packed, m, codes);
        case 6: return unpack_bits<6>(packed, m, codes);
        default: return unpack_bits<7>(packed, m, codes);
    }
}

}  // namespace thinwire
