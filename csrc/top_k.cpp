// Top-k: the k largest magnitudes, ties to the lowest index; values first, then 16-bit indices, both by index.
//
// A sample gives a bound that about k elements reach. One pass collects those that do, in order; bisection over the
// bits of their magnitudes finds the k-th largest exactly. Should fewer than k reach the bound, all are collected.
#include <cmath>

#include "elements.h"
#include "half.h"
#include "kernels.h"

namespace thinwire {
namespace {

constexpr std::size_t MAX_N = 65536, SAMPLES = 1024, TILE = 1024;

// Buffers of one thread. packing.py makes sure that n <= MAX_N.
struct Buffers {
    std::int32_t magnitudes[MAX_N];
    std::uint16_t indices[MAX_N + 8];  // `collect` writes up to eight past those it keeps
};

// The k-th largest of `values`: the largest t that at least k of them reach. 1 <= k <= count, values >= 0.
TW_INLINE std::int32_t kth_largest(const std::int32_t* values, std::size_t count, std::size_t k) {
    std::int32_t found = 0;
    for (int bit = 30; bit >= 0; bit--) {
        const std::int32_t tried = found | (1 << bit);
        std::uint32_t reach = 0;
        for (std::size_t i = 0; i < count; i++) reach += values[i] >= tried;
        if (reach >= k) found = tried;
    }
    return found;
}

// A bound that, by a sample, more than k of the n elements reach. Only speed hangs on it.
TW_INLINE std::int32_t sampled_bound(const f32* q, std::size_t n, std::size_t k, std::int32_t* sample) {
    const double expected = static_cast<double>(k) * SAMPLES / static_cast<double>(n);
    const auto rank = static_cast<std::size_t>(expected + 3.0 * std::sqrt(expected) + 4.0);
    if (n < 4 * SAMPLES || rank >= SAMPLES) return 0;
    std::uint32_t place = 0;
    for (std::size_t i = 0; i < SAMPLES; i++) {
        place += 2654435769u;  // 2**32 / golden ratio: spread evenly, in step with no row length
        sample[i] = magnitude(q[(std::uint64_t{place} * n) >> 32]);
    }
    return kth_largest(sample, SAMPLES, rank);
}

// Indices, ascending, of the elements whose magnitude reaches `bound`; returns how many.
TW_INLINE std::size_t collect(const f32* q, std::size_t n, std::int32_t bound, std::uint16_t* __restrict indices) {
    std::size_t count = 0;
    for (std::size_t begin = 0; begin < n; begin += TILE) {
        const std::size_t m = std::min<std::size_t>(TILE, n - begin);
        alignas(64) std::uint64_t words[TILE / 8];
        if (m < TILE) std::memset(words, 0, sizeof words);
        std::uint8_t* flags = reinterpret_cast<std::uint8_t*>(words);
        for (std::size_t i = 0; i < m; i++) flags[i] = magnitude(q[begin + i]) >= bound;
        for (std::size_t w = 0; w < (m + 7) / 8; w++) {
            if (words[w] == 0) continue;  // most often, where k is small
            // Write all eight, move on past those that count: no branch to mispredict where they are many.
            for (std::size_t i = 8 * w; i < 8 * w + 8; i++) {
                indices[count] = static_cast<std::uint16_t>(begin + i);
                count += flags[i];
            }
        }
    }
    return count;
}

// Leave the indices of the k largest at the front of buffers.indices, ascending.
TW_INLINE void select(const f32* q, std::size_t n, std::size_t k, Buffers& buffers) {
    const std::int32_t bound = sampled_bound(q, n, k, buffers.magnitudes);
    std::size_t count = collect(q, n, bound, buffers.indices);
    if (count < k) count = collect(q, n, 0, buffers.indices);
    for (std::size_t i = 0; i < count; i++) buffers.magnitudes[i] = magnitude(q[buffers.indices[i]]);
    const std::int32_t smallest = kth_largest(buffers.magnitudes, count, k);
    std::size_t above = 0, kept = 0;
    for (std::size_t i = 0; i < count; i++) above += buffers.magnitudes[i] > smallest;
    for (std::size_t i = 0, ties = k - above; kept < k; i++) {
        const bool tie = buffers.magnitudes[i] == smallest && ties > 0;
        ties -= tie;
        buffers.indices[kept] = buffers.indices[i];
        kept += tie || buffers.magnitudes[i] > smallest;
    }
}

// Write k values as halves and leave what each lost; returns the largest magnitude sent.
TW_INLINE std::int32_t send_halves(f32* __restrict values, std::size_t k, u16* __restrict out) {
    std::int32_t peak = 0;
    for (std::size_t j = 0; j < k; j++) {
        const std::uint16_t half = float_to_half(values[j]);
        const float sent = half_to_float(half);
        out[j] = half;
        values[j] = values[j] - sent;
        peak = std::max(peak, magnitude(sent));
    }
    return peak;
}

std::size_t value_nbytes(Number number) { return number == Number::float32 ? 4 : 2; }

}  // namespace

TW_CLONES bool encode_top_k(const EncodeJob& job, Number number, Scratch& scratch) {
    const std::size_t k = job.num_kept;
    std::uint8_t* out = job.out;
    std::int32_t peak = 0;
    const f32* q = form_q(job, 0, job.n, peak);
    if (k) {
        Buffers& buffers = *scratch.get<Buffers>(1);
        select(q, job.n, k, buffers);
        f32* __restrict left = reinterpret_cast<f32*>(buffers.magnitudes);  // no longer needed as magnitudes
        for (std::size_t j = 0; j < k; j++) left[j] = q[buffers.indices[j]];
        if (number == Number::float32) {
            std::memcpy(out, left, 4 * k);
            std::memset(left, 0, 4 * k);
        } else {
            peak = std::max(peak, send_halves(left, k, reinterpret_cast<u16*>(out)));
        }
        if (job.residual)
            for (std::size_t j = 0; j < k; j++) job.residual[buffers.indices[j]] = left[j];
        out += k * value_nbytes(number);
        std::memcpy(out, buffers.indices, 2 * k);
        out += 2 * k;
    }
    zero_padding(job, out - job.out);
    return peak < INF_BITS;
}

TW_CLONES std::int64_t check_top_k(const DecodeJob& job, Number number) {
    const std::size_t k = job.num_kept;
    const u16* indices = reinterpret_cast<const u16*>(job.data + k * value_nbytes(number));
    // Ascending and the last in range: all are in range. Looked over without branches first; named only if bad.
    bool bad = k && indices[k - 1] >= job.n;
    for (std::size_t j = 1; j < k; j++) bad |= indices[j] <= indices[j - 1];
    if (!bad) return -1;
    for (std::size_t j = 0;; j++)
        if (indices[j] >= job.n || (j > 0 && indices[j] <= indices[j - 1])) return static_cast<std::int64_t>(j);
}

void decode_top_k(const DecodeJob& job, Number number) {
    const std::size_t k = job.num_kept;
    const f32* floats = reinterpret_cast<const f32*>(job.data);
    const u16* halves = reinterpret_cast<const u16*>(job.data);
    const u16* indices = reinterpret_cast<const u16*>(job.data + k * value_nbytes(number));
    if (!job.accumulate && job.n) std::memset(job.out, 0, 4 * job.n);
    for (std::size_t j = 0; j < k; j++) {
        const float value = number == Number::float32 ? floats[j] : half_to_float(halves[j]);
        f32& out = job.out[indices[j]];
        if (job.accumulate)
            deliver<true>(out, value, job.alpha);
        else
            out = value;
    }
}

}  // namespace thinwire
