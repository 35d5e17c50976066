// The Python module `thinwire._native`: each function takes the packed jobs of one call, releases the GIL and runs them.
#include <nanobind/nanobind.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace nb = nanobind;

namespace thinwire {
namespace {

struct FiniteJob {
    const f32* x;
    std::uint64_t n;
};

template <typename Job> std::vector<Job> unpack(const nb::bytes& packed) {
    if (packed.size() % sizeof(Job)) throw std::invalid_argument("packed jobs of the wrong size");
    std::vector<Job> jobs(packed.size() / sizeof(Job));
    if (!jobs.empty()) std::memcpy(jobs.data(), packed.data(), packed.size());
    return jobs;
}

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
    parallel_for(jobs.size(), threads, [&](std::size_t i, Scratch&) { decode(jobs[i]); });
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

}  // namespace
}  // namespace thinwire

NB_MODULE(_native, m) {
    using namespace thinwire;
    m.doc() = "Compiled kernels. Call them through thinwire.kernels.native, which checks what comes in.";
    m.def("all_finite", [](const nb::bytes& jobs, int threads) {
        return encode_all<FiniteJob>(jobs, threads,
                                     [](const FiniteJob& job, Scratch&) { return all_finite(job.x, job.n); });
    }, nb::arg("jobs"), nb::arg("threads"));
    m.def("encode_cast", [](const nb::bytes& jobs, int number, int threads) {
        return encode_all<EncodeJob>(
            jobs, threads, [=](const EncodeJob& job, Scratch&) { return encode_cast(job, Number{number}); });
    }, nb::arg("jobs"), nb::arg("number"), nb::arg("threads"));
    m.def("decode_cast", [](const nb::bytes& jobs, int number, int threads) {
        decode_all(jobs, threads, [=](const DecodeJob& job) { decode_cast(job, Number{number}); });
    }, nb::arg("jobs"), nb::arg("number"), nb::arg("threads"));
    m.def("encode_block_quant", [](const nb::bytes& jobs, int bits, std::size_t block, bool stochastic, int threads) {
        const BlockQuant settings{bits, block, stochastic};
        return encode_all<EncodeJob>(jobs, threads, [=](const EncodeJob& job, Scratch& scratch) {
            return encode_block_quant(job, settings, scratch);
        });
    }, nb::arg("jobs"), nb::arg("bits"), nb::arg("block"), nb::arg("stochastic"), nb::arg("threads"));
    m.def("decode_block_quant", [](const nb::bytes& jobs, int bits, std::size_t block, int threads) {
        const BlockQuant settings{bits, block, false};
        decode_all(jobs, threads, [=](const DecodeJob& job) { decode_block_quant(job, settings); });
    }, nb::arg("jobs"), nb::arg("bits"), nb::arg("block"), nb::arg("threads"));
    m.def("encode_one_bit", [](const nb::bytes& jobs, bool rms, int threads) {
        return encode_all<EncodeJob>(
            jobs, threads, [=](const EncodeJob& job, Scratch& scratch) { return encode_one_bit(job, rms, scratch); });
    }, nb::arg("jobs"), nb::arg("rms"), nb::arg("threads"));
    m.def("decode_one_bit", [](const nb::bytes& jobs, int threads) {
        decode_all(jobs, threads, [](const DecodeJob& job) { decode_one_bit(job); });
    }, nb::arg("jobs"), nb::arg("threads"));
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
}
