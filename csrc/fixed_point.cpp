// Fixed-point codes: one float16 scale a block, then codes that count fractions of it.
#include "codes.h"
#include "elements.h"
#include "half.h"
#include "kernels.h"
#include "uniform.h"

namespace thinwire {
namespace {

// Codes of m elements, one a byte; `residual` holds q and is left as q - value.
template <bool has_residual>
TW_INLINE void fixed_codes(const f32* __restrict x, f32* __restrict residual, std::size_t m, float scale, float half,
                           std::uint8_t* __restrict out) {
    const float divisor = scale + 1e-6f, inverse = 1.0f / half;  // of a power of two: exact
    for (std::size_t i = 0; i < m; i++) {
        const float q = has_residual ? residual[i] : x[i];
        float y = q / divisor * half;
        y = y < half - 1.0f ? y : half - 1.0f;
        y = y > -half ? y : -half;
        const float code = (y + SHIFT) - SHIFT;
        out[i] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>((code + half) + SHIFT));
        if constexpr (has_residual) residual[i] = q - code * inverse * scale;
    }
}

template <bool accumulate>
TW_INLINE void fixed_values(const std::uint8_t* __restrict codes, f32* __restrict out, std::size_t m, float scale,
                            float half, float alpha) {
    const float inverse = 1.0f / half;
    for (std::size_t i = 0; i < m; i++)
        deliver<accumulate>(out[i], (static_cast<float>(codes[i]) - half) * inverse * scale, alpha);
}

TW_INLINE std::size_t block_of(const FixedPoint& settings, std::size_t n) {
    return settings.block ? settings.block : std::max<std::size_t>(n, 1);
}

TW_INLINE float half_of(const FixedPoint& settings) { return static_cast<float>(1 << (settings.bits - 1)); }

template <bool has_residual>
TW_INLINE bool encode(const EncodeJob& job, const FixedPoint& settings, Scratch& scratch) {
    const std::size_t n = job.n, block = block_of(settings, n), num_blocks = (n + block - 1) / block;
    auto* codes = scratch.get<std::uint8_t>(std::min<std::size_t>(block, n) + CODES_SLACK);
    std::uint8_t* out = job.out + 2 * num_blocks;
    bool finite = true;
    for (std::size_t b = 0, begin = 0; b < num_blocks; b++, begin += block) {
        const std::size_t m = std::min<std::size_t>(block, n - begin);
        std::int32_t peak = 0;
        form_q(job, begin, m, peak);
        const std::uint16_t narrow = float_to_half(std::bit_cast<float>(peak));
        std::memcpy(job.out + 2 * b, &narrow, 2);
        finite = finite && narrow < 0x7C00;
        std::uint8_t* to = settings.bits == 8 ? out : codes;
        f32* residual = has_residual ? job.residual + begin : nullptr;
        fixed_codes<has_residual>(job.x + begin, residual, m, half_to_float(narrow), half_of(settings), to);
        if (settings.bits < 8) pack_codes(settings.bits, codes, m, out);
        out += packed_nbytes(settings.bits, m);
    }
    zero_padding(job, out - job.out);
    return finite;
}

template <bool accumulate>
TW_INLINE void decode(const DecodeJob& job, const FixedPoint& settings, Scratch& scratch) {
    const std::size_t n = job.n, block = block_of(settings, n), num_blocks = (n + block - 1) / block;
    auto* codes = scratch.get<std::uint8_t>(std::min<std::size_t>(block, n) + CODES_SLACK);
    const std::uint8_t* packed = job.data + 2 * num_blocks;
    for (std::size_t b = 0, begin = 0; b < num_blocks; b++, begin += block) {
        const std::size_t m = std::min<std::size_t>(block, n - begin);
        std::uint16_t narrow;
        std::memcpy(&narrow, job.data + 2 * b, 2);
        if (settings.bits < 8) unpack_codes(settings.bits, packed, m, codes);
        const std::uint8_t* from = settings.bits == 8 ? packed : codes;
        fixed_values<accumulate>(from, job.out + begin, m, half_to_float(narrow), half_of(settings), job.alpha);
        packed += packed_nbytes(settings.bits, m);
    }
}

}  // namespace

TW_CLONES bool encode_fixed_point(const EncodeJob& job, const FixedPoint& settings, Scratch& scratch) {
    return job.residual ? encode<true>(job, settings, scratch) : encode<false>(job, settings, scratch);
}

TW_CLONES void decode_fixed_point(const DecodeJob& job, const FixedPoint& settings, Scratch& scratch) {
    job.accumulate ? decode<true>(job, settings, scratch) : decode<false>(job, settings, scratch);
}

}  // namespace thinwire
