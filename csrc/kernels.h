// The kernels: one job each, one thread each. Encoders return whether everything read and written was finite.
#pragma once

#include <cstdint>

#include "jobs.h"
#include "parallel.h"

namespace thinwire {

enum class Number : int { float32 = 0, float16 = 1, bfloat16 = 2 };

struct BlockQuant {
    int bits;  // 2 to 8
    std::size_t block;
    bool stochastic;
};

struct Dither {
    int bits;           // 2 to 8
    std::size_t block;  // 0: the whole partition
    bool natural;       // levels 1, 1/2, 1/4, ... of the scale; else evenly spaced ones
    bool l2;            // the scale is the L2 norm; else the largest magnitude
};

bool all_finite(const f32* x, std::size_t n);

bool encode_cast(const EncodeJob& job, Number number);
void decode_cast(const DecodeJob& job, Number number);

bool encode_block_quant(const EncodeJob& job, const BlockQuant& settings, Scratch& scratch);
void decode_block_quant(const DecodeJob& job, const BlockQuant& settings, Scratch& scratch);

bool encode_dither(const EncodeJob& job, const Dither& settings, Scratch& scratch);
void decode_dither(const DecodeJob& job, const Dither& settings, Scratch& scratch);

bool encode_one_bit(const EncodeJob& job, bool rms, Scratch& scratch);
void decode_one_bit(const DecodeJob& job);

bool encode_top_k(const EncodeJob& job, Number number, Scratch& scratch);
// Place of the first index that is out of range or order, or -1.
std::int64_t check_top_k(const DecodeJob& job, Number number);
void decode_top_k(const DecodeJob& job, Number number);

}  // namespace thinwire
