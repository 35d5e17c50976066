// One round over a full mesh of stream sockets.
//
// Blocks go out in pieces, round the peers: piece 0 to the rank at distance 1, 2, ..., then piece 1. A piece may go once
// the one before it has come from as far the other way, so that every link carries about one flow at a time, also where
// blocks differ in size. Whole blocks at once meet at a receiver, overrun the queue before it and wait for what was
// dropped: at 100 Mbit/s, with blocks of 256 KB, a third of the time.
//
// Wakes as rarely as it can: a reader sleeps until a piece has arrived (SO_RCVLOWAT), where a thread that wakes for every
// packet of a slow link does little else.
#include "sockets.h"

#include <poll.h>
#ifdef __linux__
#include <linux/tcp.h>
#include <netinet/in.h>
#endif
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace thinwire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t MAGIC = 0x4b425754;  // "TWBK"
constexpr std::uint64_t AHEAD_NBYTES_PER_MS = 32 << 10;  // of round trip: let so much more go than has come
constexpr long long PATIENCE_MS = 50;  // how long an idle wire waits for its turn
constexpr long long LOOK_MS = 1000;    // without news, look whether less than the low water came
#ifdef MSG_NOSIGNAL
constexpr int NO_SIGNAL = MSG_NOSIGNAL;
#else
constexpr int NO_SIGNAL = 0;  // SO_NOSIGPIPE instead
#endif

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// What is left of header and block, once `done` bytes of the two are through.
template <typename Body> int rest(BlockHeader& header, Body* body, std::uint64_t nbytes, std::uint64_t done, iovec* parts) {
    int count = 0;
    if (done < sizeof header) parts[count++] = {reinterpret_cast<std::uint8_t*>(&header) + done, sizeof header - done};
    const std::uint64_t start = done < sizeof header ? 0 : done - sizeof header;
    if (start < nbytes) parts[count++] = {const_cast<std::uint8_t*>(body) + start, nbytes - start};
    return count;
}

std::uint64_t num_pieces(std::uint64_t nbytes, std::uint64_t piece_nbytes) {
    return std::max<std::uint64_t>(1, (nbytes + piece_nbytes / 2) / piece_nbytes);
}

// One connection during one round.
class Flow {
public:
    Flow(const Peer& peer, std::uint32_t round, std::uint64_t piece_nbytes)
        : peer_(peer),
          piece_nbytes_(piece_nbytes),
          ours_{MAGIC, round, peer.send_nbytes},
          wanted_{MAGIC, round, peer.receive_nbytes} {
#ifdef SO_NOSIGPIPE
        const int on = 1;
        setsockopt(peer.fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
    }

    int fd() const { return peer_.fd; }
    bool sent() const { return sent_ == sizeof(BlockHeader) + peer_.send_nbytes; }
    bool received() const { return received_ == sizeof(BlockHeader) + peer_.receive_nbytes; }

    // Whether piece number `piece`, if the block has so many, has come.
    bool received(std::uint64_t piece) const { return received_ >= stop(piece, peer_.receive_nbytes); }

    // Let the block go up to the end of piece number `piece`; the header goes with the first.
    void allow(std::uint64_t piece) { allowed_ = stop(piece, peer_.send_nbytes); }
    bool may_send() const { return sent_ < allowed_; }

    // The shortest round trip that the kernel has seen of late.
    std::uint64_t round_trip_us() const {
#ifdef __linux__
        tcp_info info{};
        socklen_t size = sizeof info;
        if (!getsockopt(peer_.fd, IPPROTO_TCP, TCP_INFO, &info, &size) && info.tcpi_min_rtt != ~0u)
            return info.tcpi_min_rtt;
#endif
        return 0;
    }

    // Give the kernel what it takes. Returns whether anything moved.
    bool send() {
        bool moved = false;
        while (may_send() && error.empty()) {
            iovec parts[2];
            msghdr message{};
            message.msg_iov = parts;
            message.msg_iovlen = rest(ours_, peer_.send, allowed_ - sizeof ours_, sent_, parts);
            // Without MSG_EOR Linux keeps the end of a piece back to join it with what may follow (autocorking), until
            // nothing of this socket is queued on the way; over a virtual bridge it then forgets it for 40 ms and more.
            const ssize_t n = sendmsg(peer_.fd, &message, NO_SIGNAL | MSG_DONTWAIT | MSG_EOR);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0 && would_block(errno)) break;
            if (n < 0) {
                error = errno == EPIPE ? "closed the connection" : std::strerror(errno);
                break;
            }
            sent_ += n;
            moved = true;
        }
        return moved;
    }

    // Take what the kernel has. Returns whether anything moved.
    bool receive() {
        iovec parts[2];
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = rest(theirs_, peer_.receive, peer_.receive_nbytes, received_, parts);
        const ssize_t n = recvmsg(peer_.fd, &message, MSG_DONTWAIT);
        if (n < 0 && would_block(errno)) return false;
        if (n <= 0) {
            error = n == 0 ? "closed the connection" : std::strerror(errno);
            return false;
        }
        const bool checked = received_ >= sizeof theirs_;
        received_ += n;
        if (!checked && received_ >= sizeof theirs_) check();
        return true;
    }

    // Let poll() report the socket as readable only when the piece under way has come.
    void set_low_water() {
#if defined(SO_RCVLOWAT) && defined(__linux__)
        const std::uint64_t body = received_ < sizeof(BlockHeader) ? 0 : received_ - sizeof(BlockHeader);
        const int wanted = static_cast<int>(stop(body / piece_nbytes_, peer_.receive_nbytes) - received_);
        if (wanted == low_water_) return;
        low_water_ = wanted;
        setsockopt(peer_.fd, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);  // without it: more wakes, no harm
#endif
    }

    std::string error;

private:
    void check() {
        if (!std::memcmp(&theirs_, &wanted_, sizeof theirs_)) return;
        if (theirs_.magic != MAGIC)
            error = "sent bytes that are no block header";
        else
            error = "sent block " + std::to_string(theirs_.round) + " of " + std::to_string(theirs_.nbytes) +
                    " bytes, expected block " + std::to_string(wanted_.round) + " of " +
                    std::to_string(wanted_.nbytes) + " bytes";
    }

    // Where a piece of a block of `nbytes` ends, header included: the last one takes what is left, and there are no more.
    std::uint64_t stop(std::uint64_t piece, std::uint64_t nbytes) const {
        const bool last = piece + 1 >= num_pieces(nbytes, piece_nbytes_);
        return sizeof(BlockHeader) + (last ? nbytes : (piece + 1) * piece_nbytes_);
    }

    const Peer peer_;
    const std::uint64_t piece_nbytes_;
    BlockHeader ours_, theirs_{}, wanted_;
    std::uint64_t sent_ = 0, allowed_ = 0, received_ = 0;  // bytes, with the header
    int low_water_ = 0;
};

}  // namespace

std::optional<Failure> exchange(const std::vector<Peer>& peers, int rank, std::uint32_t round, const Pace& pace) {
    const int world_size = static_cast<int>(peers.size());
    const Peer& own = peers[rank];
    if (own.receive_nbytes) std::memcpy(own.receive, own.send, own.receive_nbytes);
    std::vector<Flow> flows;  // by distance: the first goes to the next rank
    for (int distance = 1; distance < world_size; distance++)
        flows.emplace_back(peers[(rank + distance) % world_size], round, pace.piece_nbytes);
    const auto rank_of = [&](std::size_t i) { return (rank + 1 + static_cast<int>(i)) % world_size; };

    std::uint64_t longest = 0, round_trip_us = 0;
    for (const Peer& peer : peers) longest = std::max(longest, peer.send_nbytes);
    for (const Flow& flow : flows) round_trip_us = std::max(round_trip_us, flow.round_trip_us());
    const std::size_t num_turns = num_pieces(longest, pace.piece_nbytes) * flows.size();
    const std::size_t ahead = 1 + round_trip_us * AHEAD_NBYTES_PER_MS / 1000 / pace.piece_nbytes;
    std::size_t late = 1;  // pieces to let go when nothing has come for a while
    std::size_t turn = 0;  // the piece that may go next: number turn / flows.size(), to flow turn % flows.size()
    const auto may_go = [&] {
        if (turn < ahead) return true;
        const std::size_t piece = (turn - ahead) / flows.size(), distance = (turn - ahead) % flows.size() + 1;
        const std::size_t source = flows.size() - distance;  // as far the other way as that piece went
        return peers[rank_of(source)].receive_nbytes <= pace.free_nbytes || flows[source].received(piece);
    };
    const auto go = [&] {
        flows[turn % flows.size()].allow(turn / flows.size());
        turn++;
    };

    std::vector<pollfd> polled(flows.size() + 1);
    auto moved_at = Clock::now();
    while (true) {
        while (turn < num_turns && may_go()) go();
        bool done = true, moved = false;
        for (std::size_t i = 0; i < flows.size(); i++) {
            Flow& flow = flows[i];
            if (flow.send()) moved = true;
            if (!flow.error.empty()) return Failure{rank_of(i), flow.error};
            done = done && flow.sent() && flow.received();
        }
        if (done) return std::nullopt;
        if (moved) moved_at = Clock::now();

        for (std::size_t i = 0; i < flows.size(); i++) {
            Flow& flow = flows[i];
            const bool sending = flow.may_send(), receiving = !flow.received();
            if (receiving) flow.set_low_water();
            const int events = (sending ? POLLOUT : 0) | (receiving ? POLLIN : 0);
            polled[i] = {events ? flow.fd() : -1, static_cast<short>(events), 0};
        }
        polled.back() = {pace.wake, POLLIN, 0};
        const bool waiting = turn < num_turns;
        const auto left = std::max<long long>(
            0, pace.timeout_ms -
                   std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - moved_at).count());
        const int count = poll(polled.data(), polled.size(),
                               static_cast<int>(std::min(left, waiting ? PATIENCE_MS : LOOK_MS)));
        if (count < 0 && errno != EINTR) return Failure{rank_of(0), std::string("poll: ") + std::strerror(errno)};
        if (count < 0) continue;
        if (polled.back().revents) return Failure{-1, "the connections were closed here"};
        moved = false;
        for (std::size_t i = 0; i < flows.size(); i++) {
            Flow& flow = flows[i];
            const bool ask = count == 0 || polled[i].revents & ~POLLOUT;
            if (ask && !flow.received() && flow.receive()) moved = true;
            if (!flow.error.empty()) return Failure{rank_of(i), flow.error};
        }
        if (moved) {
            moved_at = Clock::now();
        } else if (left == 0) {
            std::size_t silent = 0;
            while (silent + 1 < flows.size() && flows[silent].received()) silent++;
            return Failure{rank_of(silent),
                           "timed out: nothing moved for " + std::to_string((pace.timeout_ms + 500) / 1000) + " s"};
        } else if (count == 0 && waiting) {
            // A peer is late: do not let the wire idle for it. Each time more, so that all is sent soon if it never comes.
            for (std::size_t i = 0; i < late && turn < num_turns; i++) go();
            late *= 2;
        }
    }
}

}  // namespace thinwire
