// CRC-32 of IEEE 802.3, as zlib's: reflected, it begins and ends inverted.
//
// Bytes are coefficients of a polynomial over GF(2), and the checksum is its remainder by P. What stands 512 bits before
// other bits counts x^512 times as much: so four registers of 128 bits are multiplied by x^512 mod P, without carries,
// and added to the next 64 bytes, until 16 bytes are left that have the remainder of all (Gopal et al. 2009, "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction").
#include "crc32.h"

#include <array>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define TW_FOLD __attribute__((target("pclmul")))
#endif

namespace thinwire {
namespace {

constexpr std::uint32_t polynomial = 0xEDB88320;  // P reflected: bit 31 is x^0

constexpr std::uint32_t times_x(std::uint32_t value) { return value >> 1 ^ (value & 1 ? polynomial : 0); }

constexpr std::array<std::uint32_t, 256> make_table() {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t byte = 0; byte < 256; byte++) {
        std::uint32_t value = byte;
        for (int bit = 0; bit < 8; bit++) value = times_x(value);
        table[byte] = value;
    }
    return table;
}

constexpr std::array<std::uint32_t, 256> table = make_table();

std::uint32_t by_bytes(const unsigned char* data, std::size_t size, std::uint32_t crc) {
    for (std::size_t i = 0; i < size; i++) crc = crc >> 8 ^ table[(crc ^ data[i]) & 255];
    return crc;
}

#ifdef TW_FOLD

// x^exponent mod P, one bit up: the product of two reflected polynomials comes out one bit low.
constexpr long long power(int exponent) {
    std::uint32_t value = 0x80000000;
    for (int i = 0; i < exponent; i++) value = times_x(value);
    return static_cast<long long>(value) << 1;
}

TW_FOLD inline __m128i load(const unsigned char* data) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

// Its first 64 bits stand 64 further up than its last, and a factor of 32 bits reaches 32 further down.
TW_FOLD inline __m128i fold(__m128i value, __m128i factors, __m128i next) {
    const __m128i first = _mm_clmulepi64_si128(value, factors, 0x00), last = _mm_clmulepi64_si128(value, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(first, last), next);
}

constexpr std::size_t step = 64;

TW_FOLD std::uint32_t by_folding(const unsigned char* data, std::size_t size, std::uint32_t crc) {
    constexpr long long up_512 = power(512 + 32), down_512 = power(512 - 32);
    constexpr long long up_128 = power(128 + 32), down_128 = power(128 - 32);
    const __m128i by_512 = _mm_set_epi64x(down_512, up_512), by_128 = _mm_set_epi64x(down_128, up_128);
    __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(static_cast<int>(crc)));
    __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
    const unsigned char* const end = data + size;
    for (data += step; end - data >= static_cast<std::ptrdiff_t>(step); data += step) {
        a = fold(a, by_512, load(data));
        b = fold(b, by_512, load(data + 16));
        c = fold(c, by_512, load(data + 32));
        d = fold(d, by_512, load(data + 48));
    }
    a = fold(fold(fold(a, by_128, b), by_128, c), by_128, d);
    for (; end - data >= 16; data += 16) a = fold(a, by_128, load(data));
    unsigned char left[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(left), a);
    return by_bytes(data, static_cast<std::size_t>(end - data), by_bytes(left, sizeof left, 0));
}

#endif

}  // namespace

#ifdef TW_FOLD
bool has_fast_crc32() { return __builtin_cpu_supports("pclmul"); }
#else
bool has_fast_crc32() { return false; }
#endif

std::uint32_t crc32(const unsigned char* data, std::size_t size, std::uint32_t start) {
#ifdef TW_FOLD
    if (size >= step) return ~by_folding(data, size, ~start);
#endif
    return ~by_bytes(data, size, ~start);
}

}  // namespace thinwire
