// Measures the cost, for each operation, of finding out whether its buffer is registered, beside a
// lock and a copy of a shared_ptr, which is the least possible cost.
//
//   bazel run //comm/shm:registered_memory_benchmark

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "benchmark/benchmark.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/base/shared_memory.h"
#include "evenkeel/comm/shm/registered_memory.h"

namespace evenkeel::internal {
namespace {

std::vector<Memory> Allocate(int64_t count) {
  std::vector<Memory> all;
  for (int64_t i = 0; i < count; ++i) all.push_back(AllocateRegistered(PageBytes()).value());
  return all;
}

void BM_FindRegistered(benchmark::State& state) {
  const std::vector<Memory> all = Allocate(state.range(0));
  size_t i = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(FindRegistered(all[i].data.get(), PageBytes()));
    if (++i == all.size()) i = 0;
  }
}
BENCHMARK(BM_FindRegistered)->Arg(1)->Arg(10)->Arg(100)->Arg(1000);

void BM_FindMemoryThatIsNotRegistered(benchmark::State& state) {
  const std::vector<Memory> all = Allocate(state.range(0));
  const std::vector<std::byte> other(1000);
  for (auto _ : state) benchmark::DoNotOptimize(FindRegistered(other.data(), 1000));
}
BENCHMARK(BM_FindMemoryThatIsNotRegistered)->Arg(100);

void BM_LockAndCopyOfSharedPointer(benchmark::State& state) {
  absl::Mutex mutex;
  const auto value = std::make_shared<int>(1);
  for (auto _ : state) {
    absl::ReaderMutexLock lock(&mutex);
    benchmark::DoNotOptimize(std::shared_ptr<int>(value));
  }
}
BENCHMARK(BM_LockAndCopyOfSharedPointer);

}  // namespace
}  // namespace evenkeel::internal
