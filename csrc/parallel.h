// Runs the jobs of one call on threads that live only as long as the call, so that nothing is left to break after fork().
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace thinwire {

// Memory that one thread reuses from job to job. Contents are unspecified.
class Scratch {
public:
    template <typename T> T* get(std::size_t count) {
        if (count * sizeof(T) > nbytes_) {
            nbytes_ = count * sizeof(T);
            memory_.reset(new std::byte[nbytes_]);
        }
        return reinterpret_cast<T*>(memory_.get());
    }

private:
    std::size_t nbytes_ = 0;
    std::unique_ptr<std::byte[]> memory_;
};

// Call run(index, scratch) for every index below num_jobs. Which thread runs which job never shows in the result.
template <typename Run> void parallel_for(std::size_t num_jobs, int threads, Run run) {
    std::atomic<std::size_t> next{0};
    std::exception_ptr error;
    std::mutex error_mutex;
    auto work = [&] {
        try {
            Scratch scratch;
            for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_jobs;) run(i, scratch);
        } catch (...) {
            std::lock_guard lock(error_mutex);
            error = std::current_exception();
        }
    };
    std::vector<std::thread> helpers;
    const std::size_t num_helpers = std::min<std::size_t>(threads - 1, num_jobs > 0 ? num_jobs - 1 : 0);
    helpers.reserve(num_helpers);
    try {
        while (helpers.size() < num_helpers) helpers.emplace_back(work);
    } catch (const std::system_error&) {
        // No more threads to be had: those that started, and this one, do the work.
    }
    work();
    for (std::thread& helper : helpers) helper.join();
    if (error) std::rethrow_exception(error);
}

}  // namespace thinwire
