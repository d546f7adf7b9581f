// A vector of the host as a tensor of the tested backend's: the vector itself on the CPU, a copy on
// a device.
//
//   std::vector<T> data = Inputs<T>(op, rank, n);
//   EK_ASSIGN_OR_RETURN(Placed<T> placed, Place(comm, data));
//   EK_RETURN_IF_ERROR(comm.AllReduce(placed.view(), op));
//   EK_RETURN_IF_ERROR(placed.Fetch());                          // `data` has the result
//
// Ownership: the vector outlives it, and is not resized meanwhile; it outlives the operations on
//            its view.

#ifndef EVENKEEL_TESTS_CONFORMANCE_PLACED_H_
#define EVENKEEL_TESTS_CONFORMANCE_PLACED_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/tests/conformance/tested_backend.h"

namespace evenkeel {

template <typename T>
class Placed {
 public:
  TensorView view() const { return view_; }

  // The vector gets what the tensor holds, or the tensor what the vector holds.
  absl::Status Fetch() { return Move(host_->data(), view_.data); }
  absl::Status Store() { return Move(view_.data, host_->data()); }

 private:
  template <typename U>
  friend absl::StatusOr<Placed<U>> Place(Communicator& comm, std::vector<U>& host);

  absl::Status Move(void* to, const void* from) {
    if (runtime_ == nullptr || view_.count == 0) return absl::OkStatus();
    EK_RETURN_IF_ERROR(runtime_->Copy(to, from, view_.bytes(), stream_.ref()));
    return runtime_->Synchronize(stream_.ref(), SteadyNow() + kPatience);
  }

  std::vector<T>* host_ = nullptr;
  DeviceRuntime* runtime_ = nullptr;
  Stream stream_;
  Memory memory_;
  TensorView view_;
};

template <typename T>
absl::StatusOr<Placed<T>> Place(Communicator& comm, std::vector<T>& host) {
  Placed<T> placed;
  placed.host_ = &host;
  placed.view_ = TensorView(absl::MakeSpan(host));
  placed.runtime_ = comm.runtime();
  if (placed.runtime_ == nullptr) return placed;
  EK_ASSIGN_OR_RETURN(placed.stream_, placed.runtime_->CreateStream(comm.device()));
  EK_ASSIGN_OR_RETURN(placed.memory_,
                      placed.runtime_->Allocate(comm.device(), placed.view_.bytes()));
  placed.view_.data = placed.memory_.data.get();
  placed.view_.device = comm.device();
  EK_RETURN_IF_ERROR(placed.Store());
  return placed;
}

// Copy from a view of the group's memory to the host, and back.
template <typename T>
absl::Status Read(Communicator& comm, TensorView from, std::vector<T>& to) {
  if (comm.runtime() == nullptr) {
    std::memcpy(to.data(), from.data, from.bytes());
    return absl::OkStatus();
  }
  EK_ASSIGN_OR_RETURN(const Stream stream, comm.runtime()->CreateStream(comm.device()));
  EK_RETURN_IF_ERROR(comm.runtime()->Copy(to.data(), from.data, from.bytes(), stream.ref()));
  return comm.runtime()->Synchronize(stream.ref(), SteadyNow() + kPatience);
}
template <typename T>
absl::Status Write(Communicator& comm, const std::vector<T>& from, TensorView to) {
  if (comm.runtime() == nullptr) {
    std::memcpy(to.data, from.data(), to.bytes());
    return absl::OkStatus();
  }
  EK_ASSIGN_OR_RETURN(const Stream stream, comm.runtime()->CreateStream(comm.device()));
  EK_RETURN_IF_ERROR(comm.runtime()->Copy(to.data, from.data(), to.bytes(), stream.ref()));
  return comm.runtime()->Synchronize(stream.ref(), SteadyNow() + kPatience);
}

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_CONFORMANCE_PLACED_H_
