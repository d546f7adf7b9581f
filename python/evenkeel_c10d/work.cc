#include "work.h"

#include <ATen/core/ivalue.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "error.h"

#if defined(__GLIBCXX__) && defined(__x86_64__)
// Torch's headers wait for futures inline. GCC 12 would bind that to a version of the function that
// the libstdc++ of systems with glibc 2.34 lacks; the older version does the same. In this file
// alone, since build.py compiles all sources as one.
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif

namespace evenkeel::bridge {
namespace {

// Keeps a rank's group from being judged stuck: the callback goes on, on another thread.
using Pending = std::shared_ptr<void>;

// Calls `landed` once, when the last of evenkeel's works has ended, on the thread that ends it.
void OnLanded(const Flight& flight, std::function<void(Pending)> landed) {
  struct Countdown {
    std::atomic<size_t> left{1};
    std::function<void(Pending)> landed;
    void Down(Pending pending) {
      if (left.fetch_sub(1) == 1) std::exchange(landed, nullptr)(std::move(pending));
    }
  };
  auto countdown = std::make_shared<Countdown>();
  countdown->landed = std::move(landed);
  for (const auto& work : flight.works()) {
    countdown->left.fetch_add(1);
    work->OnDone([countdown](Pending pending) { countdown->Down(std::move(pending)); });
  }
  countdown->Down(nullptr);
}

// As Gloo's: a list of tensors, or a list of lists where an operation has several.
c10::intrusive_ptr<c10::ivalue::Future> NewFuture(size_t lists) {
  c10::TypePtr type = c10::ListType::create(c10::TensorType::get());
  if (lists > 1) type = c10::ListType::create(type);
  return c10::make_intrusive<c10::ivalue::Future>(type);
}

c10::IValue FutureValue(const std::vector<std::vector<at::Tensor>>& results) {
  if (results.size() > 1) return c10::IValue(results);
  return c10::IValue(results.empty() ? std::vector<at::Tensor>{} : results.front());
}

}  // namespace

// ---- Completer ----

struct Completer::Queue : std::enable_shared_from_this<Queue> {
  struct Landed {
    c10::intrusive_ptr<Work> work;
    Pending pending;
  };

  // An idle thread ends after this time, so that it does not count as one that uses the group.
  static constexpr std::chrono::milliseconds kIdle{500};
  static inline thread_local const Queue* of_this_thread = nullptr;

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Landed> landed;
  size_t threads = 0, idle = 0;
  bool is_stopped = false;

  void Push(Landed one) {
    {
      const std::lock_guard lock(mutex);
      if (!is_stopped) {
        landed.push_back(std::move(one));
        if (idle >= landed.size()) return changed.notify_one();
        try {
          std::thread([queue = shared_from_this()] { queue->Run(); }).detach();
          ++threads;
          return;
        } catch (const std::system_error&) {  // The process may have no more threads.
          if (threads > 0) return;
          one = std::move(landed.back());
          landed.pop_back();
        }
      }
    }
    one.work->Complete();
  }

  void Run() {
    of_this_thread = this;
    std::unique_lock lock(mutex);
    while (true) {
      while (!landed.empty()) {
        Landed one = std::move(landed.front());
        landed.pop_front();
        lock.unlock();
        one.work->Complete();
        one = {};  // May take the GIL.
        lock.lock();
      }
      ++idle;
      const bool has_news =
          changed.wait_for(lock, kIdle, [this] { return is_stopped || !landed.empty(); });
      --idle;
      if (landed.empty() && (is_stopped || !has_news)) break;
    }
    --threads;
    changed.notify_all();
  }

  void Close() {
    const std::lock_guard lock(mutex);
    is_stopped = true;
    changed.notify_all();
  }

  bool Stop(std::chrono::milliseconds timeout) {
    Close();
    std::unique_lock lock(mutex);
    const size_t own = of_this_thread == this;  // A callback destroys the group.
    return changed.wait_for(lock, timeout, [&] { return threads <= own; });
  }
};

Completer::Completer() : queue_(std::make_shared<Queue>()) {}

Completer::~Completer() { queue_->Close(); }

void Completer::Watch(c10::intrusive_ptr<Work> work) {
  // Boxed, so that the last reference is not dropped by evenkeel's thread with the callback.
  auto box = std::make_shared<c10::intrusive_ptr<Work>>(std::move(work));
  const Flight& flight = (*box)->flight();
  OnLanded(flight, [queue = queue_, box](Pending pending) {
    queue->Push({std::move(*box), std::move(pending)});
  });
}

bool Completer::Stop(std::chrono::milliseconds timeout) { return queue_->Stop(timeout); }

bool Completer::IsRunning() { return Queue::of_this_thread != nullptr; }

// ---- Flight ----

Flight::Flight(Operation operation, std::vector<std::shared_ptr<abi::Work>> works,
               std::shared_ptr<const std::atomic<bool>> has_several_issuers)
    : works_(std::move(works)),
      operation_(std::move(operation)),
      has_several_issuers_(std::move(has_several_issuers)) {}

bool Flight::HasLanded() const {
  for (const auto& work : works_) {
    if (!work->IsDone()) return false;
  }
  return true;
}

bool Flight::TryEnd() {
  if (state_.load(std::memory_order_acquire) == kEnded) return true;
  if (!HasLanded()) return false;
  int expected = kFlying;
  if (!state_.compare_exchange_strong(expected, kEnding)) return expected == kEnded;
  for (const auto& work : works_) {
    if (failure_.code == abi::Code::kOk) failure_ = work->failure();
  }
  if (failure_.kind == "disagreement" && *has_several_issuers_) {
    failure_.message +=
        ". On this rank several threads have called collectives of this group: give each thread a "
        "group of its own (dist.new_group()), or let them call in one order on all ranks";
  }
  if (failure_.code == abi::Code::kOk && operation_.has_copies()) {
    std::string error;
    if (!Try(&error, [this] { operation_.CopyBack(); })) {
      error = "evenkeel: the result cannot be copied to the tensor that was given: " + error;
      failure_ = {.code = abi::Code::kInvalidArgument, .message = std::move(error)};
    }
  }
  const Operation released = std::move(operation_);  // Its tensors may take the GIL.
  state_.store(kEnded, std::memory_order_release);
  state_.notify_all();
  return true;
}

void Flight::Wait() {
  for (const auto& work : works_) work->Wait();
  while (!TryEnd()) state_.wait(kEnding);
}

// ---- Work ----

Work::Work(const Attributes& attributes, std::shared_ptr<Flight> flight,
           std::shared_ptr<Completer> completer)
    : c10d::Work(attributes.rank, attributes.type, attributes.title, attributes.inputs),
      flight_(std::move(flight)),
      completer_(std::move(completer)),
      source_rank_(attributes.source_rank),
      sender_(attributes.sender),
      sequence_(attributes.sequence),
      timeout_(attributes.timeout),
      results_(attributes.results) {}

void Work::WatchOnce() {
  {
    const std::lock_guard lock(future_mutex_);
    if (std::exchange(is_watched_, true)) return;
  }
  completer_->Watch(c10::intrusive_ptr<Work>::unsafe_reclaim_from_nonowning(this));
}

void Work::Complete() {
  flight_->Wait();  // At most for a copy.
  EndProfilerRange();
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(future_mutex_);
    if (std::exchange(is_complete_, true)) return;
    future = future_;
  }
  if (future != nullptr) Fill(*future);
}

void Work::Fill(c10::ivalue::Future& future) const {
  const abi::Failure& failure = flight_->failure();
  if (failure.code == abi::Code::kOk) {
    future.markCompleted(FutureValue(results_));
  } else {
    future.setError(ExceptionOf(failure));
  }
}

bool Work::isCompleted() {
  if (!flight_->TryEnd()) return false;
  EndProfilerRange();
  return true;
}

bool Work::isSuccess() const {
  return flight_->TryEnd() && flight_->failure().code == abi::Code::kOk;
}

std::exception_ptr Work::exception() const {
  if (!flight_->TryEnd() || flight_->failure().code == abi::Code::kOk) return nullptr;
  return ExceptionOf(flight_->failure());
}

int Work::sourceRank() const {
  TORCH_CHECK(source_rank_ >= 0 || sender_ != nullptr,
              "evenkeel: only a work of recv() has a source rank.");
  if (sender_ == nullptr) return source_rank_;
  TORCH_CHECK(
      isSuccess(),
      "evenkeel: a recv() from any rank has no source rank before the message has arrived.");
  return *sender_;
}

std::vector<at::Tensor> Work::result() {
  TORCH_CHECK(isCompleted(), "evenkeel: result() is valid only after wait().");
  TORCH_CHECK(results_.size() <= 1, "evenkeel: the work has ", results_.size(),
              " lists of results; use the lists that were given to the operation.");
  return results_.empty() ? std::vector<at::Tensor>{} : results_.front();
}

bool Work::wait(std::chrono::milliseconds timeout) {
  if (timeout > kNoTimeout && !WaitUntilLanded(timeout)) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("evenkeel: the work has not ended within ", timeout.count(),
                             " ms, the timeout of wait(). It continues."));
  }
  flight_->Wait();
  EndProfilerRange();
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(future_mutex_);
    future = future_;
  }
  if (future != nullptr) {
    // In a callback this may be the thread that would complete it.
    if (Completer::IsRunning()) Complete();
    future->wait();
  }
  const abi::Failure& failure = flight_->failure();
  if (failure.code != abi::Code::kOk) std::rethrow_exception(ExceptionOf(failure));
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  const bool has_ended = isCompleted();
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(future_mutex_);
    if (future_ != nullptr) return future_;
    future = NewFuture(results_.size());
    if (has_ended || is_complete_) {
      is_complete_ = true;
      Fill(*future);  // No other thread has it yet, so no callback runs here.
    }
    future_ = future;
    if (is_complete_) return future;
  }
  WatchOnce();
  return future;
}

void Work::EndProfilerRange() {
  if (!recordFunctionEndCallback_) return;
  std::call_once(profiled_, [this] { recordFunctionEndCallback_(); });
}

bool Work::WaitUntilLanded(std::chrono::milliseconds timeout) {
  struct Landing {
    std::mutex mutex;
    std::condition_variable changed;
    bool has_landed = false;
  };
  auto landing = std::make_shared<Landing>();
  OnLanded(*flight_, [landing](const Pending&) {
    const std::lock_guard lock(landing->mutex);
    landing->has_landed = true;
    landing->changed.notify_all();
  });
  std::unique_lock lock(landing->mutex);
  return landing->changed.wait_for(lock, timeout, [&] { return landing->has_landed; });
}

}  // namespace evenkeel::bridge
