// CUDA's devices for tests: their memory is visible to the host, too, and they have the functions
// of SimulatedDevices for tests. Use them as TestedDevices (tested_devices.h).

#ifndef EVENKEEL_COMM_DEVICE_TESTING_MANAGED_DEVICES_H_
#define EVENKEEL_COMM_DEVICE_TESTING_MANAGED_DEVICES_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/device/simulated.h"

namespace evenkeel::internal {

class ManagedDevices : public DeviceRuntime {
 public:
  explicit ManagedDevices(const SimulatedOptions& options = {});

  absl::string_view name() const override { return cuda_.name(); }
  absl::StatusOr<int> DeviceCount() override { return cuda_.DeviceCount(); }
  absl::StatusOr<DeviceFacts> Facts(Device device) override { return cuda_.Facts(device); }
  absl::StatusOr<Memory> Allocate(Device device, int64_t bytes) override;
  absl::StatusOr<Memory> AllocatePinned(int64_t bytes) override;
  absl::StatusOr<Stream> CreateStream(Device device,
                                      StreamPriority priority = StreamPriority::kNormal) override;
  absl::StatusOr<Event> Record(StreamRef stream) override;
  absl::StatusOr<Event> RecordTimed(StreamRef stream) override;
  absl::Status Wait(StreamRef stream, const Event& event) override;
  absl::StatusOr<bool> IsDone(const Event& event) override { return cuda_.IsDone(event); }
  absl::Status Copy(void* to, const void* from, int64_t bytes, StreamRef stream) override;
  absl::Status Zero(void* data, int64_t bytes, StreamRef stream) override;
  absl::Status LaunchRaw(const DeviceKernel& kernel, const LaunchShape& shape,
                         absl::Span<void* const> args, StreamRef stream) override;
  int64_t host_waits() const override { return host_waits_; }

  absl::Status Put(StreamRef stream, std::function<void()> work);
  void FailNext(absl::string_view call, absl::Status answer, int after = 0);
  int64_t launches() const { return launches_; }
  int64_t copies() const { return copies_; }
  int64_t held_bytes(Device) const { return *held_; }

 protected:
  absl::Status DoSynchronize(const Event& event, absl::Time deadline) override;
  absl::StatusOr<absl::Duration> DoElapsed(const Event& from, const Event& to) override {
    return cuda_.Elapsed(from, to);
  }

 private:
  struct Failure {
    absl::Status answer;
    int after = 0;
  };
  // Returns the error that FailNext() has set for this call.
  absl::Status Check(absl::string_view call);

  DeviceRuntime& cuda_;
  const SimulatedOptions options_;
  const std::shared_ptr<std::atomic<int64_t>> held_ = std::make_shared<std::atomic<int64_t>>(0);
  std::atomic<int64_t> host_waits_ = 0, launches_ = 0, copies_ = 0;
  absl::Mutex mutex_;
  std::map<std::string, Failure> failures_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_DEVICE_TESTING_MANAGED_DEVICES_H_
