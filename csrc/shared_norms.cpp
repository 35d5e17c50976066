// Norms that ranks agree on before encoding: `shared_norms` of reference_global.py.
#include <limits>

#include "elements.h"
#include "shared.h"
#include "tree_sum.h"

namespace thinwire {
namespace {

constexpr std::size_t SHORT = 128;

// The tree of `sum_chunk` over a few squares: its levels above only add zeros.
template <std::size_t width> TW_INLINE double sum_short(const float* q) {
    double sums[width];
    for (std::size_t i = 0; i < width; i++) sums[i] = static_cast<double>(q[i]) * q[i];
    for (std::size_t half = width / 2; half > 0; half /= 2)
        for (std::size_t i = 0; i < half; i++) sums[i] = sums[i] + sums[i + half];
    return sums[0];
}

// Elements [begin, begin + m) of q into `q`, padded with zeros to `padded`; returns the largest magnitude.
TW_INLINE std::int32_t load(const StatisticJob& job, std::size_t begin, std::size_t m, std::size_t padded, float* q) {
    const f32* __restrict x = job.x + begin;
    std::int32_t peak = 0;
    if (job.residual) {
        const f32* __restrict residual = job.residual + begin;
        for (std::size_t i = 0; i < m; i++) q[i] = x[i] + residual[i] * job.residual_scale;
    } else if (m) {
        std::memcpy(q, x, 4 * m);
    }
    for (std::size_t i = 0; i < m; i++) peak = std::max(peak, magnitude(q[i]));
    for (std::size_t i = m; i < padded; i++) q[i] = 0.0f;
    return peak;
}

}  // namespace

TW_CLONES void shared_norms(const StatisticJob& job, std::size_t block, bool l2, bool squared) {
    const std::size_t width = block ? block : std::max<std::size_t>(job.n, 1);
    const std::size_t num_blocks = block ? (job.n + block - 1) / block : 1;
    std::vector<double> sums(l2 ? (std::min<std::size_t>(width, job.n) + CHUNK - 1) / CHUNK + 1 : 0);
    alignas(64) float q[CHUNK];
    for (std::size_t b = 0; b < num_blocks; b++) {
        const std::size_t begin = b * width, m = std::min<std::size_t>(width, job.n - begin);
        std::int32_t peak = 0;
        double square = 0.0;
        if (l2 && m <= SHORT) {
            peak = load(job, begin, m, SHORT, q);
            square = m <= SHORT / 2 ? sum_short<SHORT / 2>(q) : sum_short<SHORT>(q);
        } else {
            std::size_t num_chunks = 0;
            for (std::size_t t = 0; t < m; t += CHUNK) {
                peak = std::max(peak, load(job, begin + t, std::min(CHUNK, m - t), l2 ? CHUNK : 0, q));
                if (l2) sums[num_chunks++] = sum_floats<true>(reinterpret_cast<const f32*>(q));
            }
            if (num_chunks) square = sum_of_sums(sums.data(), num_chunks);
        }
        const double largest = std::bit_cast<float>(peak);
        if (!l2) square = largest * largest;
        float norm = static_cast<float>(squared ? square : l2 ? std::sqrt(square) : largest);
        if (squared && square > 0.0) norm = std::max(norm, 0x1p-126f);
        if (!squared) norm = std::min(norm, std::numeric_limits<float>::max());
        job.shared[b] = peak < INF_BITS ? norm : std::bit_cast<float>(INF_BITS);
    }
}

}  // namespace thinwire
