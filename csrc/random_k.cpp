// Random-k: values at places that both sides draw; kernels/reference_random_k.py defines them. No index travels.
#include "elements.h"
#include "kernels.h"
#include "philox.h"
#include "values.h"

namespace thinwire {
namespace {

// Mark units as they are drawn until k different ones are marked, or, where k is more than half, all but those.
TW_INLINE void draw_units(const Stream& stream, std::size_t num_units, std::size_t k, std::uint64_t* marks) {
    const std::size_t num_words = (num_units + 63) / 64, few = std::min(k, num_units - k);
    if (num_words == 0) return;
    std::memset(marks, 0, 8 * num_words);
    std::size_t drawn = 0;
    for (std::uint64_t chunk = 0; drawn < few; chunk++) {
        alignas(64) std::uint32_t words[WORD_CHUNK];
        word_chunk(stream, chunk, words);
        for (std::size_t d = 0; d < WORD_CHUNK && drawn < few; d++) {
            const std::uint64_t unit = std::uint64_t{words[d]} * num_units >> 32, bit = std::uint64_t{1} << unit % 64;
            drawn += !(marks[unit / 64] & bit);
            marks[unit / 64] |= bit;
        }
    }
    if (few == k) return;
    for (std::size_t w = 0; w < num_words; w++) marks[w] = ~marks[w];
    if (num_units % 64) marks[num_words - 1] &= (std::uint64_t{1} << num_units % 64) - 1;
}

// The units that are sent. Where they are drawn, `marks` has room for a bit each.
struct Units {
    std::size_t n, block, period, first;
    const std::uint64_t* marks;

    std::size_t count() const { return (n + block - 1) / block; }

    // Call run(slot, begin, m) for each, ascending: its elements [begin, begin + m), and the number of its first value
    // in the payload.
    template <typename Run> __attribute__((always_inline)) void for_each(Run run) const {
        std::size_t slot = 0;
        const auto one = [&](std::size_t unit) __attribute__((always_inline)) {
            run(slot, unit * block, std::min(block, n - unit * block));
            slot += block;
        };
        if (period) {
            for (std::size_t unit = first; unit < count(); unit += period) one(unit);
            return;
        }
        for (std::size_t w = 0; w < (count() + 63) / 64; w++)
            for (std::uint64_t word = marks[w]; word; word &= word - 1) one(64 * w + std::countr_zero(word));
    }
};

std::size_t num_marks(std::size_t n, const RandomK& settings) {
    return settings.period ? 0 : ((n + settings.block - 1) / settings.block + 63) / 64;
}

TW_INLINE Units units_of(const Stream& stream, std::size_t n, std::size_t k, const RandomK& settings,
                         std::uint64_t* marks) {
    const Units units{n, settings.block, settings.period, settings.period ? stream.step % settings.period : 0, marks};
    if (!units.period) draw_units(stream, units.count(), k, marks);
    return units;
}

template <bool accumulate> TW_INLINE void decode(const DecodeJob& job, const Units& units, Number number) {
    const auto run = [&]<Number constant>() __attribute__((always_inline)) {
        units.for_each([&](std::size_t slot, std::size_t begin, std::size_t m) __attribute__((always_inline)) {
            f32* __restrict out = job.out + begin;
            for (std::size_t i = 0; i < m; i++)
                deliver<accumulate>(out[i], value_at<constant>(job.data, slot + i), job.alpha);
        });
    };
    TW_FOR_NUMBER(number, run)
}

}  // namespace

TW_CLONES bool encode_random_k(const EncodeJob& job, const RandomK& settings, Scratch& scratch) {
    const std::size_t n = job.n, k = job.num_kept, num_values = k * settings.block, marked = num_marks(n, settings);
    std::int32_t peak = 0;
    const f32* q = form_q(job, 0, n, peak);
    std::uint64_t* marks = scratch.get<std::uint64_t>(marked + (num_values + 1) / 2);
    f32* values = reinterpret_cast<f32*>(marks + marked);
    const Units units = units_of(Stream{job.key, job.offset, job.step, job.stream}, n, k, settings, marks);
    const float scale = settings.scaled && k ? static_cast<float>(units.count()) / static_cast<float>(k) : 1.0f;

    if (num_values) std::memset(values, 0, 4 * num_values);
    units.for_each([&](std::size_t slot, std::size_t begin, std::size_t m) __attribute__((always_inline)) {
        for (std::size_t i = 0; i < m; i++) values[slot + i] = q[begin + i] * scale;
    });
    peak = std::max(peak, peak_magnitude(values, num_values));
    if (num_values) peak = std::max(peak, send_values(values, num_values, job.out, settings.number));
    if (job.residual) {
        f32* residual = job.residual;
        units.for_each([&](std::size_t slot, std::size_t begin, std::size_t m) __attribute__((always_inline)) {
            // What was sent is the value less what rounding it lost. That loss, and so this difference, is exact.
            for (std::size_t i = 0; i < m; i++) {
                const float sent = residual[begin + i] * scale - values[slot + i];
                residual[begin + i] = residual[begin + i] - sent;
            }
        });
    }
    zero_padding(job, num_values * value_nbytes(settings.number));
    return peak < INF_BITS;
}

TW_CLONES void decode_random_k(const DecodeJob& job, const Stream& stream, const RandomK& settings, Scratch& scratch) {
    const Units units =
        units_of(stream, job.n, job.num_kept, settings, scratch.get<std::uint64_t>(num_marks(job.n, settings)));
    if (!job.accumulate && job.n) std::memset(job.out, 0, 4 * job.n);
    job.accumulate ? decode<true>(job, units, settings.number) : decode<false>(job, units, settings.number);
}

}  // namespace thinwire
