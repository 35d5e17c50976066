// Signs as bits: bit i % 8, from the least, of byte i // 8 is 1 iff element i is below 0, which -0 is not.
#pragma once

#include <cstdint>

#include "portable.h"
#include "tree_sum.h"

namespace thinwire {

// Sign bits of m <= CHUNK elements. The product moves the flag of element 8 * j + i, byte i of a word, to bit 56 + i.
TW_INLINE void pack_signs(const f32* __restrict q, std::size_t m, std::uint8_t* __restrict out) {
    alignas(64) std::uint64_t words[CHUNK / 8];
    const std::size_t num_words = (m + 7) / 8;
    words[num_words - 1] = 0;
    auto* flags = reinterpret_cast<std::uint8_t*>(words);
    for (std::size_t i = 0; i < m; i++) flags[i] = q[i] < 0.0f;
    for (std::size_t j = 0; j < num_words; j++)
        out[j] = static_cast<std::uint8_t>((words[j] * 0x0102040810204080u) >> 56);
}

// One byte an element, not 0 where its bit is 1, for m <= CHUNK elements: eight copies of a byte, each with another bit
// kept.
TW_INLINE void unpack_signs(const std::uint8_t* __restrict packed, std::size_t m, std::uint64_t* __restrict words) {
    for (std::size_t j = 0; j < (m + 7) / 8; j++) words[j] = (packed[j] * 0x0101010101010101u) & 0x8040201008040201u;
}

}  // namespace thinwire
