// The checksum of frames.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thinwire {

// Whether this processor multiplies without carries; `crc32` must not be called on another.
bool has_fast_crc32();

// The CRC-32 of what came before, `start`, and of these bytes.
std::uint32_t crc32(const unsigned char* data, std::size_t size, std::uint32_t start);

}  // namespace thinwire
