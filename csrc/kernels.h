// The kernels: one job each, one thread each. Encoders return whether everything read and written was finite.
#pragma once

#include <cstdint>

#include "indices.h"
#include "jobs.h"
#include "parallel.h"
#include "philox.h"

namespace thinwire {

enum class Number : int { float32 = 0, float16 = 1, bfloat16 = 2, natural = 3 };  // natural: sparse kinds only

struct BlockQuant {
    int bits;  // 2 to 8
    std::size_t block;
    bool stochastic;       // encoders only
    std::size_t rotation;  // 0: none; 32 or 128 values, a divisor of `block`
};

struct Dither {
    int bits;           // 2 to 8
    std::size_t block;  // 0: the whole partition
    bool natural;       // levels 1, 1/2, 1/4, ... of the scale; else evenly spaced ones
    bool l2;            // the scale is the L2 norm; else the largest magnitude
};

struct MinMax {
    int bits;           // 1 to 8
    std::size_t block;  // 0: the whole partition
    bool bagua;         // steps from 0 on; else from the least value on
    bool stochastic;    // encoders only
};

struct FixedPoint {
    int bits;           // 2 to 8
    std::size_t block;  // 0: the whole partition
};

enum class FloatFormat : int { e4m3 = 0, e5m2 = 1, e3m0 = 2 };

struct BlockCast {
    FloatFormat format;
    std::size_t block;
};

enum class Selection : int { exact = 0, sampled = 1, bisect = 2 };

struct TopK {
    Number number;
    Selection selection;  // encoders only
    bool chunked;
};

struct RandomK {
    Number number;
    std::size_t block;   // elements a unit
    std::size_t period;  // 0: units are drawn
    bool scaled;         // encoders only
};

bool all_finite(const f32* x, std::size_t n);
bool add_residual(const EncodeJob& job);

bool encode_cast(const EncodeJob& job, Number number);
void decode_cast(const DecodeJob& job, Number number);

bool encode_block_quant(const EncodeJob& job, const BlockQuant& settings, Scratch& scratch);
void decode_block_quant(const DecodeJob& job, const BlockQuant& settings, Scratch& scratch);

bool encode_dither(const EncodeJob& job, const Dither& settings, Scratch& scratch);
void decode_dither(const DecodeJob& job, const Dither& settings, Scratch& scratch);

bool encode_natural(const EncodeJob& job, int bits, Scratch& scratch);
void decode_natural(const DecodeJob& job, int bits, Scratch& scratch);

bool encode_min_max(const EncodeJob& job, const MinMax& settings, Scratch& scratch);
void decode_min_max(const DecodeJob& job, const MinMax& settings, Scratch& scratch);

bool encode_fixed_point(const EncodeJob& job, const FixedPoint& settings, Scratch& scratch);
void decode_fixed_point(const DecodeJob& job, const FixedPoint& settings, Scratch& scratch);

bool encode_block_cast(const EncodeJob& job, const BlockCast& settings, Scratch& scratch);
void decode_block_cast(const DecodeJob& job, const BlockCast& settings, Scratch& scratch);

bool encode_one_bit(const EncodeJob& job, bool rms, Scratch& scratch);
void decode_one_bit(const DecodeJob& job);

bool encode_sign(const EncodeJob& job);
void decode_sign(const DecodeJob& job);
// `rows` holds the addresses of `num_rows` >= 1 bitmaps.
void majority_vote(const VoteJob& job, const std::uint64_t* rows, std::uint32_t num_rows, Scratch& scratch);

bool encode_top_k(const EncodeJob& job, const TopK& settings, Scratch& scratch);
BadIndices check_top_k(const DecodeJob& job, const TopK& settings, Scratch& scratch);
void decode_top_k(const DecodeJob& job, const TopK& settings, Scratch& scratch);


bool encode_random_k(const EncodeJob& job, const RandomK& settings, Scratch& scratch);
void decode_random_k(const DecodeJob& job, const Stream& stream, const RandomK& settings, Scratch& scratch);

}  // namespace thinwire
