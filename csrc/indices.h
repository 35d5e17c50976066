// How the indices of k values kept of n travel: kernels/top_k_layout.py.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>

#include "portable.h"

namespace thinwire {

inline constexpr std::size_t INDEX_CHUNK = 4096;  // what 12 bits can address

enum class IndexForm { u16, u12, bitmap, chunked };

// First bytes of the parts of an encoded block, and its end.
struct TopKLayout {
    IndexForm form;
    std::size_t values;
    std::size_t indices;  // chunked: the 12-bit places
    std::size_t counts;   // chunked only
    std::size_t end;
};

// Wider numbers first, values before indices.
inline TopKLayout lay_out_top_k(std::size_t n, std::size_t k, std::size_t value_nbytes, bool chunked) {
    const std::size_t values = k * value_nbytes, packed = (12 * k + 7) / 8;
    if (chunked) {
        const std::size_t counts = 2 * ((n + INDEX_CHUNK - 1) / INDEX_CHUNK), end = values + counts + packed;
        if (value_nbytes == 1) return {IndexForm::chunked, counts, counts + values, 0, end};
        return {IndexForm::chunked, 0, values + counts, values, end};
    }
    const auto total = [&](std::size_t indices) { return (values + indices + 3) / 4; };
    IndexForm form = IndexForm::u16;
    std::size_t nbytes = 2 * k;
    if (n <= INDEX_CHUNK && total(packed) < total(nbytes)) form = IndexForm::u12, nbytes = packed;
    if (total((n + 7) / 8) < total(nbytes)) form = IndexForm::bitmap, nbytes = (n + 7) / 8;
    if (form == IndexForm::u16 && value_nbytes == 1) return {form, nbytes, 0, 0, values + nbytes};
    return {form, 0, values, 0, values + nbytes};
}

// --- 12 bits: two in three bytes, least bits first; one left over takes two bytes -----------------------------------

inline void pack_12(const std::uint16_t* places, std::size_t k, std::uint8_t* out) {
    std::size_t j = 0;
    for (; j + 1 < k; j += 2, out += 3) {
        const std::uint32_t both = (places[j] & 0xFFFu) | (places[j + 1] & 0xFFFu) << 12;
        out[0] = static_cast<std::uint8_t>(both);
        out[1] = static_cast<std::uint8_t>(both >> 8);
        out[2] = static_cast<std::uint8_t>(both >> 16);
    }
    if (j < k) {
        out[0] = static_cast<std::uint8_t>(places[j]);
        out[1] = static_cast<std::uint8_t>((places[j] & 0xFFFu) >> 8);
    }
}

inline void unpack_12(const std::uint8_t* data, std::size_t k, std::uint16_t* places) {
    std::size_t j = 0;
    for (; j + 1 < k; j += 2, data += 3) {
        places[j] = static_cast<std::uint16_t>(data[0] | (data[1] & 0xFu) << 8);
        places[j + 1] = static_cast<std::uint16_t>(data[1] >> 4 | data[2] << 4);
    }
    if (j < k) places[j] = static_cast<std::uint16_t>(data[0] | (data[1] & 0xFu) << 8);
}

// --- all forms ------------------------------------------------------------------------------------------------------

// Write ascending indices; those of a bitmap or in chunks need n.
inline void write_indices(const TopKLayout& layout, const std::uint16_t* indices, std::size_t n, std::size_t k,
                          std::uint8_t* block) {
    std::uint8_t* out = block + layout.indices;
    switch (layout.form) {
        case IndexForm::u16:
            if (k) std::memcpy(out, indices, 2 * k);
            break;
        case IndexForm::bitmap:
            std::memset(out, 0, (n + 7) / 8);
            for (std::size_t j = 0; j < k; j++) out[indices[j] / 8] |= static_cast<std::uint8_t>(1 << indices[j] % 8);
            break;
        case IndexForm::chunked: {
            u16* counts = reinterpret_cast<u16*>(block + layout.counts);
            for (std::size_t c = 0; c < (n + INDEX_CHUNK - 1) / INDEX_CHUNK; c++) counts[c] = 0;
            for (std::size_t j = 0; j < k; j++) counts[indices[j] / INDEX_CHUNK]++;
            pack_12(indices, k, out);
            break;
        }
        case IndexForm::u12: pack_12(indices, k, out); break;
    }
}

// What is wrong with the indices of a block.
struct BadIndices {
    enum Kind { none, index, count } kind = none;
    std::size_t place = 0;   // of the first bad index
    std::uint64_t got = 0;   // that index, or how many indices there are
    std::uint64_t before = 0;  // the index before it
};

// Check that indices ascend below n. Looked over without branches first; named only if bad.
TW_INLINE BadIndices check_indices(const std::uint16_t* indices, std::size_t n, std::size_t k) {
    bool bad = k && indices[k - 1] >= n;
    for (std::size_t j = 1; j < k; j++) bad |= indices[j] <= indices[j - 1];
    if (!bad) return {};
    for (std::size_t j = 0;; j++)
        if (indices[j] >= n || (j > 0 && indices[j] <= indices[j - 1]))
            return {BadIndices::index, j, indices[j], j > 0 ? indices[j - 1] : 0u};
}

// Read k indices into `indices`. Never writes more than k, whatever the bytes.
TW_INLINE void read_indices(const TopKLayout& layout, const std::uint8_t* block, std::size_t n, std::size_t k,
                            std::uint16_t* indices) {
    const std::uint8_t* data = block + layout.indices;
    switch (layout.form) {
        case IndexForm::u16:
            if (k) std::memcpy(indices, data, 2 * k);
            break;
        case IndexForm::u12: unpack_12(data, k, indices); break;
        case IndexForm::bitmap: {
            const std::size_t nbytes = (n + 7) / 8;
            std::size_t count = 0;
            for (std::size_t begin = 0; begin < nbytes; begin += 8) {
                std::uint64_t word = 0;
                std::memcpy(&word, data + begin, std::min<std::size_t>(8, nbytes - begin));
                for (; word && count < k; word &= word - 1)
                    indices[count++] = static_cast<std::uint16_t>(8 * begin + std::countr_zero(word));
            }
            break;
        }
        case IndexForm::chunked: {
            const u16* counts = reinterpret_cast<const u16*>(block + layout.counts);
            unpack_12(data, k, indices);
            for (std::size_t c = 0, j = 0; c < (n + INDEX_CHUNK - 1) / INDEX_CHUNK; c++)
                for (const std::size_t end = std::min(k, j + counts[c]); j < end; j++)
                    indices[j] = static_cast<std::uint16_t>(indices[j] + INDEX_CHUNK * c);
            break;
        }
    }
}

// How many indices there are, where the form says so; else k.
TW_INLINE std::uint64_t count_indices(const TopKLayout& layout, const std::uint8_t* block, std::size_t n,
                                      std::size_t k) {
    std::uint64_t count = 0;
    if (layout.form == IndexForm::bitmap) {
        for (std::size_t j = 0; j < (n + 7) / 8; j++)
            count += static_cast<std::uint64_t>(std::popcount(block[layout.indices + j]));
        return count;
    }
    if (layout.form != IndexForm::chunked) return k;
    const u16* counts = reinterpret_cast<const u16*>(block + layout.counts);
    for (std::size_t c = 0; c < (n + INDEX_CHUNK - 1) / INDEX_CHUNK; c++) count += counts[c];
    return count;
}

// Check the indices of a block; `indices` has room for k.
TW_INLINE BadIndices check_block(const TopKLayout& layout, const std::uint8_t* block, std::size_t n, std::size_t k,
                                 std::uint16_t* indices) {
    const std::uint64_t count = count_indices(layout, block, n, k);
    if (count != k) return {BadIndices::count, 0, count, 0};
    // A bitmap is in order, and in range unless its last byte says otherwise.
    if (layout.form == IndexForm::bitmap && !(n % 8 && block[layout.indices + n / 8] >> n % 8)) return {};
    read_indices(layout, block, n, k, indices);
    return check_indices(indices, n, k);
}

}  // namespace thinwire
