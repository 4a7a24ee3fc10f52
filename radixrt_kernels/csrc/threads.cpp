// A small thread pool that is quiet when it has nothing to do.
//
// A step of a model is hundreds of parallel regions with some microseconds of Python between them. Waking a sleeping
// thread costs more than most regions, so threads spin for about as long as such a gap is before they sleep; no longer,
// since the cores also belong to torch's threads and to the server's other processes.
#include "threads.hpp"

#include <pthread.h>
#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

namespace radixrt {

namespace {

constexpr auto kSpin = std::chrono::microseconds(30);

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Spins until `done()`, for `kSpin` at most; whether it is done.
template <class Done>
bool spin_until(Done done) {
  auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      pause_briefly();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

int usable_cores() {
#if defined(__linux__)
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
#endif
  unsigned cores_there = std::thread::hardware_concurrency();
  return cores_there ? static_cast<int>(cores_there) : 1;
}

// One round is one call of `run`. Its indices are taken through `ticket_`, which holds the round's number and how many indices
// are left. A worker that wakes late finds none left, or another round's, and so never touches a context that is gone: nobody
// waits for sleepers.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { serve(thread); });
  }

  ~Pool() {
    stop_.store(true);
    start_round(0);
    for (auto& worker : workers_) worker.join();
  }

  void run(int64_t count, detail::Work work, void* context) {
    count_.store(count, std::memory_order_relaxed);
    work_.store(work, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    unfinished_.store(count, std::memory_order_relaxed);
    start_round(count);
    take_indices(0);
    while (int64_t left = unfinished_.load(std::memory_order_acquire)) {
      if (!spin_until([&] { return unfinished_.load(std::memory_order_acquire) == 0; })) unfinished_.wait(left);
    }
  }

 private:
  static constexpr uint64_t kLeftBits = 40;  // 24 bits of round: a worker would have to sleep through 2^24 of them

  void start_round(int64_t count) {
    uint32_t round = round_.load(std::memory_order_relaxed) + 1;
    ticket_.store(uint64_t{round} << kLeftBits | static_cast<uint64_t>(count), std::memory_order_release);
    round_.store(round, std::memory_order_release);
    round_.notify_all();
  }

  void serve(int thread) {
    uint32_t seen = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
      if (!spin_until([&] { return round_.load(std::memory_order_acquire) != seen; })) round_.wait(seen);
      seen = round_.load(std::memory_order_acquire);
      take_indices(thread);
    }
  }

  void take_indices(int thread) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (int64_t left = ticket & ((uint64_t{1} << kLeftBits) - 1)) {
      int64_t count = count_.load(std::memory_order_relaxed);
      detail::Work work = work_.load(std::memory_order_relaxed);
      void* context = context_.load(std::memory_order_relaxed);
      // If this succeeds, the round was not over and what was read above is its own.
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      work(context, count - left, thread);
      if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_one();
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  std::vector<std::thread> workers_;
  alignas(64) std::atomic<uint32_t> round_{0};
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> count_{0};
  std::atomic<detail::Work> work_{nullptr};
  std::atomic<void*> context_{nullptr};
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> unfinished_{0};
};

std::mutex in_use;
Pool* pool = nullptr;  // made at the first parallel call; never torn down at exit, where its threads may be gone already
int wanted_threads = usable_cores();

// A forked child has none of its parent's threads, and a lock that may be held by one of them.
void forget_pool() {
  pool = nullptr;
  new (&in_use) std::mutex;
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, forget_pool);

}  // namespace

int num_threads() { return wanted_threads; }

void set_num_threads(int threads) {
  std::lock_guard lock(in_use);
  if (threads == wanted_threads) return;
  wanted_threads = threads;
  delete pool;
  pool = nullptr;
}

void detail::run_in_parallel(int64_t count, Work work, void* context) {
  std::unique_lock lock(in_use, std::try_to_lock);
  if (!lock) {
    for (int64_t index = 0; index < count; ++index) work(context, index, 0);
    return;
  }
  if (pool == nullptr) pool = new Pool(wanted_threads);
  pool->run(count, work, context);
}

}  // namespace radixrt
