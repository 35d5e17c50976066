// Block quantisation: one float32 scale a block, then int8 codes or planar nibbles.
#include <limits>

#include "elements.h"
#include "kernels.h"
#include "philox.h"

namespace thinwire {
namespace {

// 1.5 * 2**23: adding it rounds to an integer, ties to even, and leaves that integer in the low bits.
constexpr float SHIFT = 12582912.0f;

constexpr float levels_of(int bits) { return static_cast<float>((1 << (bits - 1)) - 1); }

// The largest scale with levels * scale still finite: `max_scale` of reference.py.
TW_INLINE float max_scale(float levels) {
    float scale = std::numeric_limits<float>::max() / levels;
    while (magnitude(scale * levels) >= INF_BITS) scale = std::bit_cast<float>(std::bit_cast<std::int32_t>(scale) - 1);
    return scale;
}

// The scale of a block whose largest magnitude is `peak`: up one ulp where levels * scale falls short, then clamped.
TW_INLINE float scale_of(std::int32_t peak, float levels) {
    if (peak >= INF_BITS) return 0.0f;  // flagged: its bytes are unspecified
    const float largest = std::bit_cast<float>(peak);
    float scale = largest / levels;
    if (scale * levels < largest) scale = std::bit_cast<float>(std::bit_cast<std::int32_t>(scale) + 1);
    return std::min(scale, max_scale(levels));
}

// SHIFT + code of q. |q / scale| is at most levels and a few ulps, so that SHIFT rounds it rightly.
template <bool stochastic> TW_INLINE float shifted_code(float q, float scale, float levels, float u) {
    float y = q / scale;
    if constexpr (stochastic) {
        y = y + u;
        const float nearest = (y + SHIFT) - SHIFT;
        y = nearest > y ? nearest - 1.0f : nearest;  // floor
    }
    y = y > levels ? levels : y;
    y = y < -levels ? -levels : y;
    return y + SHIFT;
}

// Codes of m elements, one a byte; `residual` holds q and is left as q - code * scale. The code is taken back from its
// integer, so a code of 0 is +0 and leaves q as it is.
template <bool stochastic, bool has_residual>
TW_INLINE void encode_bytes(const f32* __restrict x, f32* __restrict residual, std::size_t m, float scale,
                            const float* __restrict u, std::uint8_t* __restrict out) {
    constexpr float levels = levels_of(8);
    for (std::size_t i = 0; i < m; i++) {
        const float q = has_residual ? residual[i] : x[i];
        const float code = shifted_code<stochastic>(q, scale, levels, stochastic ? u[i] : 0.0f);
        out[i] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(code));
        if constexpr (has_residual) residual[i] = q - (code - SHIFT) * scale;
    }
}

// Byte j = code[j] | code[j + half] << 4 where half = ceil(m / 2); the last high nibble of an odd block is 0.
template <bool stochastic, bool has_residual>
TW_INLINE void encode_nibbles(const f32* x, f32* residual, std::size_t m, float scale, const float* u,
                              std::uint8_t* __restrict out) {
    constexpr float levels = levels_of(4);
    const std::size_t half = (m + 1) / 2;
    const f32* __restrict low_x = x;
    const f32* __restrict high_x = x + half;
    f32* __restrict low_r = residual;
    f32* __restrict high_r = has_residual ? residual + half : nullptr;
    const float* __restrict low_u = u;
    const float* __restrict high_u = stochastic ? u + half : nullptr;
    for (std::size_t j = 0; j < m - half; j++) {
        const float low_q = has_residual ? low_r[j] : low_x[j], high_q = has_residual ? high_r[j] : high_x[j];
        const float low = shifted_code<stochastic>(low_q, scale, levels, stochastic ? low_u[j] : 0.0f);
        const float high = shifted_code<stochastic>(high_q, scale, levels, stochastic ? high_u[j] : 0.0f);
        out[j] = static_cast<std::uint8_t>((std::bit_cast<std::uint32_t>(low) & 15) |
                                           (std::bit_cast<std::uint32_t>(high) << 4));
        if constexpr (has_residual) {
            low_r[j] = low_q - (low - SHIFT) * scale;
            high_r[j] = high_q - (high - SHIFT) * scale;
        }
    }
    if (m % 2) {
        const float q = has_residual ? residual[half - 1] : x[half - 1];
        const float code = shifted_code<stochastic>(q, scale, levels, stochastic ? u[half - 1] : 0.0f);
        out[half - 1] = std::bit_cast<std::uint32_t>(code) & 15;
        if constexpr (has_residual) residual[half - 1] = q - (code - SHIFT) * scale;
    }
}

constexpr std::size_t code_nbytes(int bits, std::size_t m) { return bits == 8 ? m : (m + 1) / 2; }

template <int bits, bool stochastic, bool has_residual>
TW_INLINE bool encode(const EncodeJob& job, std::size_t block, Scratch& scratch) {
    const std::size_t num_blocks = (job.n + block - 1) / block;
    float* buffer = stochastic ? scratch.get<float>(uniforms_size(std::min<std::size_t>(block, job.n))) : nullptr;
    std::uint8_t* out = job.out + 4 * num_blocks;
    bool finite = true;
    for (std::size_t b = 0, begin = 0; b < num_blocks; b++, begin += block) {
        const std::size_t m = std::min<std::size_t>(block, job.n - begin);
        std::int32_t peak = 0;
        form_q(job, begin, m, peak);
        const float scale = scale_of(peak, levels_of(bits));
        finite = finite && peak < INF_BITS;
        std::memcpy(job.out + 4 * b, &scale, 4);
        if (scale > 0.0f) {
            const float* u = stochastic ? uniforms(job, begin, m, buffer) : nullptr;
            f32* residual = has_residual ? job.residual + begin : nullptr;
            if constexpr (bits == 8)
                encode_bytes<stochastic, has_residual>(job.x + begin, residual, m, scale, u, out);
            else
                encode_nibbles<stochastic, has_residual>(job.x + begin, residual, m, scale, u, out);
        } else {
            std::memset(out, 0, code_nbytes(bits, m));  // and the residual is q, as it stands
        }
        out += code_nbytes(bits, m);
    }
    zero_padding(job, out - job.out);
    return finite;
}

template <bool accumulate>
TW_INLINE void decode_bytes(const std::uint8_t* __restrict codes, f32* __restrict out, std::size_t m, float scale,
                            float alpha) {
    for (std::size_t i = 0; i < m; i++)
        deliver<accumulate>(out[i], static_cast<float>(static_cast<std::int8_t>(codes[i])) * scale, alpha);
}

template <bool accumulate>
TW_INLINE void decode_nibbles(const std::uint8_t* __restrict codes, f32* out, std::size_t m, float scale, float alpha) {
    const std::size_t half = (m + 1) / 2;
    f32* __restrict low = out;
    f32* __restrict high = out + half;
    for (std::size_t j = 0; j < m - half; j++) {
        const int low_code = ((codes[j] & 15) ^ 8) - 8, high_code = ((codes[j] >> 4) ^ 8) - 8;
        deliver<accumulate>(low[j], static_cast<float>(low_code) * scale, alpha);
        deliver<accumulate>(high[j], static_cast<float>(high_code) * scale, alpha);
    }
    if (m % 2) {
        const int code = ((codes[half - 1] & 15) ^ 8) - 8;
        deliver<accumulate>(out[half - 1], static_cast<float>(code) * scale, alpha);
    }
}

template <int bits, bool accumulate> TW_INLINE void decode(const DecodeJob& job, std::size_t block) {
    const std::size_t num_blocks = (job.n + block - 1) / block;
    const std::uint8_t* codes = job.data + 4 * num_blocks;
    for (std::size_t b = 0, begin = 0; b < num_blocks; b++, begin += block) {
        const std::size_t m = std::min<std::size_t>(block, job.n - begin);
        float scale;
        std::memcpy(&scale, job.data + 4 * b, 4);
        if constexpr (bits == 8)
            decode_bytes<accumulate>(codes, job.out + begin, m, scale, job.alpha);
        else
            decode_nibbles<accumulate>(codes, job.out + begin, m, scale, job.alpha);
        codes += code_nbytes(bits, m);
    }
}

template <int bits> TW_INLINE bool encode_bits(const EncodeJob& job, const BlockQuant& settings, Scratch& scratch) {
    if (settings.stochastic)
        return job.residual ? encode<bits, true, true>(job, settings.block, scratch)
                            : encode<bits, true, false>(job, settings.block, scratch);
    return job.residual ? encode<bits, false, true>(job, settings.block, scratch)
                        : encode<bits, false, false>(job, settings.block, scratch);
}

}  // namespace

TW_CLONES bool encode_block_quant(const EncodeJob& job, const BlockQuant& settings, Scratch& scratch) {
    return settings.bits == 8 ? encode_bits<8>(job, settings, scratch) : encode_bits<4>(job, settings, scratch);
}

TW_CLONES void decode_block_quant(const DecodeJob& job, const BlockQuant& settings) {
    if (settings.bits == 8)
        job.accumulate ? decode<8, true>(job, settings.block) : decode<8, false>(job, settings.block);
    else
        job.accumulate ? decode<4, true>(job, settings.block) : decode<4, false>(job, settings.block);
}

}  // namespace thinwire
