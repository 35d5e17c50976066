// One bit an element: one float32 scale, the mean of |q| or the root of the mean of q^2, then sign bits.
#include "elements.h"
#include "kernels.h"
#include "signs.h"
#include "tree_sum.h"

namespace thinwire {
namespace {

// First pass: q, its sign bits and its scale.
template <bool rms> TW_INLINE float signs_and_scale(const EncodeJob& job, std::int32_t& peak, Scratch& scratch) {
    const std::size_t n = job.n, num_chunks = (n + CHUNK - 1) / CHUNK;
    if (n == 0) return 0.0f;
    double* sums = scratch.get<double>(num_chunks);
    for (std::size_t c = 0; c < num_chunks; c++) {
        const std::size_t m = std::min<std::size_t>(CHUNK, n - c * CHUNK);
        std::int32_t unused = 0;
        const f32* q = form_q(job, c * CHUNK, m, unused);
        peak = std::max(peak, pack_signs(q, m, job.out + 4 + c * (CHUNK / 8)));
        sums[c] = sum_padded<rms>(q, m);
    }
    const double mean = sum_of_sums(sums, num_chunks) / static_cast<double>(n);
    return static_cast<float>(rms ? std::sqrt(mean) : mean);
}

template <bool accumulate> TW_INLINE void decode(const DecodeJob& job) {
    float scale;
    std::memcpy(&scale, job.data, 4);
    for (std::size_t begin = 0; begin < job.n; begin += CHUNK) {
        const std::size_t m = std::min<std::size_t>(CHUNK, job.n - begin);
        fetch_ahead(job.out + begin + 2 * CHUNK, m);  // pages and lines that stores would wait for
        alignas(64) std::uint64_t words[CHUNK / 8];
        unpack_signs(job.data + 4 + begin / 8, m, words);
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
