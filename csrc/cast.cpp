// Casts: n values of float32, float16 or bfloat16, rounded to nearest even; and the test for finite values.
#include "elements.h"
#include "half.h"
#include "kernels.h"

namespace thinwire {
namespace {

struct Half {
    TW_INLINE std::uint16_t narrow(float value) { return float_to_half(value); }
    TW_INLINE float widen(std::uint16_t bits) { return half_to_float(bits); }
};

struct Bfloat {
    TW_INLINE std::uint16_t narrow(float value) { return float_to_bfloat(value); }
    TW_INLINE float widen(std::uint16_t bits) { return bfloat_to_float(bits); }
};

// The residual of a cast to float32: 0 everywhere.
TW_INLINE bool encode_float32(const EncodeJob& job) {
    std::int32_t peak = 0;
    const f32* q = form_q(job, 0, job.n, peak);
    if (job.n) std::memcpy(job.out, q, 4 * job.n);
    if (job.n && job.residual) std::memset(job.residual, 0, 4 * job.n);
    zero_padding(job, 4 * job.n);
    return peak < INF_BITS;
}

template <typename Type, bool has_residual> TW_INLINE bool encode_narrow(const EncodeJob& job) {
    const f32* __restrict x = job.x;
    f32* __restrict residual = job.residual;
    u16* __restrict out = reinterpret_cast<u16*>(job.out);
    const std::size_t n = job.n;  // in locals: stores through f32 might change `job`, as far as the compiler knows
    const float scale = job.residual_scale;
    std::int32_t peak = 0;
    for (std::size_t i = 0; i < n; i++) {
        const float q = has_residual ? x[i] + residual[i] * scale : x[i];
        const std::uint16_t bits = Type::narrow(q);
        const float decoded = Type::widen(bits);
        out[i] = bits;
        if constexpr (has_residual) residual[i] = q - decoded;
        // A bfloat16 made of a NaN may be finite: look at both.
        peak = std::max(peak, std::max(magnitude(q), magnitude(decoded)));
    }
    zero_padding(job, 2 * n);
    return peak < INF_BITS;
}

template <bool accumulate> TW_INLINE void decode_float32(const DecodeJob& job) {
    const f32* __restrict data = reinterpret_cast<const f32*>(job.data);
    f32* __restrict out = job.out;
    const std::size_t n = job.n;
    const float alpha = job.alpha;
    for (std::size_t i = 0; i < n; i++) deliver<accumulate>(out[i], data[i], alpha);
}

template <typename Type, bool accumulate> TW_INLINE void decode_narrow(const DecodeJob& job) {
    const u16* __restrict data = reinterpret_cast<const u16*>(job.data);
    f32* __restrict out = job.out;
    const std::size_t n = job.n;
    const float alpha = job.alpha;
    for (std::size_t i = 0; i < n; i++) deliver<accumulate>(out[i], Type::widen(data[i]), alpha);
}

}  // namespace

TW_CLONES bool all_finite(const f32* x, std::size_t n) { return peak_magnitude(x, n) < INF_BITS; }

TW_CLONES bool encode_cast(const EncodeJob& job, Number number) {
    if (number == Number::float32) return encode_float32(job);
    if (number == Number::float16)
        return job.residual ? encode_narrow<Half, true>(job) : encode_narrow<Half, false>(job);
    return job.residual ? encode_narrow<Bfloat, true>(job) : encode_narrow<Bfloat, false>(job);
}

TW_CLONES void decode_cast(const DecodeJob& job, Number number) {
    if (number == Number::float32)
        job.accumulate ? decode_float32<true>(job) : decode_float32<false>(job);
    else if (number == Number::float16)
        job.accumulate ? decode_narrow<Half, true>(job) : decode_narrow<Half, false>(job);
    else
        job.accumulate ? decode_narrow<Bfloat, true>(job) : decode_narrow<Bfloat, false>(job);
}

}  // namespace thinwire
