// Natural compression: values rounded by chance to powers of two; a sign and an exponent travel.
#include "codes.h"
#include "elements.h"
#include "kernels.h"
#include "philox.h"

namespace thinwire {
namespace {

constexpr std::size_t TILE = 1024;  // uniforms drawn at a time

// Code c stands for 2^(c + OFFSET - 127): its exponent field is c + OFFSET.
template <int bits> constexpr std::uint32_t OFFSET = bits == 8 ? 18 : 0;
template <int bits> constexpr std::int32_t LARGEST = (bits == 8 ? 127 + 18 : 254) << 23;

template <int bits> TW_INLINE float value_of(std::uint32_t code, std::uint32_t sign) {
    const std::uint32_t level = code ? (code + OFFSET<bits>) << 23 : 0;
    return std::bit_cast<float>(level | sign << 31);
}

// Codes of m elements; of 9 bits the sign goes to `signs`. Returns the largest magnitude of q: where it is above LARGEST,
// codes are rubbish. Integers instead of conditions, which compilers make slow.
template <int bits, bool has_residual>
TW_INLINE std::int32_t natural_codes(const f32* __restrict x, f32* __restrict residual, float residual_scale,
                                     std::size_t m, const float* __restrict u, std::uint8_t* __restrict out,
                                     std::uint8_t* __restrict signs) {
    constexpr std::int32_t smallest = (1 + OFFSET<bits>) << 23;
    constexpr float smallest_inverse = std::bit_cast<float>((253 - OFFSET<bits>) << 23);
    std::int32_t peak = 0;
    for (std::size_t i = 0; i < m; i++) {
        const float q = has_residual ? x[i] + residual[i] * residual_scale : x[i];
        const std::int32_t size = magnitude(q);
        peak = std::max(peak, size);
        // A random fraction added to the bits of a float carries into its exponent with the probability of its mantissa.
        const auto fraction = static_cast<std::uint32_t>(static_cast<std::int32_t>(u[i] * 0x1p23f));
        std::uint32_t code = ((static_cast<std::uint32_t>(size) + fraction) >> 23) - OFFSET<bits>;
        if constexpr (OFFSET<bits> > 0) {  // else the carry is right below the smallest level, too: denormals
            const float y = std::bit_cast<float>(size) * smallest_inverse + u[i];
            const std::uint32_t low = (0x3F7FFFFF - std::bit_cast<std::uint32_t>(y)) >> 31;  // 1 where y >= 1
            code = size < smallest ? low : code;
        }
        const std::uint32_t sign = (std::bit_cast<std::uint32_t>(q) & (0 - code)) >> 31;  // 0 where the code is 0
        if constexpr (bits == 8) {
            out[i] = static_cast<std::uint8_t>(code | sign << 7);
        } else {
            out[i] = static_cast<std::uint8_t>(code);
            signs[i] = static_cast<std::uint8_t>(sign);
        }
        if constexpr (has_residual) residual[i] = q - value_of<bits>(code, sign);
    }
    return peak;
}

template <int bits, bool has_residual> TW_INLINE bool encode(const EncodeJob& job, Scratch& scratch) {
    const std::size_t n = job.n, num_random = uniforms_size(TILE);
    float* random = scratch.get<float>(num_random + (n + CODES_SLACK + 3) / 4);
    auto* signs = reinterpret_cast<std::uint8_t*>(random + num_random);
    std::int32_t peak = 0;
    for (std::size_t begin = 0; begin < n; begin += TILE) {
        const std::size_t m = std::min<std::size_t>(TILE, n - begin);
        const float* u = uniforms(job, begin, m, random);
        f32* residual = has_residual ? job.residual + begin : nullptr;
        peak = std::max(peak, natural_codes<bits, has_residual>(job.x + begin, residual, job.residual_scale, m, u,
                                                                job.out + begin, signs + begin));
    }
    if constexpr (bits == 9) pack_codes(1, signs, n, job.out + n);
    zero_padding(job, bits == 8 ? n : n + packed_nbytes(1, n));
    return peak <= LARGEST<bits>;
}

template <int bits, bool accumulate> TW_INLINE void decode(const DecodeJob& job, Scratch& scratch) {
    const std::size_t n = job.n;
    const std::uint8_t* __restrict data = job.data;
    std::uint8_t* __restrict signs = nullptr;
    if constexpr (bits == 9) {
        signs = scratch.get<std::uint8_t>(n + CODES_SLACK);
        unpack_codes(1, data + n, n, signs);
    }
    f32* __restrict out = job.out;
    const float alpha = job.alpha;
    for (std::size_t i = 0; i < n; i++) {
        const std::uint32_t code = data[i];
        const float value = bits == 8 ? value_of<bits>(code & 127, code >> 7) : value_of<bits>(code, signs[i]);
        deliver<accumulate>(out[i], value, alpha);
    }
}

}  // namespace

TW_CLONES bool encode_natural(const EncodeJob& job, int bits, Scratch& scratch) {
    if (bits == 8) return job.residual ? encode<8, true>(job, scratch) : encode<8, false>(job, scratch);
    return job.residual ? encode<9, true>(job, scratch) : encode<9, false>(job, scratch);
}

TW_CLONES void decode_natural(const DecodeJob& job, int bits, Scratch& scratch) {
    if (bits == 8)
        job.accumulate ? decode<8, true>(job, scratch) : decode<8, false>(job, scratch);
    else
        job.accumulate ? decode<9, true>(job, scratch) : decode<9, false>(job, scratch);
}

}  // namespace thinwire
