// Block casts: one float32 scale a block, then floats of 8 or 4 bits, rounded to nearest even.
#include "codes.h"
#include "kernels.h"
#include "uniform.h"

namespace thinwire {
namespace {

constexpr std::uint32_t power_of_two(int exponent) { return static_cast<std::uint32_t>(exponent + 127) << 23; }

// A sign bit, an exponent and `mantissa` bits; magnitudes above `top` are infinity or nan. float_formats.py says more.
template <int bits_, int mantissa, int bias, std::uint32_t top> struct Format {
    static constexpr int bits = bits_;
    static constexpr int dropped = 23 - mantissa;
    static constexpr std::uint32_t sign = 1u << (bits - 1);
    static constexpr std::uint32_t rebias = static_cast<std::uint32_t>(127 - bias) << 23;
    static constexpr std::uint32_t lowest_normal = power_of_two(1 - bias);
    // A float32 that counts in units of the lowest level: adding it rounds there.
    static constexpr std::uint32_t shift = power_of_two(1 - bias - mantissa + 23);
    static constexpr float largest = std::bit_cast<float>((top << dropped) + rebias);
    static constexpr std::uint32_t infinity = INF_BITS;

    // The code nearest to y, and its value in `rounded`.
    [[gnu::always_inline]] static inline std::uint32_t narrow(float y, float& rounded) {
        const std::uint32_t word = std::bit_cast<std::uint32_t>(y), magnitude = word & 0x7FFFFFFF;
        const float shifted = std::bit_cast<float>(magnitude) + std::bit_cast<float>(shift);
        const std::uint32_t small = std::bit_cast<std::uint32_t>(shifted) - shift;
        const std::uint32_t small_value = std::bit_cast<std::uint32_t>(shifted - std::bit_cast<float>(shift));
        const std::uint32_t carried = magnitude + ((1u << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1);
        const bool is_small = magnitude < lowest_normal;
        const std::uint32_t code = is_small ? small : (carried - rebias) >> dropped;
        const std::uint32_t value = is_small ? small_value : carried & ~((1u << dropped) - 1);
        rounded = std::bit_cast<float>(value | (word & 0x80000000));
        return code | (word >> 31) * sign;
    }

    [[gnu::always_inline]] static inline float widen(std::uint32_t code) {
        const std::uint32_t magnitude = code & (sign - 1), shifted = magnitude << dropped;
        const float small = std::bit_cast<float>(shifted + lowest_normal) - std::bit_cast<float>(lowest_normal);
        std::uint32_t word = magnitude < (1u << mantissa) ? std::bit_cast<std::uint32_t>(small) : shifted + rebias;
        word = magnitude > top ? shifted | infinity : word;
        return std::bit_cast<float>(word | (code & sign) << (32 - bits));
    }
};

using E4M3 = Format<8, 3, 7, 0x7E>;
using E5M2 = Format<8, 2, 15, 0x7B>;
using E3M0 = Format<4, 0, 7, 0x7>;

template <typename To, bool has_residual>
TW_INLINE void narrow_block(const f32* __restrict x, f32* __restrict residual, std::size_t m, float scale,
                            std::uint8_t* __restrict out) {
    for (std::size_t i = 0; i < m; i++) {
        const float q = has_residual ? residual[i] : x[i];
        float rounded;
        out[i] = static_cast<std::uint8_t>(To::narrow(q / scale, rounded));
        if constexpr (has_residual) residual[i] = q - rounded * scale;
    }
}

template <typename From, bool accumulate>
TW_INLINE void widen_block(const std::uint8_t* __restrict codes, f32* __restrict out, std::size_t m, float scale,
                           float alpha) {
    for (std::size_t i = 0; i < m; i++) deliver<accumulate>(out[i], From::widen(codes[i]) * scale, alpha);
}

template <typename To, bool has_residual>
TW_INLINE bool encode(const EncodeJob& job, std::size_t block, Scratch& scratch) {
    const std::size_t n = job.n, num_blocks = (n + block - 1) / block;
    auto* codes = scratch.get<std::uint8_t>(std::min<std::size_t>(block, n) + CODES_SLACK);
    std::uint8_t* out = job.out + 4 * num_blocks;
    bool finite = true;
    for (std::size_t b = 0, begin = 0; b < num_blocks; b++, begin += block) {
        const std::size_t m = std::min<std::size_t>(block, n - begin), nbytes = packed_nbytes(To::bits, m);
        std::int32_t peak = 0;
        form_q(job, begin, m, peak);
        const float scale = scale_of(std::bit_cast<float>(peak), To::largest);
        finite = finite && peak < INF_BITS;
        std::memcpy(job.out + 4 * b, &scale, 4);
        if (scale > 0.0f) {
            f32* residual = has_residual ? job.residual + begin : nullptr;
            narrow_block<To, has_residual>(job.x + begin, residual, m, scale, To::bits == 8 ? out : codes);
            if constexpr (To::bits < 8) pack_codes(To::bits, codes, m, out);
        } else {
            std::memset(out, 0, nbytes);  // and the residual is q, as it stands
        }
        out += nbytes;
    }
    zero_padding(job, out - job.out);
    return finite;
}

template <typename From, bool accumulate>
TW_INLINE void decode(const DecodeJob& job, std::size_t block, Scratch& scratch) {
    const std::size_t n = job.n, num_blocks = (n + block - 1) / block;
    auto* codes = scratch.get<std::uint8_t>(std::min<std::size_t>(block, n) + CODES_SLACK);
    const std::uint8_t* packed = job.data + 4 * num_blocks;
    for (std::size_t b = 0, begin = 0; b < num_blocks; b++, begin += block) {
        const std::size_t m = std::min<std::size_t>(block, n - begin);
        float scale;
        std::memcpy(&scale, job.data + 4 * b, 4);
        if constexpr (From::bits < 8) unpack_codes(From::bits, packed, m, codes);
        widen_block<From, accumulate>(From::bits == 8 ? packed : codes, job.out + begin, m, scale, job.alpha);
        packed += packed_nbytes(From::bits, m);
    }
}

template <typename To> TW_INLINE bool encode_as(const EncodeJob& job, std::size_t block, Scratch& scratch) {
    return job.residual ? encode<To, true>(job, block, scratch) : encode<To, false>(job, block, scratch);
}

template <typename From> TW_INLINE void decode_as(const DecodeJob& job, std::size_t block, Scratch& scratch) {
    job.accumulate ? decode<From, true>(job, block, scratch) : decode<From, false>(job, block, scratch);
}

}  // namespace

TW_CLONES bool encode_block_cast(const EncodeJob& job, const BlockCast& settings, Scratch& scratch) {
    switch (settings.format) {
        case FloatFormat::e4m3: return encode_as<E4M3>(job, settings.block, scratch);
        case FloatFormat::e5m2: return encode_as<E5M2>(job, settings.block, scratch);
        default: return encode_as<E3M0>(job, settings.block, scratch);
    }
}

TW_CLONES void decode_block_cast(const DecodeJob& job, const BlockCast& settings, Scratch& scratch) {
    switch (settings.format) {
        case FloatFormat::e4m3: return decode_as<E4M3>(job, settings.block, scratch);
        case FloatFormat::e5m2: return decode_as<E5M2>(job, settings.block, scratch);
        default: return decode_as<E3M0>(job, settings.block, scratch);
    }
}

}  // namespace thinwire
