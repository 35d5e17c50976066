// Orthonormal columns, and the product of two thin factors: the sums of kernels/low_rank.py, in their order.
#include "low_rank.h"

#include <cmath>
#include <cstring>

#include "tree_sum.h"

namespace thinwire {
namespace {

// Sum a[i] b[i] over whole chunks, of whose last the end is zeros; `sums` has room for one number per chunk.
TW_INLINE double dot(const double* a, const double* b, std::size_t num_chunks, double* sums) {
    for (std::size_t c = 0; c < num_chunks; c++) {
        const double *left = a + c * CHUNK, *right = b + c * CHUNK;
        sums[c] = sum_chunk([=](std::size_t i) __attribute__((always_inline)) { return left[i] * right[i]; });
    }
    return sum_of_sums(sums, num_chunks);
}

// `rows` are `stride` apart, a multiple of CHUNK. Only their first `length` elements are written: zeros stay zeros even
// where what is subtracted is not finite.
TW_CLONES void gram_schmidt(double* rows, std::size_t rank, std::size_t length, std::size_t stride, double dependent,
                            double* before, double* sums) {
    const std::size_t num_chunks = stride / CHUNK;
    for (std::size_t k = 0; k < rank; k++)
        before[k] = dot(rows + k * stride, rows + k * stride, num_chunks, sums);
    for (std::size_t k = 0; k < rank; k++) {
        double* const row = rows + k * stride;
        const double square = dot(row, row, num_chunks, sums);
        if (square > before[k] * dependent) {  // false for nan
            const double norm = std::sqrt(square);
            for (std::size_t i = 0; i < length; i++) row[i] = row[i] / norm;
        } else {
            std::memset(row, 0, sizeof(double) * length);
        }
        for (std::size_t j = k + 1; j < rank; j++) {
            double* const other = rows + j * stride;
            const double share = dot(other, row, num_chunks, sums);
            for (std::size_t i = 0; i < length; i++) other[i] = other[i] - share * row[i];
        }
    }
}

TW_CLONES void widen(const f32* from, double* to, std::size_t count) {
    for (std::size_t i = 0; i < count; i++) to[i] = from[i];
}

TW_CLONES void narrow(const double* from, f32* to, std::size_t count) {
    for (std::size_t i = 0; i < count; i++) to[i] = static_cast<float>(from[i]);
}

constexpr std::size_t TILE = 64;  // columns whose sums stay in registers

TW_CLONES void multiply_row(const f32* p, std::size_t p_stride, const f32* q, std::size_t n, std::size_t rank, f32* out) {
    std::size_t j = 0;
    for (; j + TILE <= n; j += TILE) {
        float sums[TILE];
        for (std::size_t t = 0; t < TILE; t++) sums[t] = p[0] * q[j + t];
        for (std::size_t k = 1; k < rank; k++) {
            const float factor = p[k * p_stride];
            const f32* const row = q + k * n + j;
            for (std::size_t t = 0; t < TILE; t++) sums[t] = sums[t] + factor * row[t];
        }
        for (std::size_t t = 0; t < TILE; t++) out[j + t] = sums[t];
    }
    for (; j < n; j++) {
        float sum = p[0] * q[j];
        for (std::size_t k = 1; k < rank; k++) sum = sum + p[k * p_stride] * q[k * n + j];
        out[j] = sum;
    }
}

}  // namespace

void orthogonalise(const Factor& factor, double dependent, Scratch& scratch) {
    const std::size_t rank = factor.rank, length = factor.length;
    const std::size_t num_chunks = (length + CHUNK - 1) / CHUNK, stride = num_chunks * CHUNK;
    if (!rank || !length) return;
    double* const rows = scratch.get<double>(rank * stride + rank + num_chunks);
    double *const before = rows + rank * stride, *const sums = before + rank;
    for (std::size_t k = 0; k < rank; k++) {
        widen(factor.rows + k * length, rows + k * stride, length);
        std::memset(rows + k * stride + length, 0, sizeof(double) * (stride - length));
    }
    for (int pass = 0; pass < 2; pass++)  // once leaves what rounding brought back of earlier rows; twice is enough
        gram_schmidt(rows, rank, length, stride, dependent, before, sums);
    for (std::size_t k = 0; k < rank; k++) narrow(rows + k * stride, factor.rows + k * length, length);
}

void reconstruct(const Product& product, std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t i = begin; i < end; i++)
        multiply_row(product.p + i, product.m, product.q, product.n, product.rank, product.out + i * product.n);
}

}  // namespace thinwire
