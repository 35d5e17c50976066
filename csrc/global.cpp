// Global-QSGD: codes of a scale that ranks agreed on; kernels/reference_global.py defines them.
#include <cmath>

#include "natural.h"
#include "philox.h"
#include "shared.h"
#include "uniform.h"

namespace thinwire {
namespace {

constexpr std::size_t TILE = 1024;  // uniforms drawn at a time
constexpr std::uint32_t SIGN = 128;

// The scale, and whether there is one: a message in which a norm is not finite was flagged.
struct Norm {
    float value;
    bool good;
};

TW_INLINE Norm norm_of(const f32* shared, bool squared) {
    const float norm = squared ? std::sqrt(*shared) : *shared;
    const bool good = norm >= 0.0f && magnitude(norm) < INF_BITS;
    return {good ? norm : 0.0f, good};
}

// --- linear codes: one a byte, or, of 4 bits, byte j is the number codes[j] + 16 codes[j + h] ------------------------

TW_INLINE void pack_pairs(const std::uint8_t* __restrict codes, std::size_t n, std::uint8_t* __restrict out) {
    const std::size_t h = (n + 1) / 2;
    for (std::size_t j = 0; j < n - h; j++) out[j] = static_cast<std::uint8_t>(codes[j] + 16 * codes[j + h]);
    if (h > n - h) out[h - 1] = codes[h - 1];
}

TW_INLINE std::int8_t low_code(std::uint8_t byte) { return static_cast<std::int8_t>(((byte & 15) ^ 8) - 8); }

TW_INLINE std::int8_t high_code(std::uint8_t byte) {
    return static_cast<std::int8_t>(static_cast<std::int8_t>(byte - low_code(byte)) >> 4);
}

template <bool has_residual>
TW_INLINE bool encode(const EncodeJob& job, const f32* shared, const GlobalLinear& settings, Scratch& scratch) {
    const auto levels = static_cast<float>(settings.levels);
    const Norm norm = norm_of(shared, settings.squared);
    const float scale = scale_of(norm.value, levels);
    const std::size_t n = job.n, used = settings.bits == 8 ? n : (n + 1) / 2;
    std::uint8_t* codes = settings.bits == 8 ? job.out : scratch.get<std::uint8_t>(n);
    alignas(64) float random[TILE + 2 * UNIFORM_CHUNK];
    std::int32_t peak = 0;
    for (std::size_t t = 0; t < n; t += TILE) {
        const std::size_t m = std::min<std::size_t>(TILE, n - t);
        form_q(job, t, m, peak);
        f32* residual = has_residual ? job.residual + t : nullptr;
        if (scale > 0.0f)
            uniform_codes<true, has_residual>(job.x + t, residual, m, scale, levels, uniforms(job, t, m, random),
                                              codes + t);
        else
            std::memset(codes + t, 0, m);  // and the residual is q, as it stands
    }
    if (settings.bits == 4) pack_pairs(codes, n, job.out);
    zero_padding(job, used);
    return norm.good && peak < INF_BITS;
}

template <bool accumulate> TW_INLINE void decode(const DecodeJob& job, float scale, int bits) {
    const std::uint8_t* __restrict data = job.data;
    if (bits == 8) return uniform_values<accumulate>(data, job.out, job.n, 8, scale, job.alpha);
    const std::size_t n = job.n, h = (n + 1) / 2;
    f32* __restrict first = job.out;
    f32* __restrict second = job.out + h;
    const float alpha = job.alpha;
    for (std::size_t j = 0; j < h; j++)
        deliver<accumulate>(first[j], static_cast<float>(low_code(data[j])) * scale, alpha);
    for (std::size_t j = 0; j < n - h; j++)
        deliver<accumulate>(second[j], static_cast<float>(high_code(data[j])) * scale, alpha);
}

// floor(mean + u) of two codes.
TW_INLINE std::int32_t mean_code(std::int32_t a, std::int32_t b, float ca, float cb, float u) {
    const float y = (static_cast<float>(a) * ca + static_cast<float>(b) * cb) / (ca + cb) + u;
    const float nearest = (y + SHIFT) - SHIFT;
    return static_cast<std::int32_t>(nearest > y ? nearest - 1.0f : nearest);
}

// What draws for elements of a pair of blocks.
TW_INLINE EncodeJob drawing(const ReduceJob& job) {
    EncodeJob drawer{};
    drawer.key = job.key;
    drawer.offset = job.offset;
    drawer.step = job.step;
    drawer.stream = job.stream;
    return drawer;
}

// --- exponential codes: a sign and an exponent in a byte ------------------------------------------------------------

template <bool has_residual>
TW_INLINE bool encode(const EncodeJob& job, const f32* shared, const GlobalExponential& settings) {
    const Norm norm = norm_of(shared, settings.squared);
    alignas(64) float random[TILE + 2 * UNIFORM_CHUNK];
    std::int32_t peak = 0;
    for (std::size_t t = 0; t < job.n; t += TILE) {
        const std::size_t m = std::min<std::size_t>(TILE, job.n - t);
        form_q(job, t, m, peak);
        f32* residual = has_residual ? job.residual + t : nullptr;
        if (norm.value > 0.0f)
            natural_codes<has_residual>(job.x + t, residual, m, norm.value, static_cast<std::uint32_t>(settings.levels),
                                        SIGN, uniforms(job, t, m, random), job.out + t);
        else
            std::memset(job.out + t, 0, m);
    }
    zero_padding(job, job.n);
    return norm.good && peak < INF_BITS;
}

// The sum of two codes, rounded by chance: of equal signs up, of different signs down, by one or not at all.
TW_INLINE std::uint8_t sum_code(std::uint8_t a, std::uint8_t b, float u) {
    const std::int32_t ma = a & 127, mb = b & 127;
    const std::int32_t high = std::max(ma, mb), low = std::min(ma, mb), apart = high - low;
    const std::int32_t opposite = ((a ^ b) & static_cast<std::int32_t>(SIGN)) ? 1 : 0;
    const std::int32_t sign = (ma >= mb ? a : b) & static_cast<std::int32_t>(SIGN);
    const std::int32_t moved = u < std::bit_cast<float>((127 - apart + opposite) << 23) ? 1 : 0;  // 2^-(apart - opposite)
    const std::int32_t together = std::min(high + moved, 127), against = apart == 0 ? 0 : high - moved;
    const std::int32_t total = low == 0 ? high : opposite ? against : together;
    return static_cast<std::uint8_t>(total > 0 ? total | sign : 0);
}

}  // namespace

TW_CLONES bool encode_global_linear(const EncodeJob& job, const f32* shared, const GlobalLinear& settings,
                                    Scratch& scratch) {
    return job.residual ? encode<true>(job, shared, settings, scratch) : encode<false>(job, shared, settings, scratch);
}

TW_CLONES void decode_global_linear(const DecodeJob& job, const f32* shared, const GlobalLinear& settings) {
    const float scale = scale_of(norm_of(shared, settings.squared).value, static_cast<float>(settings.levels));
    job.accumulate ? decode<true>(job, scale, settings.bits) : decode<false>(job, scale, settings.bits);
}

TW_CLONES void reduce_global_linear(const ReduceJob& job, int bits) {
    const EncodeJob drawer = drawing(job);
    const float ca = job.acc_count, cb = job.data_count;
    const std::size_t n = job.n, h = bits == 8 ? n : (n + 1) / 2;
    alignas(64) float random[2][TILE + 2 * UNIFORM_CHUNK];
    for (std::size_t t = 0; t < h; t += TILE) {
        const std::size_t m = std::min<std::size_t>(TILE, h - t);
        std::uint8_t* __restrict acc = job.acc + t;
        const std::uint8_t* __restrict data = job.data + t;
        const float* u = uniforms(drawer, t, m, random[0]);
        if (bits == 8) {
            for (std::size_t i = 0; i < m; i++)
                acc[i] = static_cast<std::uint8_t>(
                    mean_code(static_cast<std::int8_t>(acc[i]), static_cast<std::int8_t>(data[i]), ca, cb, u[i]));
            continue;
        }
        const std::size_t beyond = std::min(m, n - h - std::min(n - h, t));  // bytes that hold a second code
        const float* v = uniforms(drawer, h + t, beyond, random[1]);
        for (std::size_t i = 0; i < beyond; i++) {
            const std::int32_t low = mean_code(low_code(acc[i]), low_code(data[i]), ca, cb, u[i]);
            const std::int32_t high = mean_code(high_code(acc[i]), high_code(data[i]), ca, cb, v[i]);
            acc[i] = static_cast<std::uint8_t>(low + 16 * high);
        }
        for (std::size_t i = beyond; i < m; i++)
            acc[i] = static_cast<std::uint8_t>(mean_code(low_code(acc[i]), low_code(data[i]), ca, cb, u[i]));
    }
}

TW_CLONES bool encode_global_exponential(const EncodeJob& job, const f32* shared, const GlobalExponential& settings) {
    return job.residual ? encode<true>(job, shared, settings) : encode<false>(job, shared, settings);
}

TW_CLONES void decode_global_exponential(const DecodeJob& job, const f32* shared, const GlobalExponential& settings) {
    const float norm = norm_of(shared, settings.squared).value;
    const auto levels = static_cast<std::uint32_t>(settings.levels);
    if (job.accumulate)
        natural_values<true>(job.data, job.out, job.n, levels, SIGN, norm, job.alpha);
    else
        natural_values<false>(job.data, job.out, job.n, levels, SIGN, norm, job.alpha);
}

TW_CLONES void reduce_global_exponential(const ReduceJob& job) {
    const EncodeJob drawer = drawing(job);
    alignas(64) float random[TILE + 2 * UNIFORM_CHUNK];
    for (std::size_t t = 0; t < job.n; t += TILE) {
        const std::size_t m = std::min<std::size_t>(TILE, job.n - t);
        std::uint8_t* __restrict acc = job.acc + t;
        const std::uint8_t* __restrict data = job.data + t;
        const float* u = uniforms(drawer, t, m, random);
        for (std::size_t i = 0; i < m; i++) acc[i] = sum_code(acc[i], data[i], u[i]);
    }
}

}  // namespace thinwire
