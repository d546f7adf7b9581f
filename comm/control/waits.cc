#include "evenkeel/comm/control/waits.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/librarys_thread.h"

namespace evenkeel::internal {
namespace {

thread_local struct {
  int depth = 0;
  int64_t since_ns = 0;
  int64_t total_ns = 0;
} counted_waits;

int64_t NowNs() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

uint64_t NextId() {
  static std::atomic<uint64_t> next = 0;
  return next++;
}

}  // namespace

int64_t NanosWaited() { return counted_waits.total_ns; }

CountedWait::CountedWait() {
  if (counted_waits.depth++ == 0) counted_waits.since_ns = NowNs();
}

CountedWait::~CountedWait() {
  if (--counted_waits.depth == 0) counted_waits.total_ns += NowNs() - counted_waits.since_ns;
}

// The groups that one thread uses. Destroyed with the thread, it removes the thread from their
// lists.
class Memberships {
 public:
  ~Memberships() {
    for (const Membership& one : all_) {
      if (std::shared_ptr<Waits> waits = one.waits.lock()) waits->Leave(std::this_thread::get_id());
    }
  }

  void Add(Waits& waits) {
    if (std::any_of(all_.begin(), all_.end(),
                    [&](const Membership& one) { return one.id == waits.id_; }))
      return;
    all_.erase(std::remove_if(all_.begin(), all_.end(),
                              [](const Membership& one) { return one.waits.expired(); }),
               all_.end());
    all_.push_back({waits.id_, waits.weak_from_this()});
    waits.Join(std::this_thread::get_id());
  }

 private:
  struct Membership {
    uint64_t id = 0;
    std::weak_ptr<Waits> waits;
  };
  std::vector<Membership> all_;
};

Waits::Waits() : id_(NextId()) {}

std::shared_ptr<Waits> Waits::Create() { return std::shared_ptr<Waits>(new Waits); }

void Waits::Use() {
  if (IsTheLibrarysThread()) return;
  thread_local Memberships memberships;
  memberships.Add(*this);
}

void Waits::Join(std::thread::id thread) {
  absl::MutexLock lock(&mutex_);
  threads_[thread];
}

void Waits::Leave(std::thread::id thread) {
  absl::MutexLock lock(&mutex_);
  threads_.erase(thread);
}

Waits::Snapshot Waits::Now() const {
  absl::MutexLock lock(&mutex_);
  Snapshot now{.everyone_waits = !threads_.empty() && callbacks_ == 0};
  for (const auto& [thread, waiting] : threads_) {
    if (waiting.empty() || waiting.back().is_over()) {
      now.everyone_waits = false;
    } else {
      now.waits.push_back({waiting.back().describe(), waiting.back().id, waiting.back().since});
    }
  }
  std::ranges::sort(now.waits, {}, &Seen::id);
  return now;
}

Waits::Scope::Scope(std::shared_ptr<Waits> waits, std::function<Wait()> describe,
                    std::function<bool()> is_over)
    : waits_(IsTheLibrarysThread() ? nullptr : std::move(waits)) {
  if (waits_ == nullptr) return;
  waits_->Use();
  absl::MutexLock lock(&waits_->mutex_);
  waits_->threads_[std::this_thread::get_id()].push_back(
      {std::move(describe), std::move(is_over), waits_->next_wait_++, SteadyNow()});
}

Waits::Scope::~Scope() {
  if (waits_ == nullptr) return;
  absl::MutexLock lock(&waits_->mutex_);
  waits_->threads_[std::this_thread::get_id()].pop_back();
}

Waits::Callbacks::Callbacks(std::shared_ptr<Waits> waits) : waits_(std::move(waits)) {
  if (waits_ == nullptr) return;
  absl::MutexLock lock(&waits_->mutex_);
  ++waits_->callbacks_;
}

Waits::Callbacks::~Callbacks() {
  if (waits_ == nullptr) return;
  absl::MutexLock lock(&waits_->mutex_);
  --waits_->callbacks_;
}

}  // namespace evenkeel::internal
