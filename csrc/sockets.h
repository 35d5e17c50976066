// One round over a full mesh of stream sockets.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace thinwire {

// What a block starts with on the wire, little-endian. See docs/wire-format.md.
struct BlockHeader {
    std::uint32_t magic;
    std::uint32_t round;
    std::uint64_t nbytes;
};
static_assert(sizeof(BlockHeader) == 16);

struct Peer {
    int fd;  // not blocking; -1 for this rank itself
    const std::uint8_t* send;
    std::uint64_t send_nbytes;
    std::uint8_t* receive;
    std::uint64_t receive_nbytes;
};

struct Pace {
    int timeout_ms;            // without a byte to or from anyone
    int wake;                  // a descriptor that ends the call once it is readable
    std::uint64_t free_nbytes;   // blocks up to this size go out all at once
    std::uint64_t piece_nbytes;  // larger ones go out in pieces of this size; at least 1, the same on all ranks
};

struct Failure {
    int rank;  // -1 if woken
    std::string reason;
};

// Send peers[r].send to rank r and fill peers[r].receive from it, for every r.
std::optional<Failure> exchange(const std::vector<Peer>& peers, int rank, std::uint32_t round, const Pace& pace);

}  // namespace thinwire
