// Signs alone, and what most of several voters say of each.
#include "signs.h"

#include <bit>

#include "elements.h"
#include "kernels.h"

namespace thinwire {
namespace {

// 512 elements, a bit each.
using Word [[gnu::vector_size(64)]] = std::uint64_t;
constexpr std::size_t NUM_WORDS = CHUNK / 512;
constexpr int MAX_PLANES = 32;  // fewer than 2**32 voters

template <bool accumulate> TW_INLINE void decode(const DecodeJob& job) {
    const float alpha = job.alpha;
    for (std::size_t begin = 0; begin < job.n; begin += CHUNK) {
        const std::size_t m = std::min<std::size_t>(CHUNK, job.n - begin);
        alignas(64) std::uint64_t words[CHUNK / 8];
        unpack_signs(job.data + begin / 8, m, words);
        const auto* flags = reinterpret_cast<const std::uint8_t*>(words);
        f32* __restrict out = job.out + begin;
        for (std::size_t i = 0; i < m; i++) deliver<accumulate>(out[i], flags[i] ? -1.0f : 1.0f, alpha);
    }
}

// Counts by bits: plane p holds bit p of the count of every element. Counting starts from what makes a majority carry
// into the highest plane, `top`. With a number of planes that the compiler knows they stay in registers.
template <int known> TW_INLINE void count_planes(const std::uint64_t* rows, std::uint32_t num_rows, std::size_t at,
                                                 std::size_t nbytes, int top, Word& majority, Word& ties) {
    const std::uint32_t start = (1u << top) - 1 - num_rows / 2;
    Word planes[known ? known : MAX_PLANES];
    const int num_planes = known ? known : top + 1;
#pragma GCC unroll 8
    for (int p = 0; p < num_planes; p++) planes[p] = Word{} - (start >> p & 1);
    for (std::uint32_t r = 0; r < num_rows; r++) {
        Word carry{};
        const auto* row = reinterpret_cast<const std::uint8_t*>(rows[r]) + at;
        if (nbytes == sizeof(Word))
            std::memcpy(&carry, row, sizeof(Word));
        else
            std::memcpy(&carry, row, nbytes);
#pragma GCC unroll 8
        for (int p = 0; p < num_planes; p++) {
            const Word sum = planes[p] ^ carry;
            carry &= planes[p];
            planes[p] = sum;
        }
    }
    majority = planes[num_planes - 1];
    ties = ~majority;  // a tie is one short of the carry
#pragma GCC unroll 8
    for (int p = 0; p < num_planes - 1; p++) ties &= planes[p];
}

TW_INLINE void count(const std::uint64_t* rows, std::uint32_t num_rows, std::size_t at, std::size_t nbytes,
                     Word& majority, Word& ties) {
    const int top = std::bit_width(num_rows / 2);
    switch (top) {
        case 0: return count_planes<1>(rows, num_rows, at, nbytes, top, majority, ties);
        case 1: return count_planes<2>(rows, num_rows, at, nbytes, top, majority, ties);
        case 2: return count_planes<3>(rows, num_rows, at, nbytes, top, majority, ties);
        case 3: return count_planes<4>(rows, num_rows, at, nbytes, top, majority, ties);
        case 4: return count_planes<5>(rows, num_rows, at, nbytes, top, majority, ties);
        case 5: return count_planes<6>(rows, num_rows, at, nbytes, top, majority, ties);
        case 6: return count_planes<7>(rows, num_rows, at, nbytes, top, majority, ties);
        default: return count_planes<0>(rows, num_rows, at, nbytes, top, majority, ties);
    }
}

TW_INLINE bool any(const Word* words, std::size_t nbytes) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(words);
    return std::any_of(bytes, bytes + nbytes, [](std::uint8_t byte) { return byte != 0; });
}

// A bit for each of m elements: 1 where its uniform is below 1/2.
TW_INLINE void coins(const VoteJob& job, std::size_t begin, std::size_t m, float* random, std::uint8_t* bits) {
    EncodeJob from{};
    from.key = job.key, from.offset = job.offset, from.step = job.step, from.stream = job.stream;
    const float* u = uniforms(from, begin, m, random);
    f32 centred[CHUNK];
    for (std::size_t i = 0; i < m; i++) centred[i] = u[i] - 0.5f;
    pack_signs(centred, m, bits);
}

}  // namespace

TW_CLONES bool encode_sign(const EncodeJob& job) {
    std::int32_t peak = 0;
    for (std::size_t begin = 0; begin < job.n; begin += CHUNK) {
        const std::size_t m = std::min<std::size_t>(CHUNK, job.n - begin);
        std::int32_t unused = 0;
        peak = std::max(peak, pack_signs(form_q(job, begin, m, unused), m, job.out + begin / 8));
        if (job.residual) {
            f32* __restrict residual = job.residual + begin;
            for (std::size_t i = 0; i < m; i++) residual[i] = residual[i] - (residual[i] < 0.0f ? -1.0f : 1.0f);
        }
    }
    zero_padding(job, (job.n + 7) / 8);
    return peak < INF_BITS;
}

TW_CLONES void decode_sign(const DecodeJob& job) { job.accumulate ? decode<true>(job) : decode<false>(job); }

TW_CLONES void majority_vote(const VoteJob& job, const std::uint64_t* rows, std::uint32_t num_rows, Scratch& scratch) {
    float* random = scratch.get<float>(uniforms_size(CHUNK));
    const bool draw = job.random && num_rows % 2 == 0;
    for (std::size_t begin = 0; begin < job.n; begin += CHUNK) {
        const std::size_t m = std::min<std::size_t>(CHUNK, job.n - begin), nbytes = (m + 7) / 8;
        alignas(64) Word majority[NUM_WORDS], ties[NUM_WORDS];
        for (std::size_t w = 0; w * sizeof(Word) < nbytes; w++) {
            const std::size_t at = begin / 8 + w * sizeof(Word), left = std::min(sizeof(Word), nbytes - w * sizeof(Word));
            count(rows, num_rows, at, left, majority[w], ties[w]);
        }
        auto* bytes = reinterpret_cast<std::uint8_t*>(majority);
        if (draw && any(ties, nbytes)) {
            std::uint8_t bits[CHUNK / 8];
            coins(job, begin, m, random, bits);
            for (std::size_t i = 0; i < nbytes; i++) bytes[i] |= reinterpret_cast<std::uint8_t*>(ties)[i] & bits[i];
        }
        if (m % 8) bytes[nbytes - 1] &= static_cast<std::uint8_t>((1u << m % 8) - 1);
        std::memcpy(job.out + begin / 8, bytes, nbytes);
    }
    const std::size_t used = (job.n + 7) / 8;
    if (job.out_nbytes > used) std::memset(job.out + used, 0, job.out_nbytes - used);
}

}  // namespace thinwire
