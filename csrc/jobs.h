// What one call is asked to do: arrays of these structs, packed by kernels/packing.py and read here as they lie.
#pragma once

#include <cstdint>

#include "portable.h"

namespace thinwire {

// struct format "<7Q2IfI" in packing.py.
struct EncodeJob {
    const f32* x;
    f32* residual;  // null: none
    std::uint8_t* out;
    std::uint64_t n;
    std::uint64_t out_nbytes;  // payload and padding; packing.py made sure that the payload fits
    std::uint64_t key;
    std::uint64_t offset;  // of x[0] in its parameter
    std::uint32_t step;
    std::uint32_t stream;
    float residual_scale;
    std::uint32_t num_kept;  // top-k only
};
static_assert(sizeof(EncodeJob) == 72);

// struct format "<3Qf3I" in packing.py.
struct DecodeJob {
    const std::uint8_t* data;
    f32* out;
    std::uint64_t n;
    float alpha;
    std::uint32_t accumulate;  // 0: out = value; 1: out += alpha * value
    std::uint32_t num_kept;    // top-k only
    std::uint32_t unused;
};
static_assert(sizeof(DecodeJob) == 40);

// struct format "<5Q4I" in native_sign.py.
struct VoteJob {
    std::uint8_t* out;
    std::uint64_t n;
    std::uint64_t out_nbytes;
    std::uint64_t key;
    std::uint64_t offset;
    std::uint32_t step;
    std::uint32_t stream;
    std::uint32_t random;  // 0: ties are positive; 1: they are drawn
    std::uint32_t unused;
};
static_assert(sizeof(VoteJob) == 56);

}  // namespace thinwire
