// Block quantisation: one float32 scale a block, then codes of 2 to 8 bits.
#include "codes.h"
#include "kernels.h"
#include "philox.h"
#include "rotate.h"
#include "uniform.h"

namespace thinwire {
namespace {

template <bool stochastic, bool has_residual>
TW_INLINE bool encode(const EncodeJob& job, const BlockQuant& settings, Scratch& scratch) {
    const std::size_t block = settings.block, num_blocks = (job.n + block - 1) / block;
    const std::size_t longest = std::min<std::size_t>(block, job.n);
    const float levels = levels_of(settings.bits);
    float* random = scratch.get<float>((stochastic ? uniforms_size(longest) : 0) + (longest + CODES_SLACK + 3) / 4);
    auto* codes = reinterpret_cast<std::uint8_t*>(random + (stochastic ? uniforms_size(longest) : 0));
    std::uint8_t* out = job.out + 4 * num_blocks;
    bool finite = true;
    for (std::size_t b = 0, begin = 0; b < num_blocks; b++, begin += block) {
        const std::size_t m = std::min<std::size_t>(block, job.n - begin), nbytes = packed_nbytes(settings.bits, m);
        std::int32_t peak = 0;
        form_q(job, begin, m, peak);
        const float scale = scale_of(std::bit_cast<float>(peak), levels);
        finite = finite && peak < INF_BITS;
        std::memcpy(job.out + 4 * b, &scale, 4);
        if (scale > 0.0f) {
            const float* u = stochastic ? uniforms(job, begin, m, random) : nullptr;
            f32* residual = has_residual ? job.residual + begin : nullptr;
            std::uint8_t* to = settings.bits == 8 ? out : codes;
            uniform_codes<stochastic, has_residual>(job.x + begin, residual, m, scale, levels, u, to);
            if (settings.bits < 8) pack_codes(settings.bits, codes, m, out);
        } else {
            std::memset(out, 0, nbytes);  // and the residual is q, as it stands
        }
        out += nbytes;
    }
    zero_padding(job, out - job.out);
    return finite;
}

// As `encode`, on rotated values. They lie beside the residual, whose values are not theirs.
template <bool stochastic>
TW_INLINE bool encode_rotated(const EncodeJob& job, const BlockQuant& settings, Scratch& scratch) {
    const std::size_t block = settings.block, num_blocks = (job.n + block - 1) / block;
    const std::size_t longest = std::min<std::size_t>(block, job.n);
    const std::size_t num_random = stochastic ? uniforms_size(longest) : 0;
    const float levels = levels_of(settings.bits);
    float* y = scratch.get<float>(longest + num_random + (longest + CODES_SLACK + 3) / 4);
    float* random = y + longest;
    auto* codes = reinterpret_cast<std::uint8_t*>(random + num_random);
    std::uint8_t* out = job.out + 4 * num_blocks;
    bool finite = true;
    for (std::size_t b = 0, begin = 0; b < num_blocks; b++, begin += block) {
        const std::size_t m = std::min<std::size_t>(block, job.n - begin), nbytes = packed_nbytes(settings.bits, m);
        std::int32_t peak = 0;
        rotate<false>(form_q(job, begin, m, peak), y, m, settings.rotation);
        const float scale = scale_of(std::bit_cast<float>(peak_magnitude(y, m)), levels);
        std::memcpy(job.out + 4 * b, &scale, 4);
        if (scale > 0.0f) {
            const float* u = stochastic ? uniforms(job, begin, m, random) : nullptr;
            uniform_codes<stochastic, false>(y, nullptr, m, scale, levels, u, codes);
            if (job.residual != nullptr) {
                uniform_values<false>(codes, y, m, settings.bits, scale, 1.0f);
                rotate<true>(y, y, m, settings.rotation);
                f32* residual = job.residual + begin;
                for (std::size_t i = 0; i < m; i++) residual[i] = residual[i] - y[i];
                peak = std::max(peak, peak_magnitude(residual, m));
            }
            if (settings.bits == 8)
                std::memcpy(out, codes, m);
            else
                pack_codes(settings.bits, codes, m, out);
        } else {
            std::memset(out, 0, nbytes);  // and the residual is q, as it stands
        }
        finite = finite && peak < INF_BITS;
        out += nbytes;
    }
    zero_padding(job, out - job.out);
    return finite;
}

template <bool accumulate> TW_INLINE void decode(const DecodeJob& job, const BlockQuant& settings, Scratch& scratch) {
    const std::size_t block = settings.block, num_blocks = (job.n + block - 1) / block;
    auto* codes = scratch.get<std::uint8_t>(std::min<std::size_t>(block, job.n) + CODES_SLACK);
    const std::uint8_t* packed = job.data + 4 * num_blocks;
    for (std::size_t b = 0, begin = 0; b < num_blocks; b++, begin += block) {
        const std::size_t m = std::min<std::size_t>(block, job.n - begin);
        float scale;
        std::memcpy(&scale, job.data + 4 * b, 4);
        if (settings.bits < 8) unpack_codes(settings.bits, packed, m, codes);
        const std::uint8_t* from = settings.bits == 8 ? packed : codes;
        uniform_values<accumulate>(from, job.out + begin, m, settings.bits, scale, job.alpha);
        packed += packed_nbytes(settings.bits, m);
    }
}

template <bool accumulate>
TW_INLINE void decode_rotated(const DecodeJob& job, const BlockQuant& settings, Scratch& scratch) {
    const std::size_t block = settings.block, num_blocks = (job.n + block - 1) / block;
    const std::size_t longest = std::min<std::size_t>(block, job.n);
    float* y = scratch.get<float>(longest + (longest + CODES_SLACK + 3) / 4);
    auto* codes = reinterpret_cast<std::uint8_t*>(y + longest);
    const std::uint8_t* packed = job.data + 4 * num_blocks;
    for (std::size_t b = 0, begin = 0; b < num_blocks; b++, begin += block) {
        const std::size_t m = std::min<std::size_t>(block, job.n - begin);
        float scale;
        std::memcpy(&scale, job.data + 4 * b, 4);
        if (settings.bits < 8) unpack_codes(settings.bits, packed, m, codes);
        uniform_values<false>(settings.bits == 8 ? packed : codes, y, m, settings.bits, scale, 1.0f);
        f32* out = job.out + begin;
        rotate<true>(y, y, m, settings.rotation);
        for (std::size_t i = 0; i < m; i++) deliver<accumulate>(out[i], y[i], job.alpha);
        packed += packed_nbytes(settings.bits, m);
    }
}

}  // namespace

// Functions of their own, so that those without rotation compile as if there were none.
TW_CLONES static bool encode_rotated_block_quant(const EncodeJob& job, const BlockQuant& settings, Scratch& scratch) {
    return settings.stochastic ? encode_rotated<true>(job, settings, scratch)
                               : encode_rotated<false>(job, settings, scratch);
}

TW_CLONES static void decode_rotated_block_quant(const DecodeJob& job, const BlockQuant& settings, Scratch& scratch) {
    job.accumulate ? decode_rotated<true>(job, settings, scratch) : decode_rotated<false>(job, settings, scratch);
}

TW_CLONES bool encode_block_quant(const EncodeJob& job, const BlockQuant& settings, Scratch& scratch) {
    if (settings.rotation) return encode_rotated_block_quant(job, settings, scratch);
    if (settings.stochastic)
        return job.residual ? encode<true, true>(job, settings, scratch) : encode<true, false>(job, settings, scratch);
    return job.residual ? encode<false, true>(job, settings, scratch) : encode<false, false>(job, settings, scratch);
}

TW_CLONES void decode_block_quant(const DecodeJob& job, const BlockQuant& settings, Scratch& scratch) {
    if (settings.rotation) return decode_rotated_block_quant(job, settings, scratch);
    job.accumulate ? decode<true>(job, settings, scratch) : decode<false>(job, settings, scratch);
}

}  // namespace thinwire
