// The kernels of low rank, for the Python module.
#include <algorithm>

#include "low_rank.h"
#include "module.h"

namespace thinwire {
namespace {

constexpr std::uint64_t PART = 1 << 16;  // elements of a product that one thread computes at a time

void orthogonalise_all(const nb::bytes& packed, double dependent, int threads) {
    const std::vector<Factor> factors = unpack<Factor>(packed);
    nb::gil_scoped_release release;
    parallel_for(factors.size(), threads,
                 [&](std::size_t i, Scratch& scratch) { orthogonalise(factors[i], dependent, scratch); });
}

void reconstruct_one(const nb::bytes& packed, int threads) {
    const std::vector<Product> products = unpack<Product>(packed);
    if (products.size() != 1 || !products[0].rank) throw std::invalid_argument("expected one product of rank 1 or more");
    const Product& product = products[0];
    const std::uint64_t rows = std::max<std::uint64_t>(1, PART / std::max<std::uint64_t>(1, product.n));
    nb::gil_scoped_release release;
    parallel_for((product.m + rows - 1) / rows, threads, [&](std::size_t i, Scratch&) {
        reconstruct(product, i * rows, std::min<std::uint64_t>(product.m, (i + 1) * rows));
    });
}

// The uniforms of elements [0, n) of an encoder's stream.
void draw_uniforms(const nb::bytes& packed, std::uint64_t out, std::uint64_t n) {
    const std::vector<Stream> streams = unpack<Stream>(packed);
    if (streams.size() != 1) throw std::invalid_argument("expected one stream");
    EncodeJob job{};
    job.key = streams[0].key;
    job.offset = streams[0].offset;
    job.step = streams[0].step;
    job.stream = streams[0].stream;
    nb::gil_scoped_release release;
    std::vector<float> buffer(uniforms_size(n));
    const std::uint64_t first = job.offset / UNIFORM_CHUNK;
    uniform_chunks(job, first, (job.offset + n + UNIFORM_CHUNK - 1) / UNIFORM_CHUNK, buffer.data());
    std::memcpy(reinterpret_cast<void*>(out), buffer.data() + job.offset % UNIFORM_CHUNK, sizeof(float) * n);
}

}  // namespace

void bind_low_rank(nb::module_& m) {
    m.def("orthogonalise", &orthogonalise_all, nb::arg("factors"), nb::arg("dependent"), nb::arg("threads"));
    m.def("reconstruct", &reconstruct_one, nb::arg("product"), nb::arg("threads"));
    m.def("draw_uniforms", &draw_uniforms, nb::arg("stream"), nb::arg("out"), nb::arg("n"));
}

}  // namespace thinwire
