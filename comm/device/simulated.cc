#include "evenkeel/comm/device/simulated.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <map>
#include <new>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/worker_thread.h"
#include "evenkeel/comm/device/guarded_memory.h"
#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/device/kernel_on_host.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr std::align_val_t kAlignment{256};

// A moment: shared by who records it, who waits for it, and the stream.
class Moment {
 public:
  using Clock = std::chrono::steady_clock;

  void Pass() {
    absl::MutexLock lock(&mutex_);
    has_passed_ = true;
    passed_at_ = Clock::now();
  }
  bool HasPassed() const {
    absl::MutexLock lock(&mutex_);
    return has_passed_;
  }
  bool WaitUntil(absl::Time deadline) const {
    absl::MutexLock lock(&mutex_);
    return AwaitUntil(mutex_, absl::Condition(&has_passed_), deadline);
  }
  Clock::time_point passed_at() const {
    absl::MutexLock lock(&mutex_);
    return passed_at_;
  }

 private:
  mutable absl::Mutex mutex_;
  bool has_passed_ ABSL_GUARDED_BY(mutex_) = false;
  Clock::time_point passed_at_ ABSL_GUARDED_BY(mutex_);
};

// A stream does one thing after the other, and all of them before it goes.
class SimulatedStream {
 public:
  explicit SimulatedStream(absl::Duration delay) : delay_(delay) {}

  void Put(const std::function<void()>& work) {
    const absl::Status posted = thread_.Post([delay = delay_, work] {
      if (delay > absl::ZeroDuration()) absl::SleepFor(delay);
      work();
    });
    if (!posted.ok()) work();  // It is the first, and the caller may wait.
  }

 private:
  const absl::Duration delay_;
  internal::WorkerThread thread_;
};

SimulatedStream& StreamOf(StreamRef stream) {
  return *static_cast<SimulatedStream*>(stream.handle);
}

// The arguments of a launch, which its caller may forget.
struct KeptArguments {
  std::vector<std::vector<std::byte>> values;
  std::vector<void*> pointers;
};

}  // namespace

struct SimulatedDevices::Impl {
  mutable absl::Mutex mutex;
  std::vector<int64_t> held ABSL_GUARDED_BY(mutex);  // By device.
  struct Failure {
    absl::Status answer;
    int after = 0;
  };
  std::map<std::string, Failure, std::less<>> failures ABSL_GUARDED_BY(mutex);
  std::vector<std::unique_ptr<internal::GuardedMemory>>
      guarded;  // By device, where memory is guarded.
};

SimulatedDevices::SimulatedDevices(const SimulatedOptions& options)
    : options_(options), impl_(std::make_unique<Impl>()) {
  absl::MutexLock lock(&impl_->mutex);
  impl_->held.assign(options.count, 0);
  // Freed memory is not used again, so the areas are larger than the limit on memory in use.
  for (int d = 0; options.guards_memory && d < options.count; ++d) {
    impl_->guarded.push_back(std::make_unique<internal::GuardedMemory>(16 * options.bytes));
  }
}

SimulatedDevices::~SimulatedDevices() = default;

absl::Status SimulatedDevices::Check(absl::string_view call, Device device) {
  if (device.is_cpu() || device.index < 0 || device.index >= options_.count) {
    return absl::InvalidArgumentError(absl::StrCat(call, ": there is no ", ToString(device),
                                                   ", but ", options_.count, " simulated devices"));
  }
  absl::MutexLock lock(&impl_->mutex);
  const auto failure = impl_->failures.find(call);
  if (failure == impl_->failures.end() || failure->second.after-- > 0) return absl::OkStatus();
  return failure->second.answer;
}

void SimulatedDevices::FailNext(absl::string_view call, absl::Status answer, int after) {
  absl::MutexLock lock(&impl_->mutex);
  impl_->failures.erase(std::string(call));
  if (!answer.ok()) impl_->failures.emplace(call, Impl::Failure{std::move(answer), after});
}

absl::StatusOr<int> SimulatedDevices::DeviceCount() {
  if (options_.count == 0)
    return absl::FailedPreconditionError("no CUDA device: none is simulated");
  return options_.count;
}

absl::StatusOr<DeviceFacts> SimulatedDevices::Facts(Device device) {
  EK_RETURN_IF_ERROR(Check("Facts", device));
  return DeviceFacts{.name = "simulated",
                     .total_bytes = options_.bytes,
                     .free_bytes = options_.bytes - held_bytes(device)};
}

int64_t SimulatedDevices::held_bytes(Device device) const {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->held[device.index];
}

absl::StatusOr<Memory> SimulatedDevices::Allocate(Device device, int64_t bytes) {
  EK_RETURN_IF_ERROR(Check("Allocate", device));
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("Allocate: ", bytes, " bytes"));
  {
    absl::MutexLock lock(&impl_->mutex);
    int64_t& held = impl_->held[device.index];
    if (held + bytes > options_.bytes) {
      return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes, " bytes on ",
                                                       ToString(device), ": ", held, " of ",
                                                       options_.bytes, " are taken"));
    }
    held += bytes;
  }
  const auto give_back = [this, device, bytes] {
    absl::MutexLock lock(&impl_->mutex);
    impl_->held[device.index] -= bytes;
  };
  if (options_.guards_memory) {
    internal::GuardedMemory& guarded = *impl_->guarded[device.index];
    void* const data = guarded.Take(bytes);
    if (data == nullptr) return absl::ResourceExhaustedError("the guarded memory is used up");
    return Memory{std::shared_ptr<void>(data, [give_back](void*) { give_back(); }), bytes};
  }
  // Exactly that size: asan detects an access beyond it.
  void* const data = ::operator new(std::max<int64_t>(bytes, 1), kAlignment);
  std::memset(data, 0, bytes);
  return Memory{std::shared_ptr<void>(data,
                                      [give_back](void* memory) {
                                        ::operator delete(memory, kAlignment);
                                        give_back();
                                      }),
                bytes};
}

absl::StatusOr<Memory> SimulatedDevices::AllocatePinned(int64_t bytes) {
  if (bytes < 0)
    return absl::InvalidArgumentError(absl::StrCat("AllocatePinned: ", bytes, " bytes"));
  void* const data = ::operator new(std::max<int64_t>(bytes, 1), kAlignment);
  std::memset(data, 0, bytes);
  return Memory{
      std::shared_ptr<void>(data, [](void* memory) { ::operator delete(memory, kAlignment); }),
      bytes};
}

absl::StatusOr<Stream> SimulatedDevices::CreateStream(Device device, StreamPriority /*priority*/) {
  EK_RETURN_IF_ERROR(Check("CreateStream", device));
  return Stream{std::make_shared<SimulatedStream>(options_.delay), device};
}

absl::StatusOr<Event> SimulatedDevices::Record(StreamRef stream) {
  EK_RETURN_IF_ERROR(Check("Record", stream.device));
  auto moment = std::make_shared<Moment>();
  StreamOf(stream).Put([moment] { moment->Pass(); });
  return Event{moment, stream.device};
}

absl::StatusOr<Event> SimulatedDevices::RecordTimed(StreamRef stream) {
  EK_RETURN_IF_ERROR(Check("RecordTimed", stream.device));
  auto moment = std::make_shared<Moment>();
  StreamOf(stream).Put([moment] { moment->Pass(); });
  return Event{moment, stream.device, /*is_timed=*/true};
}

absl::StatusOr<absl::Duration> SimulatedDevices::DoElapsed(const Event& from, const Event& to) {
  EK_RETURN_IF_ERROR(Check("Elapsed", from.device));
  const auto at = [](const Event& event) {
    return static_cast<Moment*>(event.handle.get())->passed_at();
  };
  return absl::FromChrono(at(to) - at(from));
}

absl::Status SimulatedDevices::Wait(StreamRef stream, const Event& event) {
  EK_RETURN_IF_ERROR(Check("Wait", stream.device));
  if (!event) return absl::OkStatus();
  StreamOf(stream).Put([moment = std::static_pointer_cast<Moment>(event.handle)] {
    (void)moment->WaitUntil(absl::InfiniteFuture());  // As a device does.
  });
  return absl::OkStatus();
}

absl::StatusOr<bool> SimulatedDevices::IsDone(const Event& event) {
  if (!event) return true;
  EK_RETURN_IF_ERROR(Check("IsDone", event.device));
  return static_cast<Moment*>(event.handle.get())->HasPassed();
}

absl::Status SimulatedDevices::DoSynchronize(const Event& event, absl::Time deadline) {
  EK_RETURN_IF_ERROR(Check("Synchronize", event.device));
  ++host_waits_;
  if (static_cast<Moment*>(event.handle.get())->WaitUntil(deadline)) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat(ToString(event.device), " was not done in time"));
}

absl::Status SimulatedDevices::Copy(void* to, const void* from, int64_t bytes, StreamRef stream) {
  EK_RETURN_IF_ERROR(Check("Copy", stream.device));
  ++copies_;
  return Run(stream, [to, from, bytes] {
    if (bytes > 0) std::memmove(to, from, bytes);
  });
}

absl::Status SimulatedDevices::Zero(void* data, int64_t bytes, StreamRef stream) {
  EK_RETURN_IF_ERROR(Check("Zero", stream.device));
  return Run(stream, [data, bytes] {
    if (bytes > 0) std::memset(data, 0, bytes);
  });
}

absl::Status SimulatedDevices::LaunchRaw(const DeviceKernel& kernel, const LaunchShape& shape,
                                         absl::Span<void* const> args, StreamRef stream) {
  EK_RETURN_IF_ERROR(Check("Launch", stream.device));
  if (shape.blocks < 1 || shape.rows < 1 || shape.rows > 65535 || shape.threads < 32 ||
      shape.threads > 1024 || shape.threads % 32 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(kernel.name, ": cannot launch ", shape.blocks,
                                                   " x ", shape.rows, " blocks of ", shape.threads,
                                                   " threads"));
  }
  ++launches_;
  KeptArguments kept;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto* const value = static_cast<const std::byte*>(args[i]);
    kept.values.emplace_back(value, value + kernel.argument_bytes[i]);
  }
  return Run(stream, [&kernel, shape, kept = std::make_shared<KeptArguments>(std::move(kept))] {
    for (std::vector<std::byte>& value : kept->values) kept->pointers.push_back(value.data());
    internal::RunOnHost(kernel, shape, kept->pointers.data());
  });
}

absl::Status SimulatedDevices::Put(StreamRef stream, std::function<void()> work) {
  EK_RETURN_IF_ERROR(Check("Put", stream.device));
  return Run(stream, std::move(work));
}

absl::Status SimulatedDevices::Run(StreamRef stream, std::function<void()> work) {
  if (!options_.guards_memory) {
    StreamOf(stream).Put(std::move(work));
    return absl::OkStatus();
  }
  auto done = std::make_shared<Moment>();
  internal::GuardedMemory& guarded = *impl_->guarded[stream.device.index];
  StreamOf(stream).Put([&guarded, work = std::move(work), done] {
    {
      const internal::GuardedMemory::Open open(guarded);
      work();
    }
    done->Pass();
  });
  constexpr absl::Duration kPatience = absl::Minutes(5);
  if (done->WaitUntil(SteadyNow() + kPatience)) return absl::OkStatus();
  return absl::DeadlineExceededError(
      "guarded work waits for later work: guards_memory is for one rank");
}

}  // namespace evenkeel
