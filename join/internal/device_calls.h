// A JoinScope's state on a device: a stream of its own, memory for its calls, and the calls in
// flight.
//
//   // its end: what is on the stream then is the last that ...
//   const DeviceCalls::Use use(device, stream);
//   EK_ASSIGN_OR_RETURN(const TensorView zeros,
//                       device.Scratch(DeviceCalls::kIn, count, dtype, stream));
//   ... put work on `stream` that uses it, issue `work` after that ...
//   // what comes on the stream now is behind the call
//   EK_RETURN_IF_ERROR(device.Follow(work, stream));     // ... uses this memory
//
// The host waits only in Drain(), in destruction, and for memory that is not there yet.
//
// Threads:   thread-compatible.
// Ownership: the runtime and the streams outlive it; the group lives until Drain().

#ifndef EVENKEEL_JOIN_INTERNAL_DEVICE_CALLS_H_
#define EVENKEEL_JOIN_INTERNAL_DEVICE_CALLS_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"

namespace evenkeel::internal {

class DeviceCalls {
 public:
  enum Slot { kIn, kOut };

  static absl::StatusOr<std::unique_ptr<DeviceCalls>> Create(const Communicator& comm);
  ~DeviceCalls();

  DeviceRuntime& runtime() const { return *runtime_; }
  StreamRef stream() const { return stream_.ref(); }

  // Around the work of one call, however it ends.
  class Use {
   public:
    Use(DeviceCalls& calls, StreamRef stream) : calls_(calls), stream_(stream) {}
    ~Use() { calls_.Release(stream_); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    DeviceCalls& calls_;
    const StreamRef stream_;
  };
  // Within a Use: memory for what `stream` does from now on, behind all that used it before; its
  //               content is anything.
  absl::StatusOr<TensorView> Scratch(Slot slot, int64_t count, DType dtype, StreamRef stream);

  // Orders later work on `stream` behind the call.
  absl::Status Follow(const Work& work, StreamRef stream);
  // The error of a call that has ended; waits for none.
  absl::Status Confirm();
  // The host waits until all calls have ended, and what used the memory.
  absl::Status Drain();

 private:
  struct Piece {
    Memory memory;
    Event used;             // Until then.
    bool is_taken = false;  // In this Use.
  };

  DeviceCalls(const Communicator& comm, Stream stream);
  void Release(StreamRef stream);

  DeviceRuntime* const runtime_;
  const Device device_;
  const absl::Duration timeout_;
  const Stream stream_;
  std::array<Piece, 2> pieces_;  // By slot.
  std::vector<Piece> outgrown_;
  std::vector<Work> works_;
  absl::Status failure_;  // That nobody has been told of.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_JOIN_INTERNAL_DEVICE_CALLS_H_
