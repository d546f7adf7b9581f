#include "evenkeel/join/testing/guarded_group.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

// The host's copy of an operation's views.
struct Staged {
  std::vector<std::vector<char>> memory;

  TensorList Of(const TensorList& views) {
    TensorList list;
    for (const TensorView& view : views) {
      list.push_back({memory.emplace_back(view.bytes()).data(), view.count, view.dtype});
    }
    return list;
  }
};

class GuardedBackend : public Backend {
 public:
  GuardedBackend(SimulatedDevices* devices, Stream stream, std::unique_ptr<Communicator> inner)
      : devices_(devices), stream_(std::move(stream)), inner_(std::move(inner)) {}

  absl::string_view name() const override { return "guarded"; }
  Device device() const override { return stream_.device; }
  DeviceRuntime* runtime() const override { return devices_; }
  absl::StatusOr<Memory> Allocate(int64_t bytes) override {
    return devices_->Allocate(device(), bytes);
  }

  void Start(Operation operation, std::shared_ptr<WorkState> work) override {
    auto staged = std::make_shared<Staged>();
    const TensorList in = staged->Of(operation.in);
    const TensorList out = operation.in == operation.out ? in : staged->Of(operation.out);
    absl::Status copied = CopyIn(operation, in);
    absl::StatusOr<Channel*> channel = inner_->OpenChannel(std::to_string(operation.channel));
    if (copied.ok()) copied = channel.status();
    if (!copied.ok()) return work->Finish(copied);
    work->order_before = [work = std::weak_ptr<WorkState>(work)](StreamRef) {
      const std::shared_ptr<WorkState> state = work.lock();
      return state == nullptr ? absl::OkStatus() : state->Wait();
    };
    const Work moves = (*channel)->Issue(
        operation.what, in, out, {.scale = operation.scale, .contributes = operation.contributes});
    moves.OnDone([this, staged, out, to = operation.out, work](const absl::Status& status) {
      absl::Status end = status;
      for (size_t i = 0; i < to.size(); ++i) {
        if (end.ok()) end = devices_->Copy(to[i].data, out[i].data, to[i].bytes(), stream_.ref());
      }
      work->Finish(end);
    });
  }

  void Abort(const absl::Status& why) override { inner_->Abort(why); }

 private:
  absl::Status CopyIn(const Operation& operation, const TensorList& to) {
    if (operation.after.handle != nullptr) {
      EK_ASSIGN_OR_RETURN(const Event before, devices_->Record(operation.after));
      EK_RETURN_IF_ERROR(devices_->Wait(stream_.ref(), before));
    }
    EK_RETURN_IF_ERROR(devices_->Wait(stream_.ref(), operation.after_event));
    for (size_t i = 0; i < to.size(); ++i) {
      EK_RETURN_IF_ERROR(
          devices_->Copy(to[i].data, operation.in[i].data, to[i].bytes(), stream_.ref()));
    }
    return absl::OkStatus();
  }

  SimulatedDevices* const devices_;
  const Stream stream_;
  const std::unique_ptr<Communicator>
      inner_;  // Last, so that nothing ends after the rest has gone.
};

// The groups of a job: the first rank that asks for its half of one has all made.
class GuardedJob {
 public:
  explicit GuardedJob(int count)
      : devices_({.count = count, .bytes = int64_t{1} << 24, .guards_memory = true}) {}

  absl::StatusOr<std::unique_ptr<Backend>> Take(absl::string_view group, Device device, int rank,
                                                int world_size) {
    absl::MutexLock lock(&mutex_);
    std::vector<std::unique_ptr<Communicator>>& halves = groups_[std::string(group)];
    if (halves.empty()) {
      EK_ASSIGN_OR_RETURN(halves, CreateLocalGroup(world_size));
    }
    EK_ASSIGN_OR_RETURN(Stream stream, devices_.CreateStream(device));
    return std::make_unique<GuardedBackend>(&devices_, std::move(stream), std::move(halves[rank]));
  }

 private:
  SimulatedDevices devices_;
  absl::Mutex mutex_;
  std::map<std::string, std::vector<std::unique_ptr<Communicator>>> groups_ ABSL_GUARDED_BY(mutex_);
};

// A rank stays on its device in all groups.
absl::StatusOr<std::unique_ptr<Communicator>> MakeRank(const std::shared_ptr<GuardedJob>& job,
                                                       Device device, absl::string_view group,
                                                       int rank, int world_size,
                                                       std::unique_ptr<ControlLink> link) {
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, job->Take(group, device, rank, world_size));
  return std::make_unique<Communicator>(
      std::move(backend), std::make_unique<ControlChannel>(rank, world_size, std::move(link)),
      CommunicatorOptions(), group,
      [job, device](absl::string_view next, int next_rank, int next_world_size,
                    std::unique_ptr<ControlLink> next_link, absl::Duration) {
        return MakeRank(job, device, next, next_rank, next_world_size, std::move(next_link));
      });
}

}  // namespace

absl::Status RunGuardedRanks(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body) {
  const auto job = std::make_shared<GuardedJob>(world_size);
  std::vector<std::unique_ptr<ControlLink>> links = internal::CreateLocalLinks(world_size);
  std::vector<std::unique_ptr<Communicator>> group;
  for (int rank = 0; rank < world_size; ++rank) {
    EK_ASSIGN_OR_RETURN(group.emplace_back(), MakeRank(job, Device::Cuda(rank), "world", rank,
                                                       world_size, std::move(links[rank])));
  }
  return internal::RunGroup(group, body);
}

}  // namespace evenkeel
