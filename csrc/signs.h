// Signs as bits: bit i % 8, from the least, of byte i // 8 is 1 iff element i is below 0, which -0 is not.
#pragma once

#include <cstdint>

#include "portable.h"
#include "tree_sum.h"

namespace thinwire {

// Write the sign bits of m elements, 1 <= m <= CHUNK; returns their largest magnitude.
std::int32_t pack_signs(const f32* q, std::size_t m, std::uint8_t* out);

// One byte an element, not 0 where its bit is 1, for m <= CHUNK elements: eight copies of a byte, each with another bit
// kept.
TW_INLINE void unpack_signs(const std::uint8_t* __restrict packed, std::size_t m, std::uint64_t* __restrict words) {
    for (std::size_t j = 0; j < (m + 7) / 8; j++) words[j] = (packed[j] * 0x0101010101010101u) & 0x8040201008040201u;
}

}  // namespace thinwire
