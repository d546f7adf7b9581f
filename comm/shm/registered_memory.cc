#include "evenkeel/comm/shm/registered_memory.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// Somebody who wants to know of freed memory. The lock is held during the call, so who has stopped
// is not called.
class Listener {
 public:
  explicit Listener(std::function<void(uint64_t)> freed) : freed_(std::move(freed)) {}

  void Tell(uint64_t id) {
    absl::MutexLock lock(&mutex_);
    if (freed_) freed_(id);
  }
  void Stop() {
    absl::MutexLock lock(&mutex_);
    freed_ = nullptr;
  }

 private:
  absl::Mutex mutex_;
  std::function<void(uint64_t)> freed_ ABSL_GUARDED_BY(mutex_);
};

struct Piece {
  uintptr_t begin = 0, end = 0;  // All of its pages.
  uintptr_t asked_end = 0;
  std::shared_ptr<RegisteredMemory> memory;
};

// All that users have. Pieces are few, looked up in each operation and changed hardly ever: so one
// array, sorted.
class Table {
 public:
  // Lives for ever: memory may be freed after main().
  static Table& Instance() {
    static Table* const table = new Table;
    return *table;
  }

  std::shared_ptr<RegisteredMemory> Add(std::shared_ptr<SharedMemory> memory, int64_t asked) {
    auto registered = std::make_shared<RegisteredMemory>();
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory->data());
    Piece piece{begin, begin + memory->bytes(), begin + asked, registered};
    registered->memory = std::move(memory);
    absl::MutexLock lock(&mutex_);
    registered->id = ++last_id_;
    pieces_.insert(After(begin), std::move(piece));
    return registered;
  }

  void Remove(const RegisteredMemory& memory) {
    std::vector<std::shared_ptr<Listener>> listeners;
    {
      absl::MutexLock lock(&mutex_);
      pieces_.erase(After(reinterpret_cast<uintptr_t>(memory.memory->data())) - 1);
      listeners = listeners_;
    }
    for (const auto& listener : listeners) listener->Tell(memory.id);
    memory.memory->Discard();  // Peers unmap it when they next look.
  }

  std::optional<RegisteredRange> Find(uintptr_t begin, uintptr_t end) {
    absl::ReaderMutexLock lock(&mutex_);
    const auto after = After(begin);
    if (after == pieces_.begin()) return std::nullopt;
    const Piece& piece = *std::prev(after);
    if (end > piece.end || piece.memory->is_retired.load(std::memory_order_acquire))
      return std::nullopt;
    const uintptr_t in_page = PageBytes() - 1;
    const bool is_writable =
        (begin & in_page) == 0 && ((end & in_page) == 0 || end == piece.asked_end);
    return RegisteredRange{piece.memory, static_cast<int64_t>(begin - piece.begin), is_writable};
  }

  void Add(std::shared_ptr<Listener> listener) {
    absl::MutexLock lock(&mutex_);
    listeners_.push_back(std::move(listener));
  }

  void Remove(const std::shared_ptr<Listener>& listener) {
    {
      absl::MutexLock lock(&mutex_);
      std::erase(listeners_, listener);
    }
    listener->Stop();
  }

 private:
  // The first piece that begins behind `address`.
  std::vector<Piece>::iterator After(uintptr_t address) ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return std::upper_bound(pieces_.begin(), pieces_.end(), address,
                            [](uintptr_t a, const Piece& piece) { return a < piece.begin; });
  }

  absl::Mutex mutex_;
  uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Piece> pieces_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Listener>> listeners_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<Memory> AllocateRegistered(int64_t bytes) {
  EK_ASSIGN_OR_RETURN(std::shared_ptr<SharedMemory> memory, SharedMemory::Create(bytes));
  std::byte* const data = memory->data();
  std::shared_ptr<RegisteredMemory> registered = Table::Instance().Add(std::move(memory), bytes);
  return Memory{std::shared_ptr<void>(data, [registered = std::move(registered)](
                                                void*) { Table::Instance().Remove(*registered); }),
                bytes};
}

std::optional<RegisteredRange> FindRegistered(const void* data, int64_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  if (bytes < 0 || begin > UINTPTR_MAX - bytes) return std::nullopt;
  return Table::Instance().Find(begin, begin + bytes);
}

std::shared_ptr<void> WhenRegisteredIsFreed(std::function<void(uint64_t id)> freed) {
  auto listener = std::make_shared<Listener>(std::move(freed));
  Table::Instance().Add(listener);
  return std::shared_ptr<void>(listener.get(),
                               [listener](void*) { Table::Instance().Remove(listener); });
}

}  // namespace evenkeel::internal
