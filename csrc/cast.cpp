// Casts: n values of float32, float16 or bfloat16, rounded to nearest even; and the test for finite values.
#include "elements.h"
#include "half.h"
#include "kernels.h"

#ifdef TW_HAS_CLONES
#include <immintrin.h>
#endif

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

#ifdef TW_HAS_CLONES

// float16 by the instructions for it, eight at a time; returns how many elements, and leaves the rest. They differ from
// float_to_half in NaNs, which are flagged.
template <bool has_residual>
__attribute__((target("arch=x86-64-v3"))) std::size_t encode_eights(const EncodeJob& job, std::int32_t& peak) {
    const __m256 scale = _mm256_set1_ps(job.residual_scale);
    const __m256i size = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i peaks = _mm256_setzero_si256();
    std::size_t i = 0;
    for (; i + 8 <= job.n; i += 8) {
        __m256 q = _mm256_loadu_ps(job.x + i);
        if constexpr (has_residual) q = _mm256_add_ps(q, _mm256_mul_ps(_mm256_loadu_ps(job.residual + i), scale));
        const __m128i halves = _mm256_cvtps_ph(q, _MM_FROUND_TO_NEAREST_INT);
        const __m256 decoded = _mm256_cvtph_ps(halves);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(job.out + 2 * i), halves);
        if constexpr (has_residual) _mm256_storeu_ps(job.residual + i, _mm256_sub_ps(q, decoded));
        peaks = _mm256_max_epi32(peaks, _mm256_and_si256(_mm256_castps_si256(decoded), size));
    }
    alignas(32) std::int32_t largest[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(largest), peaks);
    peak = *std::max_element(largest, largest + 8);
    return i;
}

#endif

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

TW_CLONES bool add_residual(const EncodeJob& job) {
    std::int32_t peak = 0;
    form_q(job, 0, job.n, peak);
    return peak < INF_BITS;
}

TW_CLONES static bool encode_half(const EncodeJob& job) {
    return job.residual ? encode_narrow<Half, true>(job) : encode_narrow<Half, false>(job);
}

TW_CLONES static bool encode_other(const EncodeJob& job, Number number) {
    if (number == Number::float32) return encode_float32(job);
    return job.residual ? encode_narrow<Bfloat, true>(job) : encode_narrow<Bfloat, false>(job);
}

bool encode_cast(const EncodeJob& job, Number number) {
    if (number != Number::float16) return encode_other(job, number);
#ifdef TW_HAS_CLONES
    static const bool converts = __builtin_cpu_supports("x86-64-v3");
    if (converts) {
        std::int32_t peak = 0;
        const std::size_t done = job.residual ? encode_eights<true>(job, peak) : encode_eights<false>(job, peak);
        EncodeJob rest = job;
        rest.x += done;
        rest.residual += job.residual ? done : 0;
        rest.out += 2 * done;
        rest.n -= done;
        rest.out_nbytes -= 2 * done;
        return encode_half(rest) && peak < INF_BITS;
    }
#endif
    return encode_half(job);
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
