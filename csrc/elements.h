// Steps that several encoders and decoders share: forming q, telling finite from not, delivering a value.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "jobs.h"

namespace thinwire {

inline constexpr std::int32_t INF_BITS = 0x7F800000;

// Bits of |value|. They order as |value| does, with infinities and then NaNs on top.
TW_INLINE std::int32_t magnitude(float value) { return std::bit_cast<std::int32_t>(value) & 0x7FFFFFFF; }

// The largest magnitude in q: below INF_BITS exactly where all are finite.
TW_INLINE std::int32_t peak_magnitude(const f32* q, std::size_t m) {
    std::int32_t peak = 0;
    for (std::size_t i = 0; i < m; i++) peak = std::max(peak, magnitude(q[i]));
    return peak;
}

// q = x + residual_scale * residual for elements [begin, begin + m), left where the residual was; returns where q lies.
// Two roundings, as everywhere. `peak` gains the largest magnitude.
TW_INLINE const f32* form_q(const EncodeJob& job, std::size_t begin, std::size_t m, std::int32_t& peak) {
    const f32* __restrict x = job.x + begin;
    if (job.residual == nullptr) {
        peak = std::max(peak, peak_magnitude(x, m));
        return x;
    }
    f32* __restrict residual = job.residual + begin;
    const float scale = job.residual_scale;
    std::int32_t largest = 0;
    for (std::size_t i = 0; i < m; i++) {
        const float q = x[i] + residual[i] * scale;
        residual[i] = q;
        largest = std::max(largest, magnitude(q));
    }
    peak = std::max(peak, largest);
    return residual;
}

// Ask for m elements that lie behind those of a block or a job: most often they are the next one's. Where a block is
// read twice, the second time from a cache, memory would be idle meanwhile.
TW_INLINE void fetch_ahead(const f32* x, std::size_t m) {
    for (std::size_t i = 0; i < m; i += 16) __builtin_prefetch(x + i, 0, 2);
}

// Elements [begin, begin + m) of what is encoded.
TW_INLINE void fetch_ahead(const EncodeJob& job, std::size_t begin, std::size_t m) {
    fetch_ahead(job.x + begin, m);
    if (job.residual) fetch_ahead(job.residual + begin, m);
}

// Zero the bytes of `out` from `used` on.
TW_INLINE void zero_padding(const EncodeJob& job, std::size_t used) {
    if (job.out_nbytes > used) std::memset(job.out + used, 0, job.out_nbytes - used);
}

// out = value, or out += alpha * value.
template <bool accumulate> TW_INLINE void deliver(f32& out, float value, float alpha) {
    if constexpr (accumulate)
        out = out + value * alpha;
    else
        out = value;
}

}  // namespace thinwire
