// Factors of matrices: what ranks must compute alike. Jobs are packed by kernels/native_low_rank.py.
#pragma once

#include "kernels.h"

namespace thinwire {

// struct format "<3Q" in native_low_rank.py.
struct Factor {
    f32* rows;  // one after another: the columns of P
    std::uint64_t rank;
    std::uint64_t length;
};
static_assert(sizeof(Factor) == 24);

// struct format "<6Q" in native_low_rank.py.
struct Product {
    const f32* p;  // (rank, m)
    const f32* q;  // (rank, n)
    f32* out;      // (m, n)
    std::uint64_t rank;
    std::uint64_t m;
    std::uint64_t n;
};
static_assert(sizeof(Product) == 48);

// Make rows orthonormal, in place: modified Gram-Schmidt in double, twice. Rows of which less than the root of
// `dependent` is left become zero.
void orthogonalise(const Factor& factor, double dependent, Scratch& scratch);

// Rows [begin, end) of P Q^T, summed from the first column to the last.
void reconstruct(const Product& product, std::uint64_t begin, std::uint64_t end);

}  // namespace thinwire
