// The Python module `thinwire._native`: each kernel takes the packed jobs of one call, releases the GIL and runs them.
// `exchange` moves the blocks of one round.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "crc32.h"
#include "kernels.h"
#include "module.h"
#include "sockets.h"

namespace nb = nanobind;

namespace thinwire {
namespace {

struct FiniteJob {
    const f32* x;
    std::uint64_t n;
};

// Run `encode(job, scratch) -> finite` for every job; one byte a job comes back, 1 where finite.
template <typename Job, typename Encode> nb::bytes encode_all(const nb::bytes& packed, int threads, Encode encode) {
    const std::vector<Job> jobs = unpack<Job>(packed);
    std::string finite(jobs.size(), '\0');
    {
        nb::gil_scoped_release release;
        parallel_for(jobs.size(), threads,
                     [&](std::size_t i, Scratch& scratch) { finite[i] = encode(jobs[i], scratch) ? 1 : 0; });
    }
    return nb::bytes(finite.data(), finite.size());
}

template <typename Decode> void decode_all(const nb::bytes& packed, int threads, Decode decode) {
    const std::vector<DecodeJob> jobs = unpack<DecodeJob>(packed);
    nb::gil_scoped_release release;
    parallel_for(jobs.size(), threads, [&](std::size_t i, Scratch& scratch) { decode(jobs[i], scratch); });
}

// Check every job before any is decoded. Returns what is wrong with the first bad one, (job, what, place, got, before),
// or None.
nb::object decode_top_k_all(const nb::bytes& packed, int number, bool chunked, int threads) {
    const std::vector<DecodeJob> jobs = unpack<DecodeJob>(packed);
    const TopK settings{Number{number}, Selection::exact, chunked};
    std::size_t bad_job = 0;
    BadIndices bad;
    {
        nb::gil_scoped_release release;
        Scratch scratch;
        for (std::size_t i = 0; i < jobs.size() && bad.kind == BadIndices::none; i++, bad_job++)
            bad = check_top_k(jobs[i], settings, scratch);
        if (bad.kind == BadIndices::none)
            parallel_for(jobs.size(), threads,
                         [&](std::size_t i, Scratch& own) { decode_top_k(jobs[i], settings, own); });
    }
    if (bad.kind == BadIndices::none) return nb::none();
    return nb::make_tuple(bad_job - 1, bad.kind == BadIndices::count ? "count" : "index", bad.place, bad.got, bad.before);
}

void decode_random_k_all(const nb::bytes& packed, const nb::bytes& packed_streams, const RandomK& settings,
                         int threads) {
    const std::vector<DecodeJob> jobs = unpack<DecodeJob>(packed);
    const std::vector<Stream> streams = unpack<Stream>(packed_streams);
    if (streams.size() != jobs.size()) throw std::invalid_argument("expected a stream for every job");
    nb::gil_scoped_release release;
    parallel_for(jobs.size(), threads, [&](std::size_t i, Scratch& scratch) {
        decode_random_k(jobs[i], streams[i], settings, scratch);
    });
}

void majority_vote_all(const nb::bytes& packed, const nb::bytes& packed_rows, std::uint32_t num_rows, int threads) {
    const std::vector<VoteJob> jobs = unpack<VoteJob>(packed);
    const std::vector<std::uint64_t> rows = unpack<std::uint64_t>(packed_rows);
    if (num_rows < 1 || rows.size() != jobs.size() * num_rows) throw std::invalid_argument("expected the rows of every job");
    nb::gil_scoped_release release;
    parallel_for(jobs.size(), threads, [&](std::size_t i, Scratch& scratch) {
        majority_vote(jobs[i], rows.data() + i * num_rows, num_rows, scratch);
    });
}

using Numbers = std::vector<std::uint64_t>;

// Lists by rank. Returns (rank, reason) of what went wrong, or None.
nb::object exchange_blocks(const std::vector<int>& fds, int rank, const Numbers& send, const Numbers& send_nbytes,
                           const Numbers& receive, const Numbers& receive_nbytes, std::uint32_t round,
                           std::uint64_t free_nbytes, std::uint64_t piece_nbytes, int timeout_ms, int wake) {
    const std::size_t n = fds.size();
    if (rank < 0 || static_cast<std::size_t>(rank) >= n || send.size() != n || send_nbytes.size() != n ||
        receive.size() != n || receive_nbytes.size() != n || send_nbytes[rank] != receive_nbytes[rank] ||
        piece_nbytes == 0)
        throw std::invalid_argument("exchange: lists of one entry a rank, an own block of one size, and pieces");
    std::vector<Peer> peers;
    for (std::size_t r = 0; r < n; r++)
        peers.push_back({fds[r], reinterpret_cast<const std::uint8_t*>(send[r]), send_nbytes[r],
                         reinterpret_cast<std::uint8_t*>(receive[r]), receive_nbytes[r]});
    std::optional<Failure> failure;
    {
        nb::gil_scoped_release release;
        failure = exchange(peers, rank, round, {timeout_ms, wake, free_nbytes, piece_nbytes});
    }
    return failure ? nb::object(nb::make_tuple(failure->rank, failure->reason.c_str())) : nb::none();
}

std::uint32_t crc32_of(nb::object data, std::uint32_t start) {
    Py_buffer view;
    if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE)) throw nb::python_error();
    std::uint32_t found;
    {
        nb::gil_scoped_release release;
        found = crc32(static_cast<const unsigned char*>(view.buf), static_cast<std::size_t>(view.len), start);
    }
    PyBuffer_Release(&view);
    return found;
}

}  // namespace
}  // namespace thinwire

NB_MODULE(_native, m) {
    using namespace thinwire;
    m.doc() = "Compiled kernels. Call them through thinwire.kernels.native, which checks what comes in.";
    m.def("all_finite", [](const nb::bytes& jobs, int threads) {
        return encode_all<FiniteJob>(jobs, threads,
                                     [](const FiniteJob& job, Scratch&) { return all_finite(job.x, job.n); });
    }, nb::arg("jobs"), nb::arg("threads"));
    m.def("add_residual", [](const nb::bytes& jobs, int threads) {
        return encode_all<EncodeJob>(jobs, threads, [](const EncodeJob& job, Scratch&) { return add_residual(job); });
    }, nb::arg("jobs"), nb::arg("threads"));
    m.def("encode_cast", [](const nb::bytes& jobs, int number, int threads) {
        return encode_all<EncodeJob>(
            jobs, threads, [=](const EncodeJob& job, Scratch&) { return encode_cast(job, Number{number}); });
    }, nb::arg("jobs"), nb::arg("number"), nb::arg("threads"));
    m.def("decode_cast", [](const nb::bytes& jobs, int number, int threads) {
        decode_all(jobs, threads, [=](const DecodeJob& job, Scratch&) { decode_cast(job, Number{number}); });
    }, nb::arg("jobs"), nb::arg("number"), nb::arg("threads"));
    m.def("encode_block_quant", [](const nb::bytes& jobs, int bits, std::size_t block, bool stochastic,
                                      std::size_t rotation, int threads) {
        const BlockQuant settings{bits, block, stochastic, rotation};
        return encode_all<EncodeJob>(jobs, threads, [=](const EncodeJob& job, Scratch& scratch) {
            return encode_block_quant(job, settings, scratch);
        });
    }, nb::arg("jobs"), nb::arg("bits"), nb::arg("block"), nb::arg("stochastic"), nb::arg("rotation"), nb::arg("threads"));
    m.def("decode_block_quant", [](const nb::bytes& jobs, int bits, std::size_t block, std::size_t rotation, int threads) {
        const BlockQuant settings{bits, block, false, rotation};
        decode_all(jobs, threads, [=](const DecodeJob& job, Scratch& scratch) {
            decode_block_quant(job, settings, scratch);
        });
    }, nb::arg("jobs"), nb::arg("bits"), nb::arg("block"), nb::arg("rotation"), nb::arg("threads"));
    m.def("encode_dither",
          [](const nb::bytes& jobs, int bits, std::size_t block, bool natural, bool l2, int threads) {
              const Dither settings{bits, block, natural, l2};
              return encode_all<EncodeJob>(jobs, threads, [=](const EncodeJob& job, Scratch& scratch) {
                  return encode_dither(job, settings, scratch);
              });
          },
          nb::arg("jobs"), nb::arg("bits"), nb::arg("block"), nb::arg("natural"), nb::arg("l2"), nb::arg("threads"));
    m.def("decode_dither", [](const nb::bytes& jobs, int bits, std::size_t block, bool natural, int threads) {
        const Dither settings{bits, block, natural, false};
        decode_all(jobs, threads,
                   [=](const DecodeJob& job, Scratch& scratch) { decode_dither(job, settings, scratch); });
    }, nb::arg("jobs"), nb::arg("bits"), nb::arg("block"), nb::arg("natural"), nb::arg("threads"));
    m.def("encode_natural", [](const nb::bytes& jobs, int bits, int threads) {
        return encode_all<EncodeJob>(
            jobs, threads, [=](const EncodeJob& job, Scratch& scratch) { return encode_natural(job, bits, scratch); });
    }, nb::arg("jobs"), nb::arg("bits"), nb::arg("threads"));
    m.def("decode_natural", [](const nb::bytes& jobs, int bits, int threads) {
        decode_all(jobs, threads, [=](const DecodeJob& job, Scratch& scratch) { decode_natural(job, bits, scratch); });
    }, nb::arg("jobs"), nb::arg("bits"), nb::arg("threads"));
    m.def("encode_min_max",
          [](const nb::bytes& jobs, int bits, std::size_t block, bool bagua, bool stochastic, int threads) {
              const MinMax settings{bits, block, bagua, stochastic};
              return encode_all<EncodeJob>(jobs, threads, [=](const EncodeJob& job, Scratch& scratch) {
                  return encode_min_max(job, settings, scratch);
              });
          },
          nb::arg("jobs"), nb::arg("bits"), nb::arg("block"), nb::arg("bagua"), nb::arg("stochastic"),
          nb::arg("threads"));
    m.def("decode_min_max", [](const nb::bytes& jobs, int bits, std::size_t block, bool bagua, int threads) {
        const MinMax settings{bits, block, bagua, false};
        decode_all(jobs, threads,
                   [=](const DecodeJob& job, Scratch& scratch) { decode_min_max(job, settings, scratch); });
    }, nb::arg("jobs"), nb::arg("bits"), nb::arg("block"), nb::arg("bagua"), nb::arg("threads"));
    m.def("encode_fixed_point", [](const nb::bytes& jobs, int bits, std::size_t block, int threads) {
        const FixedPoint settings{bits, block};
        return encode_all<EncodeJob>(jobs, threads, [=](const EncodeJob& job, Scratch& scratch) {
            return encode_fixed_point(job, settings, scratch);
        });
    }, nb::arg("jobs"), nb::arg("bits"), nb::arg("block"), nb::arg("threads"));
    m.def("decode_fixed_point", [](const nb::bytes& jobs, int bits, std::size_t block, int threads) {
        const FixedPoint settings{bits, block};
        decode_all(jobs, threads,
                   [=](const DecodeJob& job, Scratch& scratch) { decode_fixed_point(job, settings, scratch); });
    }, nb::arg("jobs"), nb::arg("bits"), nb::arg("block"), nb::arg("threads"));
    m.def("encode_block_cast", [](const nb::bytes& jobs, int format, std::size_t block, int threads) {
        const BlockCast settings{FloatFormat{format}, block};
        return encode_all<EncodeJob>(jobs, threads, [=](const EncodeJob& job, Scratch& scratch) {
            return encode_block_cast(job, settings, scratch);
        });
    }, nb::arg("jobs"), nb::arg("format"), nb::arg("block"), nb::arg("threads"));
    m.def("decode_block_cast", [](const nb::bytes& jobs, int format, std::size_t block, int threads) {
        const BlockCast settings{FloatFormat{format}, block};
        decode_all(jobs, threads,
                   [=](const DecodeJob& job, Scratch& scratch) { decode_block_cast(job, settings, scratch); });
    }, nb::arg("jobs"), nb::arg("format"), nb::arg("block"), nb::arg("threads"));
    m.def("encode_one_bit", [](const nb::bytes& jobs, bool rms, int threads) {
        return encode_all<EncodeJob>(
            jobs, threads, [=](const EncodeJob& job, Scratch& scratch) { return encode_one_bit(job, rms, scratch); });
    }, nb::arg("jobs"), nb::arg("rms"), nb::arg("threads"));
    m.def("decode_one_bit", [](const nb::bytes& jobs, int threads) {
        decode_all(jobs, threads, [](const DecodeJob& job, Scratch&) { decode_one_bit(job); });
    }, nb::arg("jobs"), nb::arg("threads"));
    m.def("encode_sign", [](const nb::bytes& jobs, int threads) {
        return encode_all<EncodeJob>(jobs, threads, [](const EncodeJob& job, Scratch&) { return encode_sign(job); });
    }, nb::arg("jobs"), nb::arg("threads"));
    m.def("decode_sign", [](const nb::bytes& jobs, int threads) {
        decode_all(jobs, threads, [](const DecodeJob& job, Scratch&) { decode_sign(job); });
    }, nb::arg("jobs"), nb::arg("threads"));
    m.def("majority_vote", &majority_vote_all, nb::arg("jobs"), nb::arg("rows"), nb::arg("num_rows"),
          nb::arg("threads"));
    m.def("encode_top_k", [](const nb::bytes& jobs, int number, int selection, bool chunked, int threads) {
        const TopK settings{Number{number}, Selection{selection}, chunked};
        return encode_all<EncodeJob>(jobs, threads, [=](const EncodeJob& job, Scratch& scratch) {
            return encode_top_k(job, settings, scratch);
        });
    }, nb::arg("jobs"), nb::arg("number"), nb::arg("selection"), nb::arg("chunked"), nb::arg("threads"));
    m.def("decode_top_k", &decode_top_k_all, nb::arg("jobs"), nb::arg("number"), nb::arg("chunked"), nb::arg("threads"));
    m.def("encode_random_k", [](const nb::bytes& jobs, int number, std::size_t block, std::size_t period, bool scaled,
                                int threads) {
        const RandomK settings{Number{number}, block, period, scaled};
        return encode_all<EncodeJob>(jobs, threads, [=](const EncodeJob& job, Scratch& scratch) {
            return encode_random_k(job, settings, scratch);
        });
    }, nb::arg("jobs"), nb::arg("number"), nb::arg("block"), nb::arg("period"), nb::arg("scaled"), nb::arg("threads"));
    m.def("decode_random_k", [](const nb::bytes& jobs, const nb::bytes& streams, int number, std::size_t block,
                                std::size_t period, int threads) {
        decode_random_k_all(jobs, streams, RandomK{Number{number}, block, period, false}, threads);
    }, nb::arg("jobs"), nb::arg("streams"), nb::arg("number"), nb::arg("block"), nb::arg("period"), nb::arg("threads"));
    if (has_fast_crc32()) m.def("crc32", &crc32_of, nb::arg("data"), nb::arg("start") = 0);
    bind_shared(m);
    bind_low_rank(m);
    m.def("exchange", &exchange_blocks, nb::arg("fds"), nb::arg("rank"), nb::arg("send"), nb::arg("send_nbytes"),
          nb::arg("receive"), nb::arg("receive_nbytes"), nb::arg("round"), nb::arg("free_nbytes"), nb::arg("piece_nbytes"),
          nb::arg("timeout_ms"), nb::arg("wake"));
}
