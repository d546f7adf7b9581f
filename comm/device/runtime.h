// The interface to devices that compute beside the host: memory, streams, events, copies, kernels.
//
//   DeviceRuntime& runtime = *comm.runtime();  // of a backend on a device; null on the CPU
//   EK_ASSIGN_OR_RETURN(Memory memory, runtime.Allocate(device, bytes));
//   EK_ASSIGN_OR_RETURN(Stream stream, runtime.CreateStream(device));
//   EK_RETURN_IF_ERROR(runtime.Copy(memory.data.get(), source, bytes, stream.ref()));
//   EK_ASSIGN_OR_RETURN(Event copied, runtime.Record(stream.ref()));
//   // the other stream waits, the host does not
//   EK_RETURN_IF_ERROR(runtime.Wait(other_stream, copied));
//   EK_RETURN_IF_ERROR(runtime.Synchronize(copied, deadline));       // the host waits
//
// There are two implementations: CUDA (device/cuda.h), and simulated devices on the host for tests
// (device/simulated.h), with host memory, threads as streams, and the same kernel sources that nvcc
// compiles (device/kernel.h). So libraries contain device code once, without including CUDA, and
// tests run it everywhere, also under the sanitizers: a missing order between streams is a data
// race under tsan.
//
// Order:     work on a stream runs in the order of its calls; streams wait for each other only
//            through events.
// Host:      only Synchronize() waits for a device (Allocate() and the destruction of memory may,
//            too); host_waits() counts this, so that a test can show that a step has no wait.
// Threads:   thread-safe; the order on a stream is the order of calls. The calling thread's current
//            CUDA device does not change.
// Ownership: handles are shared and freed with the last copy; memory, streams and events must
//            outlive the work that uses them.
// Errors:    FailedPrecondition "no CUDA device: ..." without a device, InvalidArgument for an
//            unknown one, ResourceExhausted for memory, DeadlineExceeded; Internal with the
//            runtime's text for the rest. A later call reports an error of work on a stream, as
//            with CUDA.

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

// A point of a stream, reached when all earlier work has run.
struct Event {
  std::shared_ptr<void> handle;  // Null: an event that has been reached.
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

  // Returns zeroed memory, aligned to 256 bytes.
  virtual absl::StatusOr<Memory> Allocate(Device device, int64_t bytes) = 0;
  // Returns zeroed, pinned memory of the host.
  virtual absl::StatusOr<Memory> AllocatePinned(int64_t bytes) = 0;

  virtual absl::StatusOr<Stream> CreateStream(
      Device device, StreamPriority priority = StreamPriority::kNormal) = 0;
  virtual absl::StatusOr<Event> Record(StreamRef stream) = 0;
  virtual absl::Status Wait(StreamRef stream, const Event& event) = 0;
  virtual absl::StatusOr<bool> IsDone(const Event& event) = 0;
  // Records an event with its time, which costs the device more than Record().
  virtual absl::StatusOr<Event> RecordTimed(StreamRef stream) = 0;
  // Returns the time by the device's clock between two such events of the same device, without
  // waiting. Exact to about a microsecond over seconds, less so over hours. InvalidArgument for
  // other events, FailedPrecondition if one has not been reached.
  absl::StatusOr<absl::Duration> Elapsed(const Event& from, const Event& to);

  // Copies between memory of a device and of the host, in any direction. Host memory that is not
  // pinned must stay valid until the copy has run, and the call may take as long as the copy.
  virtual absl::Status Copy(void* to, const void* from, int64_t bytes, StreamRef stream) = 0;
  virtual absl::Status Zero(void* data, int64_t bytes, StreamRef stream) = 0;
  // `args`: pointers to the kernel's arguments, copied before it returns. Launch() below checks
  // their types.
  virtual absl::Status LaunchRaw(const DeviceKernel& kernel, const LaunchShape& shape,
                                 absl::Span<void* const> args, StreamRef stream) = 0;

  // Waits on the host until the event is reached. Deadlines are times of SteadyNow()
  // (comm/base/clock.h).
  absl::Status Synchronize(const Event& event, absl::Time deadline);
  // Waits on the host for all work that is on the stream now.
  absl::Status Synchronize(StreamRef stream, absl::Time deadline);
  virtual int64_t host_waits() const = 0;

 protected:
  virtual absl::Status DoSynchronize(const Event& event, absl::Time deadline) = 0;
  // Called with events for which this is not an error.
  virtual absl::StatusOr<absl::Duration> DoElapsed(const Event& from, const Event& to) = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_DEVICE_RUNTIME_H_
