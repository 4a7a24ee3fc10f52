// A thread pool whose threads spin briefly and then sleep.
//
// A step of a model has hundreds of parallel regions with some microseconds of Python between them. Waking a sleeping
// thread costs more than most regions, so threads spin for about the length of such a gap before they sleep. They do not spin longer,
// because torch's threads and the other processes of the server use the same cores.
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

// Spins until `done()`, for at most `kSpin`. Returns whether it is done.
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

// One round is one call of `run`. Each thread has a range of indices. It takes them from the front, so that it works on adjacent
// indices and can prefetch. Then it takes indices from the back of the other threads' ranges. A range also has the number of its
// round. A worker that wakes late finds an empty range, or a range of a later round, so it never uses an old context. The caller does
// not wait for sleeping workers.
class Pool {
 public:
  static constexpr int64_t kMostIndices = (1 << 20) - 1;

  explicit Pool(int threads) : ranges_(threads) {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { serve(thread); });
  }

  ~Pool() {
    stop_.store(true);
    start_round(0);
    for (auto& worker : workers_) worker.join();
  }

  void run(int64_t count, detail::Work work, void* context) {
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
  // 24 bits of round (it repeats after 2^24 rounds), 20 bits of the first index and 20 bits of the end.
  struct Range {
    uint64_t bits;
    static Range of(uint32_t round, uint64_t begin, uint64_t end) { return {uint64_t{round} << 40 | begin << 20 | end}; }
    int64_t begin() const { return bits >> 20 & kMostIndices; }
    int64_t end() const { return bits & kMostIndices; }
    bool empty() const { return begin() == end(); }
    Range without_first() const { return {bits + (1 << 20)}; }
    Range without_last() const { return {bits - 1}; }
  };

  struct alignas(64) Share {
    std::atomic<uint64_t> left{0};
  };

  void start_round(int64_t count) {
    uint32_t round = round_.load(std::memory_order_relaxed) + 1;
    auto threads = static_cast<int64_t>(ranges_.size());
    for (int64_t thread = 0; thread < threads; ++thread) {
      auto range = Range::of(round, count * thread / threads, count * (thread + 1) / threads);
      ranges_[thread].left.store(range.bits, std::memory_order_release);
    }
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
    auto threads = static_cast<int>(ranges_.size());
    for (int i = 0; i < threads; ++i) {
      int owner = (thread + i) % threads;
      while (take_one(owner, thread)) {}
    }
  }

  // Returns whether `owner` had an index left.
  bool take_one(int owner, int thread) {
    auto& left = ranges_[owner].left;
    Range range{left.load(std::memory_order_acquire)};
    while (!range.empty()) {
      detail::Work work = work_.load(std::memory_order_relaxed);
      void* context = context_.load(std::memory_order_relaxed);
      Range rest = owner == thread ? range.without_first() : range.without_last();
      // If this succeeds, the round was not over and the values read above belong to it.
      if (!left.compare_exchange_weak(range.bits, rest.bits, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      work(context, owner == thread ? range.begin() : rest.end(), thread);
      if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_one();
      return true;
    }
    return false;
  }

  std::vector<std::thread> workers_;
  std::vector<Share> ranges_;
  alignas(64) std::atomic<uint32_t> round_{0};
  std::atomic<bool> stop_{false};
  std::atomic<detail::Work> work_{nullptr};
  std::atomic<void*> context_{nullptr};
  alignas(64) std::atomic<int64_t> unfinished_{0};
};

std::mutex in_use;
Pool* pool = nullptr;  // made at the first parallel call; not destroyed at exit, because its threads may have ended already
int wanted_threads = usable_cores();

// A forked child has none of the parent's threads; a thread of the parent may hold the lock.
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
  if (count > Pool::kMostIndices) {
    for (int64_t index = 0; index < count; ++index) work(context, index, 0);
    return;
  }
  pool->run(count, work, context);
}

}  // namespace radixrt
