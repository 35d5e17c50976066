// The kernels of kinds whose scale is agreed over ranks, for the Python module.
#include <string>

#include "module.h"
#include "shared.h"

namespace thinwire {
namespace {

// Run `encode(job, shared, scratch) -> finite` for every job; one byte a job comes back, 1 where finite.
template <typename Encode>
nb::bytes encode_all(const nb::bytes& packed, const nb::bytes& packed_shared, int threads, Encode encode) {
    const std::vector<EncodeJob> jobs = unpack<EncodeJob>(packed);
    const std::vector<Shared> shared = unpack<Shared>(packed_shared);
    if (shared.size() != jobs.size()) throw std::invalid_argument("expected something shared for every job");
    std::string finite(jobs.size(), '\0');
    {
        nb::gil_scoped_release release;
        parallel_for(jobs.size(), threads, [&](std::size_t i, Scratch& scratch) {
            finite[i] = encode(jobs[i], shared[i].numbers, scratch) ? 1 : 0;
        });
    }
    return nb::bytes(finite.data(), finite.size());
}

template <typename Decode>
void decode_all(const nb::bytes& packed, const nb::bytes& packed_shared, int threads, Decode decode) {
    const std::vector<DecodeJob> jobs = unpack<DecodeJob>(packed);
    const std::vector<Shared> shared = unpack<Shared>(packed_shared);
    if (shared.size() != jobs.size()) throw std::invalid_argument("expected something shared for every job");
    nb::gil_scoped_release release;
    parallel_for(jobs.size(), threads,
                 [&](std::size_t i, Scratch& scratch) { decode(jobs[i], shared[i].numbers, scratch); });
}

// Check every job before any is decoded. Returns the first bad byte, (job, place, got), or None.
nb::object decode_ternary_all(const nb::bytes& packed, const nb::bytes& packed_shared, std::size_t block, int threads) {
    const std::vector<DecodeJob> jobs = unpack<DecodeJob>(packed);
    const std::vector<Shared> shared = unpack<Shared>(packed_shared);
    if (shared.size() != jobs.size()) throw std::invalid_argument("expected something shared for every job");
    std::size_t bad_job = 0;
    BadByte bad;
    {
        nb::gil_scoped_release release;
        for (std::size_t i = 0; i < jobs.size() && !bad.found; i++)
            bad = check_ternary(jobs[bad_job = i], shared[i].numbers, block);
        if (!bad.found)
            parallel_for(jobs.size(), threads,
                         [&](std::size_t i, Scratch&) { decode_ternary(jobs[i], shared[i].numbers, block); });
    }
    return bad.found ? nb::object(nb::make_tuple(bad_job, bad.place, bad.got)) : nb::none();
}

template <typename Job, typename Run> void run_all(const nb::bytes& packed, int threads, Run run) {
    const std::vector<Job> jobs = unpack<Job>(packed);
    nb::gil_scoped_release release;
    parallel_for(jobs.size(), threads, [&](std::size_t i, Scratch&) { run(jobs[i]); });
}

}  // namespace

void bind_shared(nb::module_& m) {
    m.def("shared_norms", [](const nb::bytes& jobs, std::size_t block, bool l2, bool squared, int threads) {
        run_all<StatisticJob>(jobs, threads, [=](const StatisticJob& job) { shared_norms(job, block, l2, squared); });
    }, nb::arg("jobs"), nb::arg("block"), nb::arg("l2"), nb::arg("squared"), nb::arg("threads"));
    m.def("encode_global_linear", [](const nb::bytes& jobs, const nb::bytes& shared, int bits, int levels, bool squared,
                                     int threads) {
        const GlobalLinear settings{bits, levels, squared};
        return encode_all(jobs, shared, threads, [=](const EncodeJob& job, const f32* own, Scratch& scratch) {
            return encode_global_linear(job, own, settings, scratch);
        });
    }, nb::arg("jobs"), nb::arg("shared"), nb::arg("bits"), nb::arg("levels"), nb::arg("squared"), nb::arg("threads"));
    m.def("decode_global_linear", [](const nb::bytes& jobs, const nb::bytes& shared, int bits, int levels, bool squared,
                                     int threads) {
        const GlobalLinear settings{bits, levels, squared};
        decode_all(jobs, shared, threads, [=](const DecodeJob& job, const f32* own, Scratch&) {
            decode_global_linear(job, own, settings);
        });
    }, nb::arg("jobs"), nb::arg("shared"), nb::arg("bits"), nb::arg("levels"), nb::arg("squared"), nb::arg("threads"));
    m.def("reduce_global_linear", [](const nb::bytes& jobs, int bits, int threads) {
        run_all<ReduceJob>(jobs, threads, [=](const ReduceJob& job) { reduce_global_linear(job, bits); });
    }, nb::arg("jobs"), nb::arg("bits"), nb::arg("threads"));
    m.def("encode_global_exponential", [](const nb::bytes& jobs, const nb::bytes& shared, int levels, bool squared,
                                          int threads) {
        const GlobalExponential settings{levels, squared};
        return encode_all(jobs, shared, threads, [=](const EncodeJob& job, const f32* own, Scratch&) {
            return encode_global_exponential(job, own, settings);
        });
    }, nb::arg("jobs"), nb::arg("shared"), nb::arg("levels"), nb::arg("squared"), nb::arg("threads"));
    m.def("decode_global_exponential", [](const nb::bytes& jobs, const nb::bytes& shared, int levels, bool squared,
                                          int threads) {
        const GlobalExponential settings{levels, squared};
        decode_all(jobs, shared, threads, [=](const DecodeJob& job, const f32* own, Scratch&) {
            decode_global_exponential(job, own, settings);
        });
    }, nb::arg("jobs"), nb::arg("shared"), nb::arg("levels"), nb::arg("squared"), nb::arg("threads"));
    m.def("reduce_global_exponential", [](const nb::bytes& jobs, int threads) {
        run_all<ReduceJob>(jobs, threads, [](const ReduceJob& job) { reduce_global_exponential(job); });
    }, nb::arg("jobs"), nb::arg("threads"));
    m.def("encode_ternary", [](const nb::bytes& jobs, const nb::bytes& shared, std::size_t block, double clip,
                               int threads) {
        const Ternary settings{block, clip};
        return encode_all(jobs, shared, threads, [=](const EncodeJob& job, const f32* own, Scratch& scratch) {
            return encode_ternary(job, own, settings, scratch);
        });
    }, nb::arg("jobs"), nb::arg("shared"), nb::arg("block"), nb::arg("clip"), nb::arg("threads"));
    m.def("decode_ternary", &decode_ternary_all, nb::arg("jobs"), nb::arg("shared"), nb::arg("block"),
          nb::arg("threads"));
    m.def("encode_top_chunks", [](const nb::bytes& jobs, const nb::bytes& shared, int number, std::size_t chunk,
                                  int threads) {
        return encode_all(jobs, shared, threads, [=](const EncodeJob& job, const f32* own, Scratch& scratch) {
            return encode_top_chunks(job, own, Number{number}, chunk, scratch);
        });
    }, nb::arg("jobs"), nb::arg("shared"), nb::arg("number"), nb::arg("chunk"), nb::arg("threads"));
    m.def("decode_top_chunks", [](const nb::bytes& jobs, const nb::bytes& shared, int number, std::size_t chunk,
                                  int threads) {
        decode_all(jobs, shared, threads, [=](const DecodeJob& job, const f32* own, Scratch&) {
            decode_top_chunks(job, own, Number{number}, chunk);
        });
    }, nb::arg("jobs"), nb::arg("shared"), nb::arg("number"), nb::arg("chunk"), nb::arg("threads"));
}

}  // namespace thinwire
