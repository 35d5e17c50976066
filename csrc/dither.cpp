// Dithering: values rounded by chance to levels of one scale a block, evenly spaced ones or powers of two.
#include "codes.h"
#include "kernels.h"
#include "natural.h"
#include "philox.h"
#include "tree_sum.h"
#include "uniform.h"

namespace thinwire {
namespace {

constexpr std::size_t TILE = 1024;  // uniforms drawn at a time

TW_INLINE std::size_t block_of(const Dither& settings, std::size_t n) {
    return settings.block ? settings.block : std::max<std::size_t>(n, 1);
}

template <bool natural, bool has_residual>
TW_INLINE bool encode(const EncodeJob& job, const Dither& settings, Scratch& scratch) {
    const std::size_t n = job.n, block = block_of(settings, n), num_blocks = (n + block - 1) / block;
    const std::size_t longest = std::min<std::size_t>(block, n), num_sums = (longest + CHUNK - 1) / CHUNK;
    const std::size_t num_random = uniforms_size(TILE);
    double* sums = scratch.get<double>(num_sums + (num_random + 1) / 2 + (longest + CODES_SLACK + 7) / 8);
    float* random = reinterpret_cast<float*>(sums + num_sums);
    auto* codes = reinterpret_cast<std::uint8_t*>(random + num_random);
    const auto levels = static_cast<std::uint32_t>((1 << (settings.bits - 1)) - 1);
    std::uint8_t* out = job.out + 4 * num_blocks;
    bool finite = true;
    for (std::size_t b = 0, begin = 0; b < num_blocks; b++, begin += block) {
        const std::size_t m = std::min<std::size_t>(block, n - begin), nbytes = packed_nbytes(settings.bits, m);
        std::int32_t peak = 0;
        const f32* q = form_q(job, begin, m, peak);
        finite = finite && peak < INF_BITS;
        float scale = peak < INF_BITS ? std::bit_cast<float>(peak) : 0.0f;
        if (settings.l2 && scale > 0.0f)
            scale = std::min(static_cast<float>(std::sqrt(sum_tree<true>(q, m, sums))),
                             std::numeric_limits<float>::max());
        if constexpr (!natural) scale = scale_of(scale, static_cast<float>(levels));
        std::memcpy(job.out + 4 * b, &scale, 4);
        if (scale > 0.0f) {
            std::uint8_t* to = settings.bits == 8 ? out : codes;
            for (std::size_t t = 0; t < m; t += TILE) {
                const std::size_t now = std::min<std::size_t>(TILE, m - t), place = begin + t;
                fetch_ahead(job, place + block, now);
                const float* u = uniforms(job, place, now, random);
                f32* residual = has_residual ? job.residual + place : nullptr;
                if constexpr (natural)
                    natural_codes<has_residual>(job.x + place, residual, now, scale, levels, levels + 1, u, to + t);
                else
                    uniform_codes<true, has_residual>(job.x + place, residual, now, scale,
                                                      static_cast<float>(levels), u, to + t);
            }
            if (settings.bits < 8) pack_codes(settings.bits, codes, m, out);
        } else {
            std::memset(out, 0, nbytes);  // and the residual is q, as it stands
        }
        out += nbytes;
    }
    zero_padding(job, out - job.out);
    return finite;
}

template <bool natural, bool accumulate>
TW_INLINE void decode(const DecodeJob& job, const Dither& settings, Scratch& scratch) {
    const std::size_t n = job.n, block = block_of(settings, n), num_blocks = (n + block - 1) / block;
    auto* codes = scratch.get<std::uint8_t>(std::min<std::size_t>(block, n) + CODES_SLACK);
    const auto levels = static_cast<std::uint32_t>((1 << (settings.bits - 1)) - 1);
    const std::uint8_t* packed = job.data + 4 * num_blocks;
    for (std::size_t b = 0, begin = 0; b < num_blocks; b++, begin += block) {
        const std::size_t m = std::min<std::size_t>(block, n - begin);
        float scale;
        std::memcpy(&scale, job.data + 4 * b, 4);
        if (settings.bits < 8) unpack_codes(settings.bits, packed, m, codes);
        const std::uint8_t* from = settings.bits == 8 ? packed : codes;
        if constexpr (natural)
            natural_values<accumulate>(from, job.out + begin, m, levels, levels + 1, scale, job.alpha);
        else
            uniform_values<accumulate>(from, job.out + begin, m, settings.bits, scale, job.alpha);
        packed += packed_nbytes(settings.bits, m);
    }
}

}  // namespace

TW_CLONES bool encode_dither(const EncodeJob& job, const Dither& settings, Scratch& scratch) {
    if (settings.natural)
        return job.residual ? encode<true, true>(job, settings, scratch) : encode<true, false>(job, settings, scratch);
    return job.residual ? encode<false, true>(job, settings, scratch) : encode<false, false>(job, settings, scratch);
}

TW_CLONES void decode_dither(const DecodeJob& job, const Dither& settings, Scratch& scratch) {
    if (settings.natural)
        job.accumulate ? decode<true, true>(job, settings, scratch) : decode<true, false>(job, settings, scratch);
    else
        job.accumulate ? decode<false, true>(job, settings, scratch) : decode<false, false>(job, settings, scratch);
}

}  // namespace thinwire
