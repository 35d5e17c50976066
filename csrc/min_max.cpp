// Min-max quantisation: the ends of a block's range, then codes that count steps between them.
#include <cmath>

#include "codes.h"
#include "kernels.h"
#include "philox.h"
#include "uniform.h"

namespace thinwire {
namespace {

constexpr std::size_t TILE = 1024;  // uniforms drawn at a time

struct Range {
    float lo, hi;
    bool finite;
};

// Bits of floats order as signed integers where they are positive, the other way round where they are negative, and
// as unsigned ones the negative lie above the positive. So -0 is below 0, and infinities and NaNs are at the ends.
template <typename Bits> TW_INLINE Bits least_bits(const f32* q, std::size_t m) {
    Bits least = std::bit_cast<Bits>(static_cast<float>(q[0]));
    for (std::size_t i = 0; i < m; i++) least = std::min(least, std::bit_cast<Bits>(static_cast<float>(q[i])));
    return least;
}

TW_INLINE Range range_of(const f32* q, std::size_t m) {
    std::int32_t hi = std::bit_cast<std::int32_t>(static_cast<float>(q[0]));
    auto lo = static_cast<std::uint32_t>(hi);
    for (std::size_t i = 0; i < m; i++) {
        const std::int32_t bits = std::bit_cast<std::int32_t>(static_cast<float>(q[i]));
        hi = std::max(hi, bits);
        lo = std::max(lo, static_cast<std::uint32_t>(bits));
    }
    const bool finite = hi < INF_BITS && lo < 0xFF800000;
    if (hi < 0) hi = least_bits<std::int32_t>(q, m);  // all negative
    if (lo < 0x80000000) lo = least_bits<std::uint32_t>(q, m);  // all positive
    return {std::bit_cast<float>(lo), std::bit_cast<float>(hi), finite};
}

TW_INLINE float at_least_0(float x) { return x > 0.0f ? x : 0.0f; }

// `_Affine` of reference_min_max.py. Codes are floats here.
struct Affine {
    float hi, levels, factor, inverse, base, scale, step;

    [[gnu::always_inline]] static Affine of(float lo, float hi, float levels) {
        float width = at_least_0(hi - lo);  // foreign bytes may say otherwise
        const bool tiny = width > 0.0f && width < 0x1p-100f;  // N / width might overflow
        const float factor = magnitude(width) >= INF_BITS ? 0.5f : tiny ? 0x1p100f : 1.0f, base = lo * factor;
        width = at_least_0(hi * factor - base);
        const float scale = width > 0.0f ? levels / width : 0.0f;
        return {hi, levels, factor, 1.0f / factor, base, scale, scale_of(width, levels)};
    }

    template <bool stochastic> [[gnu::always_inline]] float code(float q, float u) const {
        float y = (q * factor - base) * scale;
        if constexpr (stochastic) y = y + u;
        const float nearest = (y + SHIFT) - SHIFT;
        const float code = stochastic && nearest > y ? nearest - 1.0f : nearest;
        return code < levels ? code : levels;
    }

    [[gnu::always_inline]] float value(float code) const {
        const float value = (code * step + base) * inverse;
        return value < hi ? value : hi;
    }
};

// `_Bagua` of reference_min_max.py.
struct Bagua {
    float scale, step, base, first, last;

    [[gnu::always_inline]] static Bagua of(float lo, float hi, float levels) {
        const double range = (static_cast<double>(hi) - static_cast<double>(lo)) + 1e-7;
        const double wide = levels;
        const float scale = static_cast<float>(wide / range), step = static_cast<float>(range / wide);
        const bool near = std::max(std::fabs(lo), std::fabs(hi)) * scale < 0x1p16f && lo != hi;
        const float last = near ? (hi * scale + SHIFT) - SHIFT : levels;
        return {scale, step, near ? 0.0f : lo, last - levels, last};
    }

    template <bool> [[gnu::always_inline]] float code(float q, float) const {
        float y = (((q - base) * scale) + SHIFT) - SHIFT;
        y = y < last ? y : last;
        y = y > first ? y : first;
        return y - first;
    }

    [[gnu::always_inline]] float value(float code) const {
        constexpr float top = std::numeric_limits<float>::max();
        float value = (code + first) * step + base;
        value = value < top ? value : top;
        return value > -top ? value : -top;
    }
};

// Codes of m elements, one a byte; `residual` holds q and is left as q - value.
template <typename Grid, bool stochastic, bool has_residual>
TW_INLINE void grid_codes(const Grid grid, const f32* __restrict x, f32* __restrict residual, std::size_t m,
                          const float* __restrict u, std::uint8_t* __restrict out) {
    for (std::size_t i = 0; i < m; i++) {
        const float q = has_residual ? residual[i] : x[i];
        const float shifted = grid.template code<stochastic>(q, stochastic ? u[i] : 0.0f) + SHIFT;
        out[i] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(shifted));
        if constexpr (has_residual) residual[i] = q - grid.value(shifted - SHIFT);
    }
}

template <typename Grid, bool accumulate>
TW_INLINE void grid_values(const Grid grid, const std::uint8_t* __restrict codes, f32* __restrict out, std::size_t m,
                           float alpha) {
    for (std::size_t i = 0; i < m; i++) deliver<accumulate>(out[i], grid.value(static_cast<float>(codes[i])), alpha);
}

TW_INLINE std::size_t block_of(const MinMax& settings, std::size_t n) {
    return settings.block ? settings.block : std::max<std::size_t>(n, 1);
}

TW_INLINE float levels_of(const MinMax& settings) { return static_cast<float>((1 << settings.bits) - 1); }

template <typename Grid, bool stochastic, bool has_residual>
TW_INLINE bool encode(const EncodeJob& job, const MinMax& settings, Scratch& scratch) {
    const std::size_t n = job.n, block = block_of(settings, n), num_blocks = (n + block - 1) / block;
    const std::size_t longest = std::min<std::size_t>(block, n), num_random = stochastic ? uniforms_size(TILE) : 0;
    float* random = scratch.get<float>(num_random + (longest + CODES_SLACK + 3) / 4);
    auto* codes = reinterpret_cast<std::uint8_t*>(random + num_random);
    std::uint8_t* out = job.out + 8 * num_blocks;
    bool finite = true;
    for (std::size_t b = 0, begin = 0; b < num_blocks; b++, begin += block) {
        const std::size_t m = std::min<std::size_t>(block, n - begin);
        std::int32_t unused = 0;
        const Range range = range_of(form_q(job, begin, m, unused), m);
        finite = finite && range.finite;
        std::memcpy(job.out + 8 * b, &range.lo, 4);
        std::memcpy(job.out + 8 * b + 4, &range.hi, 4);
        const Grid grid = Grid::of(range.lo, range.hi, levels_of(settings));
        std::uint8_t* to = settings.bits == 8 ? out : codes;
        const std::size_t tile = stochastic ? TILE : m;
        for (std::size_t t = 0; t < m; t += tile) {
            const std::size_t now = std::min<std::size_t>(tile, m - t), place = begin + t;
            const float* u = stochastic ? uniforms(job, place, now, random) : nullptr;
            f32* residual = has_residual ? job.residual + place : nullptr;
            grid_codes<Grid, stochastic, has_residual>(grid, job.x + place, residual, now, u, to + t);
        }
        if (has_residual && magnitude(range.hi - range.lo) >= INF_BITS)
            finite = finite && peak_magnitude(job.residual + begin, m) < INF_BITS;
        if (settings.bits < 8) pack_codes(settings.bits, codes, m, out);
        out += packed_nbytes(settings.bits, m);
    }
    zero_padding(job, out - job.out);
    return finite;
}

template <typename Grid, bool accumulate>
TW_INLINE void decode(const DecodeJob& job, const MinMax& settings, Scratch& scratch) {
    const std::size_t n = job.n, block = block_of(settings, n), num_blocks = (n + block - 1) / block;
    auto* codes = scratch.get<std::uint8_t>(std::min<std::size_t>(block, n) + CODES_SLACK);
    const std::uint8_t* packed = job.data + 8 * num_blocks;
    for (std::size_t b = 0, begin = 0; b < num_blocks; b++, begin += block) {
        const std::size_t m = std::min<std::size_t>(block, n - begin);
        float lo, hi;
        std::memcpy(&lo, job.data + 8 * b, 4);
        std::memcpy(&hi, job.data + 8 * b + 4, 4);
        if (settings.bits < 8) unpack_codes(settings.bits, packed, m, codes);
        const std::uint8_t* from = settings.bits == 8 ? packed : codes;
        const Grid grid = Grid::of(lo, hi, levels_of(settings));
        grid_values<Grid, accumulate>(grid, from, job.out + begin, m, job.alpha);
        packed += packed_nbytes(settings.bits, m);
    }
}

}  // namespace

TW_CLONES bool encode_min_max(const EncodeJob& job, const MinMax& settings, Scratch& scratch) {
    if (settings.bagua)
        return job.residual ? encode<Bagua, false, true>(job, settings, scratch)
                            : encode<Bagua, false, false>(job, settings, scratch);
    if (settings.stochastic)
        return job.residual ? encode<Affine, true, true>(job, settings, scratch)
                            : encode<Affine, true, false>(job, settings, scratch);
    return job.residual ? encode<Affine, false, true>(job, settings, scratch)
                        : encode<Affine, false, false>(job, settings, scratch);
}

TW_CLONES void decode_min_max(const DecodeJob& job, const MinMax& settings, Scratch& scratch) {
    if (settings.bagua)
        job.accumulate ? decode<Bagua, true>(job, settings, scratch) : decode<Bagua, false>(job, settings, scratch);
    else
        job.accumulate ? decode<Affine, true>(job, settings, scratch) : decode<Affine, false>(job, settings, scratch);
}

}  // namespace thinwire
