// Ternary codes: values rounded by chance to -scale, 0 and +scale; five codes a byte. kernels/ternary.py says where.
// Scales stand before the codes, or ranks agreed on them and hand them in.
#include "codes.h"
#include "philox.h"
#include "shared.h"
#include "tree_sum.h"
#include "uniform.h"

namespace thinwire {
namespace {

constexpr std::size_t TILE = 1024;    // uniforms drawn at a time
constexpr std::size_t PER_BYTE = 5;   // padding needs PER_BYTE - 1 codes more: CODES_SLACK has room
constexpr std::uint8_t NUM_BYTES = 243;

struct Blocks {
    std::size_t width, count, longest;
};

TW_INLINE Blocks blocks_of(std::size_t n, std::size_t block) {
    const std::size_t width = block ? block : std::max<std::size_t>(n, 1);
    return {width, (n + width - 1) / width, std::min(width, n)};
}

TW_INLINE std::size_t codes_nbytes(std::size_t m) { return (m + PER_BYTE - 1) / PER_BYTE; }

TW_INLINE std::size_t scales_nbytes(const Blocks& blocks, const f32* shared) { return shared ? 0 : 4 * blocks.count; }

TW_INLINE bool is_scale(float shared) { return shared >= 0.0f && magnitude(shared) < INF_BITS; }

TW_INLINE float scale_or_none(float shared) { return is_scale(shared) ? shared : 0.0f; }

// max|q|, or less where it is clipped; 0 where q is not finite. `sums` has room for one number per chunk.
TW_INLINE float own_scale(const f32* q, std::size_t m, std::int32_t peak, double clip, double* sums) {
    if (peak >= INF_BITS) return 0.0f;
    const float largest = std::bit_cast<float>(peak);
    if (clip == 0.0) return largest;
    const double sigma = std::sqrt(sum_tree<true>(q, m, sums) / static_cast<double>(m));
    return std::min(largest, static_cast<float>(sigma * clip));
}

// `codes`, -1, 0 and 1 one a byte, has room for CODES_SLACK more, which are overwritten.
TW_INLINE void pack_ternary(std::uint8_t* codes, std::size_t m, std::uint8_t* __restrict out) {
    const std::size_t h = codes_nbytes(m);
    std::memset(codes + m, 0, PER_BYTE * h - m);
    for (std::size_t j = 0; j < h; j++) {
        std::uint8_t byte = 0;
#pragma GCC unroll 5
        for (std::size_t k = PER_BYTE; k-- > 0;) {
            const std::uint8_t code = codes[j + k * h];
            const auto digit = static_cast<std::uint8_t>((code & 1) + (code >> 7));  // -1 is 2
            byte = static_cast<std::uint8_t>(byte + byte + byte + digit);
        }
        out[j] = byte;
    }
}

// Values of digit k of m bytes, worth `place` each.
template <std::uint32_t place, bool accumulate>
TW_INLINE void digit_values(const std::uint8_t* __restrict packed, f32* __restrict out, std::size_t m, float scale,
                            float alpha) {
    constexpr std::uint32_t inverse = (65536 + place - 1) / place;  // exact for bytes
    for (std::size_t j = 0; j < m; j++) {
        const std::uint32_t above = packed[j] * inverse >> 16;
        const auto digit = static_cast<std::int32_t>(above - 3 * (above * 171 >> 9));
        const std::int32_t code = digit - 3 * (digit >> 1);
        deliver<accumulate>(out[j], static_cast<float>(code) * scale, alpha);
    }
}

template <bool accumulate>
TW_INLINE void ternary_values(const std::uint8_t* packed, f32* out, std::size_t m, float scale, float alpha) {
    const std::size_t h = codes_nbytes(m);
    const auto of_digit = [=](std::size_t k) __attribute__((always_inline)) {
        return std::min(h, m - std::min(m, k * h));
    };
    digit_values<1, accumulate>(packed, out, of_digit(0), scale, alpha);
    digit_values<3, accumulate>(packed, out + h, of_digit(1), scale, alpha);
    digit_values<9, accumulate>(packed, out + 2 * h, of_digit(2), scale, alpha);
    digit_values<27, accumulate>(packed, out + 3 * h, of_digit(3), scale, alpha);
    digit_values<81, accumulate>(packed, out + 4 * h, of_digit(4), scale, alpha);
}

template <bool has_residual>
TW_INLINE bool encode(const EncodeJob& job, const f32* shared, const Ternary& settings, Scratch& scratch) {
    const Blocks blocks = blocks_of(job.n, settings.block);
    const std::size_t num_sums = (blocks.longest + CHUNK - 1) / CHUNK, num_random = uniforms_size(TILE);
    double* sums = scratch.get<double>(num_sums + (num_random + 1) / 2 + (blocks.longest + CODES_SLACK + 7) / 8);
    float* random = reinterpret_cast<float*>(sums + num_sums);
    auto* codes = reinterpret_cast<std::uint8_t*>(random + num_random);
    std::uint8_t* out = job.out + scales_nbytes(blocks, shared);
    bool finite = true;
    for (std::size_t b = 0, begin = 0; b < blocks.count; b++, begin += blocks.width) {
        const std::size_t m = std::min<std::size_t>(blocks.width, job.n - begin);
        std::int32_t peak = 0;
        const f32* q = form_q(job, begin, m, peak);
        finite = finite && peak < INF_BITS && (!shared || is_scale(shared[b]));
        const float scale = shared ? scale_or_none(shared[b]) : own_scale(q, m, peak, settings.clip, sums);
        if (!shared) std::memcpy(job.out + 4 * b, &scale, 4);
        if (scale > 0.0f) {
            for (std::size_t t = 0; t < m; t += TILE) {
                const std::size_t now = std::min<std::size_t>(TILE, m - t), place = begin + t;
                fetch_ahead(job, place + blocks.width, now);
                const float* u = uniforms(job, place, now, random);
                f32* residual = has_residual ? job.residual + place : nullptr;
                uniform_codes<true, has_residual>(job.x + place, residual, now, scale, 1.0f, u, codes + t);
            }
            pack_ternary(codes, m, out);
        } else {
            std::memset(out, 0, codes_nbytes(m));  // and the residual is q, as it stands
        }
        out += codes_nbytes(m);
    }
    zero_padding(job, out - job.out);
    return finite;
}

template <bool accumulate> TW_INLINE void decode(const DecodeJob& job, const f32* shared, std::size_t block) {
    const Blocks blocks = blocks_of(job.n, block);
    const std::uint8_t* packed = job.data + scales_nbytes(blocks, shared);
    for (std::size_t b = 0, begin = 0; b < blocks.count; b++, begin += blocks.width) {
        const std::size_t m = std::min<std::size_t>(blocks.width, job.n - begin);
        float scale;
        if (shared)
            scale = scale_or_none(shared[b]);
        else
            std::memcpy(&scale, job.data + 4 * b, 4);
        ternary_values<accumulate>(packed, job.out + begin, m, scale, job.alpha);
        packed += codes_nbytes(m);
    }
}

}  // namespace

TW_CLONES bool encode_ternary(const EncodeJob& job, const f32* shared, const Ternary& settings, Scratch& scratch) {
    return job.residual ? encode<true>(job, shared, settings, scratch) : encode<false>(job, shared, settings, scratch);
}

TW_CLONES BadByte check_ternary(const DecodeJob& job, const f32* shared, std::size_t block) {
    const Blocks blocks = blocks_of(job.n, block);
    const std::uint8_t* codes = job.data + scales_nbytes(blocks, shared);
    const std::size_t full = job.n / blocks.width, left = job.n % blocks.width;
    const std::size_t nbytes = full * codes_nbytes(blocks.width) + codes_nbytes(left);
    std::uint8_t largest = 0;
    for (std::size_t i = 0; i < nbytes; i++) largest = std::max(largest, codes[i]);
    if (largest < NUM_BYTES) return {};
    const std::uint8_t* bad = std::find_if(codes, codes + nbytes, [](std::uint8_t byte) { return byte >= NUM_BYTES; });
    return {true, static_cast<std::size_t>(bad - codes), *bad};
}

TW_CLONES void decode_ternary(const DecodeJob& job, const f32* shared, std::size_t block) {
    job.accumulate ? decode<true>(job, shared, block) : decode<false>(job, shared, block);
}

}  // namespace thinwire
