// One bit an element: one float32 scale, the mean of |q| or the root of the mean of q^2, then sign bits.
#include "elements.h"
#include "kernels.h"
#include "tree_sum.h"

namespace thinwire {
namespace {

// Sign bits of m <= CHUNK elements; -0 is not below 0. Bit i of byte j comes from element 8 * j + i: the product moves
// its flag, byte i of a word, to bit 56 + i.
TW_INLINE void pack_signs(const f32* __restrict q, std::size_t m, std::uint8_t* __restrict out) {
    alignas(64) std::uint64_t words[CHUNK / 8];
    const std::size_t num_words = (m + 7) / 8;
    words[num_words - 1] = 0;
    auto* flags = reinterpret_cast<std::uint8_t*>(words);
    for (std::size_t i = 0; i < m; i++) flags[i] = q[i] < 0.0f;
    for (std::size_t j = 0; j < num_words; j++)
        out[j] = static_cast<std::uint8_t>((words[j] * 0x0102040810204080u) >> 56);
}

// First pass: q, its sign bits and its scale.
template <bool rms> TW_INLINE float signs_and_scale(const EncodeJob& job, std::int32_t& peak, Scratch& scratch) {
    const std::size_t n = job.n, num_chunks = (n + CHUNK - 1) / CHUNK;
    if (n == 0) return 0.0f;
    double* sums = scratch.get<double>(num_chunks);
    for (std::size_t c = 0; c < num_chunks; c++) {
        const std::size_t m = std::min<std::size_t>(CHUNK, n - c * CHUNK);
        const f32* q = form_q(job, c * CHUNK, m, peak);
        pack_signs(q, m, job.out + 4 + c * (CHUNK / 8));
        sums[c] = sum_padded<rms>(q, m);
    }
    const double mean = sum_of_sums(sums, num_chunks) / static_cast<double>(n);
    return static_cast<float>(rms ? std::sqrt(mean) : mean);
}

template <bool accumulate> TW_INLINE void decode(const DecodeJob& job) {
    float scale;
    std::memcpy(&scale, job.data, 4);
    for (std::size_t begin = 0; begin < job.n; begin += CHUNK) {
        const std::size_t m = std::min<std::size_t>(CHUNK, job.n - begin), num_bytes = (m + 7) / 8;
        const std::uint8_t* packed = job.data + 4 + begin / 8;
        fetch_ahead(job.out + begin + 2 * CHUNK, m);  // pages and lines that stores would wait for
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
    const float scale = rms ? signs_and_scale<true>(job, peak, scratch) : signs_and_scale<false>(job, peak, scratch);
    std::memcpy(job.out, &scale, 4);
    zero_padding(job, 4 + (job.n + 7) / 8);
    if (job.residual) {
        f32* __restrict residual = job.residual;
        for (std::size_t i = 0, n = job.n; i < n; i++)
            residual[i] = residual[i] - (residual[i] < 0.0f ? -scale : scale);
    }
    return peak < INF_BITS && magnitude(scale) < INF_BITS;
}

TW_CLONES void decode_one_bit(const DecodeJob& job) { job.accumulate ? decode<true>(job) : decode<false>(job); }

}  // namespace thinwire
