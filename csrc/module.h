// What the files that make up the Python module share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <stdexcept>
#include <vector>

namespace thinwire {

namespace nb = nanobind;

template <typename Job> std::vector<Job> unpack(const nb::bytes& packed) {
    if (packed.size() % sizeof(Job)) throw std::invalid_argument("packed jobs of the wrong size");
    std::vector<Job> jobs(packed.size() / sizeof(Job));
    if (!jobs.empty()) std::memcpy(jobs.data(), packed.data(), packed.size());
    return jobs;
}

void bind_shared(nb::module_& m);    // kinds whose scale is agreed over ranks
void bind_low_rank(nb::module_& m);  // thin factors of matrices

}  // namespace thinwire
