// Devices that are simulated on the host, for tests where there is no GPU: as asynchronous as real
// ones.
//
//   SimulatedDevices devices({.count = 2});
//   EK_ASSIGN_OR_RETURN(Stream stream, devices.CreateStream(Device::Cuda(0)));
//   ... EK_RETURN_IF_ERROR(devices.Synchronize(stream.ref(), deadline));
//
// Memory is the host's, a stream is a thread, a kernel its source compiled for the host. So what a
// device's user gets wrong shows: memory that is read before a stream has written it is a data race
// (tsan), or wrong with `delay`; memory that is too short is an error of asan's.
//
// Threads:   thread-safe.
// Ownership: outlives its streams, events and memory.

#ifndef EVENKEEL_COMM_DEVICE_SIMULATED_H_
#define EVENKEEL_COMM_DEVICE_SIMULATED_H_

#include <atomic>
#include <cstdint>
#include <functional>
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

namespace evenkeel {

struct SimulatedOptions {
  int count = 1;
  int64_t bytes = int64_t{1} << 30;  // Per device.
  // Each piece of work on a stream begins so much later: streams then run far behind the host.
  absl::Duration delay = absl::ZeroDuration();
  // The host may not touch a device's memory: the process ends with a sentence where it does. So
  // that none of it goes unseen each call waits until its work has run, and with it all that its
  // stream waits for: for one rank.
  bool guards_memory = false;
};

class SimulatedDevices : public DeviceRuntime {
 public:
  explicit SimulatedDevices(const SimulatedOptions& options = {});
  ~SimulatedDevices() override;

  absl::string_view name() const override { return "simulated"; }
  absl::StatusOr<int> DeviceCount() override;
  absl::StatusOr<DeviceFacts> Facts(Device device) override;
  absl::StatusOr<Memory> Allocate(Device device, int64_t bytes) override;
  absl::StatusOr<Memory> AllocatePinned(int64_t bytes) override;
  absl::StatusOr<Stream> CreateStream(Device device,
                                      StreamPriority priority = StreamPriority::kNormal) override;
  absl::StatusOr<Event> Record(StreamRef stream) override;
  absl::Status Wait(StreamRef stream, const Event& event) override;
  absl::StatusOr<bool> IsDone(const Event& event) override;
  absl::StatusOr<Event> RecordTimed(StreamRef stream) override;
  absl::Status Copy(void* to, const void* from, int64_t bytes, StreamRef stream) override;
  absl::Status Zero(void* data, int64_t bytes, StreamRef stream) override;
  absl::Status LaunchRaw(const DeviceKernel& kernel, const LaunchShape& shape,
                         absl::Span<void* const> args, StreamRef stream) override;
  int64_t host_waits() const override { return host_waits_; }

  // Beyond what devices do.

  // Any work, for what simulates a library on top: it runs in its turn on the stream's thread, and
  // may block it.
  absl::Status Put(StreamRef stream, std::function<void()> work);
  // From now on calls of this name ("Record", "Copy", "Launch", ...) answer so; OK: they work
  // again.
  void FailNext(absl::string_view call, absl::Status answer, int after = 0);
  int64_t launches() const { return launches_; }
  int64_t copies() const { return copies_; }
  int64_t held_bytes(Device device) const;

 protected:
  absl::Status DoSynchronize(const Event& event, absl::Time deadline) override;
  absl::StatusOr<absl::Duration> DoElapsed(const Event& from, const Event& to) override;

 private:
  struct Impl;
  absl::Status Check(absl::string_view call, Device device);
  // On the stream's thread; see SimulatedOptions::guards_memory.
  absl::Status Run(StreamRef stream, std::function<void()> work);

  const SimulatedOptions options_;
  const std::unique_ptr<Impl> impl_;
  std::atomic<int64_t> host_waits_ = 0;
  std::atomic<int64_t> launches_ = 0;
  std::atomic<int64_t> copies_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_DEVICE_SIMULATED_H_
