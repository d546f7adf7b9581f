#include "evenkeel/zero_optim/internal/device_agreement.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/zero_optim/device/device_update.h"
#include "evenkeel/zero_optim/gradient_check.h"

namespace evenkeel::internal {

absl::Status AddUpMeasure(ParameterUpdater& updater, double norm, Communicator& comm,
                          Channel& channel) {
  if (comm.world_size() == 1) return absl::OkStatus();
  const StreamRef stream = updater.stream();
  const Work total = channel.AllReduce(updater.device().found(),
                                       norm == kInfinityNorm ? ReduceOp::kMax : ReduceOp::kSum,
                                       {.role = Role::kShard, .after = stream});
  return total.OrderBefore(stream);
}

absl::Status DeviceFlags::Reduce(const std::vector<float>& own, ParameterUpdater& updater,
                                 Communicator& comm, Channel& channel, StreamRef stream) {
  DeviceRuntime& runtime = *comm.runtime();
  if (count_ != static_cast<int64_t>(own.size())) {
    there_.clear();
    EK_RETURN_IF_ERROR(updater.device().Keep(std::exchange(memory_, Memory()), stream));
    count_ = 0;
    device_ = comm.device();
    const int64_t count = static_cast<int64_t>(own.size());
    EK_ASSIGN_OR_RETURN(memory_, runtime.Allocate(device_, 2 * count * SizeOf(DType::kFloat32)));
    count_ = count;
  }
  const TensorView mine = Part(0);
  if (there_ != own) {
    there_.clear();
    EK_ASSIGN_OR_RETURN(Memory pinned, runtime.AllocatePinned(mine.bytes()));
    std::memcpy(pinned.data.get(), own.data(), mine.bytes());
    EK_RETURN_IF_ERROR(runtime.Copy(mine.data, pinned.data.get(), mine.bytes(), stream));
    EK_RETURN_IF_ERROR(updater.device().Keep(std::move(pinned), stream));
    there_ = own;
  }
  EK_RETURN_IF_ERROR(runtime.Copy(all().data, mine.data, mine.bytes(), stream));
  if (comm.world_size() == 1) return absl::OkStatus();
  return channel.AllReduce(all(), ReduceOp::kMax, {.role = Role::kShard, .after = stream})
      .OrderBefore(stream);
}

}  // namespace evenkeel::internal
