// What the compiler must be told: vector clones, forced inlining, loads and stores at any address.
#pragma once

#include <climits>  // defines __GLIBC__ where it applies
#include <cstdint>

// One function, compiled for several vector widths; the loader picks. Put it on the functions that hold the hot loops;
// helpers they call must be TW_INLINE, or they stay at the narrowest width. -ffp-contract=off holds in every clone, so
// all of them give the same bytes. TW_WIDE functions do by hand what compilers do not find for AVX-512: they are called
// where the machine has it, beside a plain twin that gives the same bytes.
#if defined(__x86_64__) && defined(__ELF__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    __GNUC__ >= 12 && !defined(THINWIRE_SANITIZE) && !defined(THINWIRE_NO_CLONES)
#define TW_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define TW_WIDE __attribute__((target("arch=x86-64-v4")))
#define TW_HAS_CLONES
#else
#define TW_CLONES
#endif

#define TW_INLINE __attribute__((always_inline)) static inline

namespace thinwire {

// Numbers at addresses that need not be multiples of their size: a message may start anywhere in a receive buffer.
using f32 [[gnu::aligned(1), gnu::may_alias]] = float;
using u16 [[gnu::aligned(1), gnu::may_alias]] = std::uint16_t;
using u64 [[gnu::aligned(1), gnu::may_alias]] = std::uint64_t;

}  // namespace thinwire
