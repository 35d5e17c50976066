// Kinds whose scale is agreed over ranks: jobs beside those of jobs.h, packed by kernels/packing_shared.py.
#pragma once

#include "kernels.h"

namespace thinwire {

// What a job's senders agreed on: struct format "<Q" in packing_shared.py. Null where ternary codes have own scales.
struct Shared {
    const f32* numbers;
};
static_assert(sizeof(Shared) == 8);

// struct format "<4QfI" in packing_shared.py.
struct StatisticJob {
    const f32* x;
    const f32* residual;  // null: none
    f32* shared;
    std::uint64_t n;
    float residual_scale;
    std::uint32_t unused;
};
static_assert(sizeof(StatisticJob) == 40);

// struct format "<5Q2I2f" in packing_shared.py.
struct ReduceJob {
    std::uint8_t* acc;
    const std::uint8_t* data;
    std::uint64_t n;
    std::uint64_t key;
    std::uint64_t offset;
    std::uint32_t step;
    std::uint32_t stream;
    float acc_count;
    float data_count;
};
static_assert(sizeof(ReduceJob) == 56);

struct GlobalLinear {
    int bits;      // 8 or 4
    int levels;    // a side
    bool squared;  // the scale is the square root of what is shared
};

struct GlobalExponential {
    int levels;  // of one encoding; codes above are head-room for sums
    bool squared;
};

struct Ternary {
    std::size_t block;  // 0: the whole partition
    double clip;        // an own scale is at most this many times the root of the mean of q^2; 0: any
};

// A byte that no five ternary codes give.
struct BadByte {
    bool found = false;
    std::size_t place = 0;  // from the first byte of codes
    int got = 0;
};

// One norm per `block` elements (0: of all): the largest magnitude, or L2; perhaps its square.
void shared_norms(const StatisticJob& job, std::size_t block, bool l2, bool squared);

bool encode_global_linear(const EncodeJob& job, const f32* shared, const GlobalLinear& settings, Scratch& scratch);
void decode_global_linear(const DecodeJob& job, const f32* shared, const GlobalLinear& settings);
void reduce_global_linear(const ReduceJob& job, int bits);

bool encode_global_exponential(const EncodeJob& job, const f32* shared, const GlobalExponential& settings);
void decode_global_exponential(const DecodeJob& job, const f32* shared, const GlobalExponential& settings);
void reduce_global_exponential(const ReduceJob& job);

// `shared` holds a scale per block; null: the scales stand before the codes.
bool encode_ternary(const EncodeJob& job, const f32* shared, const Ternary& settings, Scratch& scratch);
BadByte check_ternary(const DecodeJob& job, const f32* shared, std::size_t block);
void decode_ternary(const DecodeJob& job, const f32* shared, std::size_t block);

bool encode_top_chunks(const EncodeJob& job, const f32* shared, Number number, std::size_t chunk, Scratch& scratch);
void decode_top_chunks(const DecodeJob& job, const f32* shared, Number number, std::size_t chunk);

}  // namespace thinwire
