// One bit an element: one float32 scale, the mean of |q| or the root of the mean of q^2, then sign bits.
#include <cmath>

#include "elements.h"
#include "kernels.h"

namespace thinwire {
namespace {

constexpr std::size_t ROWS = 16, TREE_LANES = 64, CHUNK = ROWS * TREE_LANES;

// Sum 1024 terms in the tree of `tree_sum`: rows by halving, then lanes by halving. term(i) is term i as a double.
template <typename Term> TW_INLINE double sum_chunk(Term term) {
    double lanes[TREE_LANES];
    for (std::size_t l = 0; l < TREE_LANES; l++) {
        double rows[ROWS];
#pragma GCC unroll 16
        for (std::size_t r = 0; r < ROWS; r++) rows[r] = term(r * TREE_LANES + l);
#pragma GCC unroll 4
        for (std::size_t half = ROWS / 2; half > 0; half /= 2)
#pragma GCC unroll 8
            for (std::size_t r = 0; r < half; r++) rows[r] = rows[r] + rows[r + half];
        lanes[l] = rows[0];
    }
#pragma GCC unroll 6
    for (std::size_t half = TREE_LANES / 2; half > 0; half /= 2)
        for (std::size_t l = 0; l < half; l++) lanes[l] = lanes[l] + lanes[l + half];
    return lanes[0];
}

template <bool rms> TW_INLINE double sum_floats(const f32* q) {
    return sum_chunk([q](std::size_t i) __attribute__((always_inline)) {
        const double wide = q[i];
        return rms ? wide * wide : std::fabs(wide);
    });
}

// The levels of `tree_sum` above the first, in place.
TW_INLINE double sum_of_sums(double* sums, std::size_t count) {
    while (count > 1) {
        const std::size_t num_chunks = (count + CHUNK - 1) / CHUNK;
        for (std::size_t c = 0; c < num_chunks; c++) {
            double chunk[CHUNK] = {};
            std::memcpy(chunk, sums + c * CHUNK, sizeof(double) * std::min(CHUNK, count - c * CHUNK));
            sums[c] = sum_chunk([&chunk](std::size_t i) __attribute__((always_inline)) { return chunk[i]; });
        }
        count = num_chunks;
    }
    return sums[0];
}

// First pass: q and its scale.
template <bool rms> TW_INLINE float scale_of(const EncodeJob& job, std::int32_t& peak, Scratch& scratch) {
    if (job.n == 0) return 0.0f;
    const std::size_t num_chunks = (job.n + CHUNK - 1) / CHUNK;
    double* sums = scratch.get<double>(num_chunks);
    for (std::size_t c = 0; c < num_chunks; c++) {
        const std::size_t m = std::min<std::size_t>(CHUNK, job.n - c * CHUNK);
        const f32* q = form_q(job, c * CHUNK, m, peak);
        if (m == CHUNK) {
            sums[c] = sum_floats<rms>(q);
        } else {
            f32 padded[CHUNK] = {};
            std::memcpy(padded, q, sizeof(float) * m);
            sums[c] = sum_floats<rms>(padded);
        }
    }
    const double mean = sum_of_sums(sums, num_chunks) / static_cast<double>(job.n);
    return static_cast<float>(rms ? std::sqrt(mean) : mean);
}

// Bit i of byte j from byte 8 * j + i of `flags`, each 0 or 1. The product moves flag i to bit 56 + i.
TW_INLINE void pack_flags(const std::uint8_t* flags, std::size_t num_bytes, std::uint8_t* __restrict out) {
    const u64* words = reinterpret_cast<const u64*>(flags);
    for (std::size_t j = 0; j < num_bytes; j++)
        out[j] = static_cast<std::uint8_t>((words[j] * 0x0102040810204080u) >> 56);
}

template <bool accumulate> TW_INLINE void decode(const DecodeJob& job) {
    float scale;
    std::memcpy(&scale, job.data, 4);
    for (std::size_t begin = 0; begin < job.n; begin += CHUNK) {
        const std::size_t m = std::min<std::size_t>(CHUNK, job.n - begin), num_bytes = (m + 7) / 8;
        const std::uint8_t* packed = job.data + 4 + begin / 8;
        // Eight copies of a byte, each with another bit kept.
        alignas(64) std::uint64_t words[CHUNK / 8];
        for (std::size_t j = 0; j < num_bytes; j++)
            words[j] = (packed[j] * 0x0101010101010101u) & 0x8040201008040201u;
        const std::uint8_t* flags = reinterpret_cast<const std::uint8_t*>(words);
        f32* __restrict out = job.out + begin;
        for (std::size_t i = 0; i < m; i++) deliver<accumulate>(out[i], flags[i] ? -scale : scale, job.alpha);
    }
}

}  // namespace

TW_CLONES bool encode_one_bit(const EncodeJob& job, bool rms, Scratch& scratch) {
    std::int32_t peak = 0;
    const float scale = rms ? scale_of<true>(job, peak, scratch) : scale_of<false>(job, peak, scratch);
    std::memcpy(job.out, &scale, 4);
    std::uint8_t* out = job.out + 4;
    // Second pass: sign bits (-0 is not below 0) and residual.
    for (std::size_t begin = 0; begin < job.n; begin += CHUNK) {
        const std::size_t m = std::min<std::size_t>(CHUNK, job.n - begin), num_bytes = (m + 7) / 8;
        alignas(64) std::uint8_t flags[CHUNK];
        if (m < CHUNK) std::memset(flags, 0, sizeof flags);
        if (job.residual) {
            f32* __restrict residual = job.residual + begin;
            for (std::size_t i = 0; i < m; i++) flags[i] = residual[i] < 0.0f;
            for (std::size_t i = 0; i < m; i++) residual[i] = residual[i] - (residual[i] < 0.0f ? -scale : scale);
        } else {
            const f32* __restrict x = job.x + begin;
            for (std::size_t i = 0; i < m; i++) flags[i] = x[i] < 0.0f;
        }
        pack_flags(flags, num_bytes, out);
        out += num_bytes;
    }
    zero_padding(job, out - job.out);
    return peak < INF_BITS && magnitude(scale) < INF_BITS;
}

TW_CLONES void decode_one_bit(const DecodeJob& job) { job.accumulate ? decode<true>(job) : decode<false>(job); }

}  // namespace thinwire
