// Whole chunks, those with the largest shared norms; kernels/reference_top_chunks.py defines them. No index travels.
#include "elements.h"
#include "shared.h"
#include "values.h"

namespace thinwire {
namespace {

// The k chunks with the largest norms, ties to the lowest, ascending.
std::vector<std::uint64_t> chosen(const f32* shared, std::size_t n, std::size_t k, std::size_t chunk) {
    const std::size_t num_chunks = (n + chunk - 1) / chunk;
    std::vector<std::uint64_t> keys(num_chunks);
    for (std::size_t c = 0; c < num_chunks; c++) {
        const float norm = shared[c];
        const auto rank = static_cast<std::uint64_t>(0x7FFFFFFF - std::int64_t{std::bit_cast<std::int32_t>(norm)});
        keys[c] = rank << 32 | c;
    }
    if (k < num_chunks) std::nth_element(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(k), keys.end());
    keys.resize(k);
    for (std::uint64_t& key : keys) key &= 0xFFFFFFFF;
    std::sort(keys.begin(), keys.end());
    return keys;
}

template <bool accumulate> TW_INLINE void decode(const DecodeJob& job, const std::vector<std::uint64_t>& chunks,
                                                 std::size_t chunk, Number number) {
    const auto run = [&]<Number constant>() __attribute__((always_inline)) {
        for (std::size_t j = 0; j < chunks.size(); j++) {
            const std::size_t begin = chunks[j] * chunk, m = std::min<std::size_t>(chunk, job.n - begin);
            f32* __restrict out = job.out + begin;
            for (std::size_t i = 0; i < m; i++)
                deliver<accumulate>(out[i], value_at<constant>(job.data, j * chunk + i), job.alpha);
        }
    };
    TW_FOR_NUMBER(number, run)
}

}  // namespace

TW_CLONES bool encode_top_chunks(const EncodeJob& job, const f32* shared, Number number, std::size_t chunk,
                                 Scratch& scratch) {
    const std::size_t n = job.n, k = job.num_kept, num_values = k * chunk;
    std::int32_t peak = 0;
    const f32* q = form_q(job, 0, n, peak);
    peak = std::max(peak, peak_magnitude(shared, (n + chunk - 1) / chunk));
    const std::vector<std::uint64_t> chunks = chosen(shared, n, k, chunk);
    f32* values = reinterpret_cast<f32*>(scratch.get<float>(num_values));
    if (num_values) std::memset(values, 0, 4 * num_values);
    const auto length = [&](std::size_t c) { return 4 * std::min<std::size_t>(chunk, n - c * chunk); };
    for (std::size_t j = 0; j < k; j++) std::memcpy(values + j * chunk, q + chunks[j] * chunk, length(chunks[j]));
    if (num_values) peak = std::max(peak, send_values(values, num_values, job.out, number));
    if (job.residual)  // `send_values` left what rounding lost
        for (std::size_t j = 0; j < k; j++)
            std::memcpy(job.residual + chunks[j] * chunk, values + j * chunk, length(chunks[j]));
    zero_padding(job, num_values * value_nbytes(number));
    return peak < INF_BITS;
}

TW_CLONES void decode_top_chunks(const DecodeJob& job, const f32* shared, Number number, std::size_t chunk) {
    const std::vector<std::uint64_t> chunks = chosen(shared, job.n, job.num_kept, chunk);
    if (!job.accumulate && job.n) std::memset(job.out, 0, 4 * job.n);
    job.accumulate ? decode<true>(job, chunks, chunk, number) : decode<false>(job, chunks, chunk, number);
}

}  // namespace thinwire
