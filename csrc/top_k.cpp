// Top-k: k values and where they belong, by index; kernels/reference_top_k.py defines which and how they lie.
//
// A sample gives a bound that about k elements reach. One pass collects those that do, in order; bisection over the
// bits of their magnitudes finds the k-th largest. Should fewer than k reach the bound, all are collected.
#include <cmath>

#include "elements.h"
#include "indices.h"
#include "kernels.h"
#include "values.h"

#ifdef TW_HAS_CLONES
#include <immintrin.h>
#endif

namespace thinwire {
namespace {

constexpr std::size_t MAX_N = 65536, SAMPLES = 1024, SAMPLES_KEPT = 64, TILE = 1024;
constexpr int BISECTED_BITS = 15;
constexpr std::uint32_t GOLDEN = 2654435769u;  // 2**32 / golden ratio: places spread evenly, in step with no row length

// Buffers of one thread. packing.py makes sure that n <= MAX_N.
struct Buffers {
    std::int32_t magnitudes[MAX_N];
    std::int32_t samples[MAX_N];
    std::uint8_t marks[MAX_N];
    std::uint16_t indices[MAX_N + 16];  // `collect` writes up to sixteen past those it keeps
};

// The k-th largest of `values`: the largest t that at least k of them reach, without its bits below `last_bit`.
// 1 <= k <= count, values >= 0.
TW_INLINE std::int32_t kth_largest(const std::int32_t* values, std::size_t count, std::size_t k, int last_bit = 0) {
    std::int32_t found = 0;
    if (k < 16) {  // fewer passes downwards from the largest
        std::int32_t above = INT32_MAX;
        for (std::size_t reach = 0; reach < k; above = found) {
            found = 0;
            for (std::size_t i = 0; i < count; i++) found = std::max(found, values[i] < above ? values[i] : 0);
            reach = 0;
            for (std::size_t i = 0; i < count; i++) reach += values[i] >= found;
        }
        return found >> last_bit << last_bit;
    }
    for (int bit = 30; bit >= last_bit; bit--) {
        const std::int32_t tried = found | (1 << bit);
        std::uint32_t reach = 0;
        for (std::size_t i = 0; i < count; i++) reach += values[i] >= tried;
        if (reach >= k) found = tried;
    }
    return found;
}

TW_INLINE void take_sample(const f32* q, std::size_t n, std::size_t count, std::int32_t* __restrict sample) {
    std::uint32_t place = 0;
    for (std::size_t i = 0; i < count; i++) {
        place += GOLDEN;
        sample[i] = magnitude(q[(std::uint64_t{place} * n) >> 32]);
    }
}

// A bound that, by a sample, more than k of the n elements reach. Only speed hangs on it.
TW_INLINE std::int32_t sampled_bound(const f32* q, std::size_t n, std::size_t k, std::int32_t* sample) {
    const double expected = static_cast<double>(k) * SAMPLES / static_cast<double>(n);
    const auto rank = static_cast<std::size_t>(expected + 3.0 * std::sqrt(expected) + 4.0);
    if (n < 4 * SAMPLES || rank >= SAMPLES) return 0;
    take_sample(q, n, SAMPLES, sample);
    return kth_largest(sample, SAMPLES, rank);
}

#ifdef TW_HAS_CLONES

// As `collect`: sixteen at a time, those that count moved to the front. Writing and moving on always costs less than a
// branch that is often mispredicted.
TW_WIDE std::size_t collect_wide(const f32* q, std::size_t n, std::int32_t bound, std::uint16_t* indices) {
    const __m512i size = _mm512_set1_epi32(0x7FFFFFFF), bounds = _mm512_set1_epi32(bound);
    __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    std::size_t count = 0;
    for (std::size_t i = 0; i < n; i += 16) {
        const auto real = static_cast<__mmask16>(n - i < 16 ? (1u << (n - i)) - 1 : 0xFFFF);
        fetch_ahead(q + n + i, 16);
        const __m512i magnitudes = _mm512_and_si512(_mm512_maskz_loadu_epi32(real, q + i), size);
        const __mmask16 reach = _mm512_mask_cmpge_epi32_mask(real, magnitudes, bounds);
        const __m256i kept = _mm512_maskz_cvtepi32_epi16(0xFFFF, _mm512_maskz_compress_epi32(reach, places));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(indices + count), kept);
        count += static_cast<std::size_t>(__builtin_popcount(reach));
        places = _mm512_add_epi32(places, _mm512_set1_epi32(16));
    }
    return count;
}

#endif

// Indices, ascending, of the elements whose magnitude reaches `bound`; returns how many.
TW_INLINE std::size_t collect(const f32* q, std::size_t n, std::int32_t bound, std::uint16_t* __restrict indices) {
#ifdef TW_HAS_CLONES
    static const bool wide = __builtin_cpu_supports("x86-64-v4");
    if (wide) return collect_wide(q, n, bound, indices);
#endif
    std::size_t count = 0;
    for (std::size_t begin = 0; begin < n; begin += TILE) {
        const std::size_t m = std::min<std::size_t>(TILE, n - begin);
        fetch_ahead(q + n + begin, m);
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

// Leave the magnitudes of the `count` collected elements beside their indices.
TW_INLINE void look_up(const f32* q, std::size_t count, Buffers& buffers) {
    for (std::size_t i = 0; i < count; i++) buffers.magnitudes[i] = magnitude(q[buffers.indices[i]]);
}

// Collect at least k elements, among them all that reach the k-th largest magnitude, without its bits below `last_bit`.
TW_INLINE std::size_t collect_largest(const f32* q, std::size_t n, std::size_t k, int last_bit, Buffers& buffers) {
    const std::int32_t bound = sampled_bound(q, n, k, buffers.magnitudes) >> last_bit << last_bit;
    std::size_t count = collect(q, n, bound, buffers.indices);
    if (count < k) count = collect(q, n, 0, buffers.indices);
    look_up(q, count, buffers);
    return count;
}

// Of the `count` collected: keep, at the front, the indices of all that reach `upper`, at most k, and fill up to k with
// others, spread evenly.
TW_INLINE void fill_evenly(std::size_t count, std::size_t k, std::uint32_t upper, Buffers& buffers) {
    std::size_t above = 0, kept = 0, turn = 0;
    const auto reaches = [&](std::size_t i) { return static_cast<std::uint32_t>(buffers.magnitudes[i]) >= upper; };
    for (std::size_t i = 0; i < count; i++) above += reaches(i);
    const std::size_t wanted = k - above, others = count - above;
    for (std::size_t i = 0; i < count; i++) {
        bool keep = reaches(i);
        if (!keep) {
            turn += wanted;
            keep = turn >= others && wanted;
            turn -= keep ? others : 0;
        }
        buffers.indices[kept] = buffers.indices[i];
        kept += keep;
    }
}

// Each of the following leaves the indices of k elements at the front of buffers.indices, ascending.

TW_INLINE void select_exact(const f32* q, std::size_t n, std::size_t k, Buffers& buffers) {
    const std::size_t count = collect_largest(q, n, k, 0, buffers);
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

// Keep, of the `count` collected, those that reach `bound`; returns how many.
TW_INLINE std::size_t keep_reaching(std::int32_t bound, std::size_t count, Buffers& buffers) {
    std::size_t left = 0;
    for (std::size_t i = 0; i < count; i++) {
        const std::int32_t m = buffers.magnitudes[i];
        buffers.indices[left] = buffers.indices[i];
        buffers.magnitudes[left] = m;
        left += m >= bound;
    }
    return left;
}

// Elements that reach `lower`, at least k of them and all collected, are left; those that reach `upper` go first.
TW_INLINE void select_bisect(const f32* q, std::size_t n, std::size_t k, Buffers& buffers) {
    const std::size_t count = collect_largest(q, n, k, BISECTED_BITS, buffers);
    const std::int32_t lower = kth_largest(buffers.magnitudes, count, k, BISECTED_BITS);
    const std::size_t left = keep_reaching(lower, count, buffers);
    fill_evenly(left, k, static_cast<std::uint32_t>(lower) + (1u << BISECTED_BITS), buffers);
}

// Leave in buffers.samples those of `num_samples` samples that are among the `count` collected; returns how many.
TW_INLINE std::size_t samples_collected(std::size_t n, std::size_t num_samples, std::size_t count, Buffers& buffers) {
    std::memset(buffers.marks, 0, n);
    std::uint32_t place = 0;
    for (std::size_t i = 0; i < num_samples; i++) {
        place += GOLDEN;
        buffers.marks[(std::uint64_t{place} * n) >> 32] = 1;
    }
    std::size_t found = 0;
    for (std::size_t i = 0; i < count; i++) {
        buffers.samples[found] = buffers.magnitudes[i];
        found += buffers.marks[buffers.indices[i]];
    }
    return found;
}

// Both bounds are among the largest samples. Most often those were collected: what takes long is to read the others.
TW_INLINE void select_sampled(const f32* q, std::size_t n, std::size_t k, Buffers& buffers) {
    const std::size_t num_samples = std::max<std::size_t>(SAMPLES, (SAMPLES_KEPT * n + k - 1) / k);
    if (num_samples >= n) return select_exact(q, n, k, buffers);
    const std::size_t expected = k * num_samples / n;
    const auto spread = static_cast<std::size_t>(std::sqrt(static_cast<double>(4 * expected)));  // two deviations
    const std::size_t first = expected - spread, last = std::min(num_samples, expected + spread);
    std::size_t count = collect_largest(q, n, k, 0, buffers), found = 0;
    // Places are at least 0.38 n / num_samples apart, and so all different here.
    if (3 * num_samples <= n) found = samples_collected(n, num_samples, count, buffers);
    const bool all = found < last;
    if (all) take_sample(q, n, found = num_samples, buffers.samples);
    const std::int32_t upper = kth_largest(buffers.samples, found, first);
    const std::int32_t lower = kth_largest(buffers.samples, found, last);
    if (all) {
        count = collect(q, n, lower, buffers.indices);
        look_up(q, count, buffers);
    }
    count = keep_reaching(lower, count, buffers);
    if (count < k) {  // the sample held too many large ones: the others fill up
        count = collect(q, n, 0, buffers.indices);
        look_up(q, count, buffers);
        return fill_evenly(count, k, static_cast<std::uint32_t>(lower), buffers);
    }
    std::size_t above = 0;
    for (std::size_t i = 0; i < count; i++) above += buffers.magnitudes[i] >= upper;
    if (above <= k) return fill_evenly(count, k, static_cast<std::uint32_t>(upper), buffers);
    fill_evenly(keep_reaching(upper, count, buffers), k, 0x80000000u, buffers);
}

TW_INLINE void select(const f32* q, std::size_t n, std::size_t k, Selection selection, Buffers& buffers) {
    switch (selection) {
        case Selection::exact: return select_exact(q, n, k, buffers);
        case Selection::sampled: return select_sampled(q, n, k, buffers);
        case Selection::bisect: return select_bisect(q, n, k, buffers);
    }
}

template <bool accumulate> TW_INLINE void scatter(const DecodeJob& job, const TopK& settings, const TopKLayout& layout,
                                                  const std::uint16_t* indices) {
    const std::uint8_t* values = job.data + layout.values;
    const auto run = [&]<Number number>() {
        for (std::size_t j = 0; j < job.num_kept; j++)
            deliver<accumulate>(job.out[indices[j]], value_at<number>(values, j), job.alpha);
    };
    TW_FOR_NUMBER(settings.number, run)
}

}  // namespace

TW_CLONES bool encode_top_k(const EncodeJob& job, const TopK& settings, Scratch& scratch) {
    const std::size_t k = job.num_kept;
    const TopKLayout layout = lay_out_top_k(job.n, k, value_nbytes(settings.number), settings.chunked);
    std::int32_t peak = 0;
    const f32* q = form_q(job, 0, job.n, peak);
    Buffers& buffers = *scratch.get<Buffers>(1);
    if (k) {
        select(q, job.n, k, settings.selection, buffers);
        f32* __restrict left = reinterpret_cast<f32*>(buffers.magnitudes);  // no longer needed as magnitudes
        for (std::size_t j = 0; j < k; j++) left[j] = q[buffers.indices[j]];
        peak = std::max(peak, send_values(left, k, job.out + layout.values, settings.number));
        if (job.residual)
            for (std::size_t j = 0; j < k; j++) job.residual[buffers.indices[j]] = left[j];
    }
    write_indices(layout, buffers.indices, job.n, k, job.out);
    zero_padding(job, layout.end);
    return peak < INF_BITS;
}

TW_CLONES BadIndices check_top_k(const DecodeJob& job, const TopK& settings, Scratch& scratch) {
    const TopKLayout layout = lay_out_top_k(job.n, job.num_kept, value_nbytes(settings.number), settings.chunked);
    return check_block(layout, job.data, job.n, job.num_kept, scratch.get<std::uint16_t>(job.num_kept));
}

void decode_top_k(const DecodeJob& job, const TopK& settings, Scratch& scratch) {
    const TopKLayout layout = lay_out_top_k(job.n, job.num_kept, value_nbytes(settings.number), settings.chunked);
    std::uint16_t* indices = scratch.get<std::uint16_t>(job.num_kept);
    read_indices(layout, job.data, job.n, job.num_kept, indices);
    if (!job.accumulate && job.n) std::memset(job.out, 0, 4 * job.n);
    job.accumulate ? scatter<true>(job, settings, layout, indices) : scatter<false>(job, settings, layout, indices);
}

}  // namespace thinwire
