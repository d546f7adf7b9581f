// Puts an operation on a stream: NCCL's calls, and what comes before and behind them in the
// device's own memory.
//
//   NcclCollectives collectives(runtime, api, connection,
//                               {.device = device, .rank = 0, .world_size = 2});
//   EK_RETURN_IF_ERROR(collectives.Put(operation, is_alike, stream, kept));
//
// Threads:   thread-compatible.
// Ownership: `kept` is held until all that was put on the stream has run. One stream for all
//            operations: they share the memory that views are staged in.

#ifndef EVENKEEL_COMM_NCCL_COLLECTIVES_H_
#define EVENKEEL_COMM_NCCL_COLLECTIVES_H_

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/nccl/api.h"
#include "evenkeel/comm/nccl/connection.h"
#include "evenkeel/comm/nccl/plan.h"

namespace evenkeel::internal {

class NcclCollectives {
 public:
  struct Seat {
    Device device;
    int rank = 0;
    int world_size = 1;
  };
  NcclCollectives(DeviceRuntime& runtime, NcclApi& api, std::shared_ptr<NcclConnection> connection,
                  Seat seat)
      : runtime_(runtime), api_(api), connection_(std::move(connection)), seat_(seat) {}

  absl::Status Put(const Operation& operation, bool is_alike, StreamRef stream,
                   std::vector<Memory>& kept);

 private:
  enum Side { kIn, kOut, kSides };

  // Calls NCCL, after all earlier work is on the stream.
  struct Calls {
    std::vector<NcclCall> list;
    TensorView staged;  // Where the result is if it is staged.
  };
  absl::StatusOr<Calls> Prepare(const Operation& operation, const NcclPlan& plan, StreamRef stream,
                                std::vector<Memory>& kept);
  absl::StatusOr<Calls> PrepareInPlace(const Operation& operation, const NcclPlan& plan,
                                       StreamRef stream, std::vector<Memory>& kept);
  absl::StatusOr<Calls> PrepareBarrier();
  absl::Status PutCalls(const std::vector<NcclCall>& calls, const Operation& operation,
                        const NcclPlan& plan, StreamRef stream);
  absl::Status Finish(const Operation& operation, const NcclPlan& plan, const TensorView& staged,
                      StreamRef stream);
  // Room for the views in one piece.
  absl::StatusOr<TensorView> Stage(Side side, const TensorList& views, DType dtype,
                                   std::vector<Memory>& kept);
  absl::StatusOr<Memory> Allocate(int64_t bytes);
  absl::Status FillIdentity(const Collective& what, absl::Span<const TensorView> views,
                            StreamRef stream);
  // to[i] = from[i] * scale; both lists have as many elements.
  absl::Status Copy(const TensorList& from, const TensorList& to, double scale, StreamRef stream);

  DeviceRuntime& runtime_;
  NcclApi& api_;
  const std::shared_ptr<NcclConnection> connection_;
  const Seat seat_;
  std::array<Memory, kSides> staging_;
  Memory barrier_;  // One element, which belongs to nobody's data.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NCCL_COLLECTIVES_H_
