// What evenkeel needs of devices that compute beside the host: memory, streams, events, copies, kernels.
//
//   DeviceRuntime& runtime = *comm.runtime();                        // a backend on a device brings it; null on the CPU
//   EK_ASSIGN_OR_RETURN(Memory memory, runtime.Allocate(device, bytes));
//   EK_ASSIGN_OR_RETURN(Stream stream, runtime.CreateStream(device));
//   EK_RETURN_IF_ERROR(runtime.Copy(memory.data.get(), source, bytes, stream.ref()));
//   EK_ASSIGN_OR_RETURN(Event copied, runtime.Record(stream.ref()));
//   EK_RETURN_IF_ERROR(runtime.Wait(other_stream, copied));          // the other stream waits, the host goes on
//   EK_RETURN_IF_ERROR(runtime.Synchronize(copied, deadline));       // the host waits
//
// There are two: CUDA's (device/cuda.h), and one that simulates devices on the host for tests
// (device/simulated.h): its memory is the host's, its streams are threads, and its kernels are the very sources that
// nvcc compiles (device/kernel.h). So libraries write device code once, without including CUDA, and their tests run it
// everywhere, under the sanitizers too: under tsan an order that was forgotten between streams is a data race.
//
// Order:     what is put on a stream runs in that order; streams wait for each other through events only.
// Host:      only Synchronize() waits for a device (Allocate() and the destruction of memory may, too); counted in
//            host_waits(), so that a test can show that a step has none.
// Threads:   thread-safe; the order on a stream is the order of calls. The calling thread's current CUDA device is left
//            as it was.
// Ownership: handles are shared and freed with the last copy; memory, streams and events outlive what uses them, that
//            is until it has run.
// Errors:    FailedPrecondition "no CUDA device: ..." without a device, InvalidArgument for one that is not there,
//            ResourceExhausted for memory, DeadlineExceeded; Internal with the runtime's own text for the rest. An error
//            of work on a stream shows in a later call, as with CUDA.

#ifndef EVENKEEL_COMM_DEVICE_RUNTIME_H_
#define EVENKEEL_COMM_DEVICE_RUNTIME_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

struct DeviceKernel;  // device/kernel.h

struct Stream {
  std::shared_ptr<void> handle;
  Device device;
  StreamRef ref() const { return {handle.get(), device}; }
};

// A moment of a stream: that all which was put there before has run.
struct Event {
  std::shared_ptr<void> handle;  // Null: a moment that has passed.
  Device device;
  bool is_timed = false;  // Its time is kept, for Elapsed().
  explicit operator bool() const { return handle != nullptr; }
};

struct DeviceFacts {
  std::string name;
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;
  int multiprocessors = 1;
  int compute_capability = 0;  // 90: sm_90. 0: none.
};

enum class StreamPriority : uint8_t { kNormal, kHigh };

// One-dimensional blocks; `threads` is a multiple of 32, at most 1024.
struct LaunchShape {
  int64_t blocks = 1;
  int threads = 256;
  int64_t rows = 1;  // The grid's second dimension.
};

class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;

  virtual absl::string_view name() const = 0;  // "cuda", "simulated"
  virtual absl::StatusOr<int> DeviceCount() = 0;
  virtual absl::StatusOr<DeviceFacts> Facts(Device device) = 0;

  // Zeroed, at a multiple of 256 bytes.
  virtual absl::StatusOr<Memory> Allocate(Device device, int64_t bytes) = 0;
  // The host's memory, zeroed, that devices copy from and to without a detour.
  virtual absl::StatusOr<Memory> AllocatePinned(int64_t bytes) = 0;

  virtual absl::StatusOr<Stream> CreateStream(Device device, StreamPriority priority = StreamPriority::kNormal) = 0;
  virtual absl::StatusOr<Event> Record(StreamRef stream) = 0;
  virtual absl::Status Wait(StreamRef stream, const Event& event) = 0;
  virtual absl::StatusOr<bool> IsDone(const Event& event) = 0;
  // A moment whose time is kept, too. It costs the device more than Record(), so only where somebody will ask.
  virtual absl::StatusOr<Event> RecordTimed(StreamRef stream) = 0;
  // By the device's clock, from one such moment to a later one of the same device, both passed: it waits for none.
  // Exact to a microsecond or so over seconds, and less so over hours.
  // InvalidArgument for other moments, FailedPrecondition where one has not passed.
  absl::StatusOr<absl::Duration> Elapsed(const Event& from, const Event& to);

  // Between any of a device's memory and the host's. Memory of the host that is not pinned must stay until the copy has
  // run, and the call may take as long as the copy.
  virtual absl::Status Copy(void* to, const void* from, int64_t bytes, StreamRef stream) = 0;
  virtual absl::Status Zero(void* data, int64_t bytes, StreamRef stream) = 0;
  // `args`: pointers to the kernel's arguments, copied before it returns. Launch() below checks their types.
  virtual absl::Status LaunchRaw(const DeviceKernel& kernel, const LaunchShape& shape, absl::Span<void* const> args,
                                 StreamRef stream) = 0;

  // The host waits until the moment has passed.
  absl::Status Synchronize(const Event& event, absl::Time deadline);
  // The same for all that is on the stream now.
  absl::Status Synchronize(StreamRef stream, absl::Time deadline);
  virtual int64_t host_waits() const = 0;

 protected:
  virtual absl::Status DoSynchronize(const Event& event, absl::Time deadline) = 0;
  // Of moments for which that is no error.
  virtual absl::StatusOr<absl::Duration> DoElapsed(const Event& from, const Event& to) = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_DEVICE_RUNTIME_H_
