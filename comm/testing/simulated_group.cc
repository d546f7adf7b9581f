#include "evenkeel/comm/testing/simulated_group.h"

#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/local/backend.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// One operation, from its start to its end; shared by all who wait for it.
class Flight {
 public:
  explicit Flight(std::shared_ptr<WorkState> work) : work_(std::move(work)) {}

  // Whether the data may be touched from now on: it has not been ended before it began.
  bool Begin() {
    absl::MutexLock lock(&mutex_);
    has_begun_ = true;
    return work_ != nullptr;
  }
  bool has_begun() const {
    absl::MutexLock lock(&mutex_);
    return has_begun_;
  }
  void End(const absl::Status& status) {
    std::shared_ptr<WorkState> work;
    {
      absl::MutexLock lock(&mutex_);
      work.swap(work_);
      has_ended_ = true;
    }
    if (work != nullptr) work->Finish(status);
  }
  void WaitForEnd() const {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&has_ended_));
  }

 private:
  mutable absl::Mutex mutex_;
  std::shared_ptr<WorkState> work_ ABSL_GUARDED_BY(mutex_);  // Null once it has ended.
  bool has_begun_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;
};

// Helps nobody, but sees who waits.
class WaitCounter : public WorkHelper {
 public:
  explicit WaitCounter(std::atomic<int64_t>* waits) : waits_(waits) {}
  void Help(absl::Time) override { ++*waits_; }

 private:
  std::atomic<int64_t>* const waits_;
};

TensorList OnHost(const TensorList& views) {
  TensorList list;
  for (const TensorView& view : views) list.push_back({view.data, view.count, view.dtype});
  return list;
}

class SimulatedBackend : public Backend {
 public:
  SimulatedBackend(SimulatedDevices* devices, Device device, std::unique_ptr<Backend> inner,
                   const SimulatedGroupOptions& options)
      : devices_(devices), device_(device), inner_(std::move(inner)) {
    if (options.work_waits != nullptr) counter_ = std::make_shared<WaitCounter>(options.work_waits);
  }
  ~SimulatedBackend() override { Abort(absl::UnavailableError("the rank left the group")); }

  absl::string_view name() const override { return "simulated"; }
  Device device() const override { return device_; }
  DeviceRuntime* runtime() const override { return devices_; }
  absl::Status Supports(const Collective& what) const override { return inner_->Supports(what); }
  bool checks_pairs() const override { return false; }
  absl::StatusOr<Memory> Allocate(int64_t bytes) override {
    return devices_->Allocate(device_, bytes);
  }

  void Start(Operation operation, std::shared_ptr<WorkState> work) override {
    auto flight = std::make_shared<Flight>(work);
    work->helper = counter_;
    work->order_before = [devices = devices_, flight](StreamRef stream) {
      return devices->Put(stream, [flight] { flight->WaitForEnd(); });
    };
    if (const absl::Status status = Enqueue(std::move(operation), flight); !status.ok())
      flight->End(status);
  }

  void Abort(const absl::Status& why) override {
    std::set<std::shared_ptr<Flight>> flights;
    {
      absl::MutexLock lock(&mutex_);
      if (ended_.ok()) ended_ = why;
      flights.swap(flights_);
    }
    for (const std::shared_ptr<Flight>& flight : flights) {
      if (!flight->has_begun()) flight->End(why);
    }
    inner_->Abort(why);
    for (const std::shared_ptr<Flight>& flight : flights) flight->End(why);  // Just begun.
  }

 private:
  absl::Status Enqueue(Operation operation, const std::shared_ptr<Flight>& flight) {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(ended_);
    EK_ASSIGN_OR_RETURN(const StreamRef stream, StreamFor(operation.channel));
    EK_RETURN_IF_ERROR(devices_->Wait(stream, operation.after_event));
    if (operation.after.handle != nullptr) {
      EK_ASSIGN_OR_RETURN(const Event before, devices_->Record(operation.after));
      EK_RETURN_IF_ERROR(devices_->Wait(stream, before));
    }
    operation.in = OnHost(operation.in);
    operation.out = OnHost(operation.out);
    flights_.insert(flight);
    return devices_->Put(stream, [this, operation = std::move(operation), flight] {
      if (!flight->Begin()) return;
      auto moves = std::make_shared<WorkState>(operation.deadline, nullptr);
      moves->on_end = [this, flight](absl::Status status) {
        {
          absl::MutexLock ended(&mutex_);
          flights_.erase(flight);
        }
        flight->End(status);
        return status;
      };
      inner_->Start(operation, std::move(moves));
    });
  }

  absl::StatusOr<StreamRef> StreamFor(uint64_t channel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Stream& stream = streams_[channel];
    if (stream.handle == nullptr) {
      EK_ASSIGN_OR_RETURN(stream, devices_->CreateStream(device_));
    }
    return stream.ref();
  }

  SimulatedDevices* const devices_;
  const Device device_;
  std::shared_ptr<WorkHelper> counter_;
  absl::Mutex mutex_;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  std::set<std::shared_ptr<Flight>> flights_ ABSL_GUARDED_BY(mutex_);  // Those that have not ended.
  const std::unique_ptr<Backend> inner_;
  std::map<uint64_t, Stream> streams_
      ABSL_GUARDED_BY(mutex_);  // By channel. First to go: they use the rest.
};

// The groups of a job: the first rank that asks for its half of one has all made.
class SimulatedJob {
 public:
  SimulatedJob(SimulatedDevices* devices, int count, SimulatedGroupOptions options)
      : devices_(devices), count_(count), options_(std::move(options)) {}

  const SimulatedGroupOptions& options() const { return options_; }
  std::unique_ptr<Backend> Take(absl::string_view group, Device device, int rank, int world_size) {
    absl::MutexLock lock(&mutex_);
    std::vector<std::unique_ptr<Backend>>& halves = groups_[std::string(group)];
    if (halves.empty()) halves = CreateLocalBackends(world_size, {.is_blind = options_.is_blind});
    return std::make_unique<SimulatedBackend>(devices_, device, std::move(halves[rank]), options_);
  }
  Device DeviceOf(int rank) const { return Device::Cuda(rank % count_); }

 private:
  SimulatedDevices* const devices_;
  const int count_;
  const SimulatedGroupOptions options_;
  absl::Mutex mutex_;
  std::map<std::string, std::vector<std::unique_ptr<Backend>>> groups_ ABSL_GUARDED_BY(mutex_);
};

// A rank stays on its device in all groups.
std::unique_ptr<Communicator> MakeRank(const std::shared_ptr<SimulatedJob>& job, Device device,
                                       absl::string_view group, int rank, int world_size,
                                       std::unique_ptr<ControlLink> link) {
  return std::make_unique<Communicator>(
      job->Take(group, device, rank, world_size),
      std::make_unique<ControlChannel>(rank, world_size, std::move(link)), job->options().comm,
      group,
      [job, device](absl::string_view next, int next_rank, int next_world_size,
                    std::unique_ptr<ControlLink> next_link, absl::Duration) {
        return MakeRank(job, device, next, next_rank, next_world_size, std::move(next_link));
      });
}

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateSimulatedGroup(
    SimulatedDevices& devices, int world_size, const SimulatedGroupOptions& options) {
  if (world_size < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("CreateSimulatedGroup: a group of ", world_size, " ranks"));
  }
  EK_ASSIGN_OR_RETURN(const int count, devices.DeviceCount());
  const auto job = std::make_shared<SimulatedJob>(&devices, count, options);
  std::vector<std::unique_ptr<ControlLink>> links = CreateLocalLinks(world_size);
  std::vector<std::unique_ptr<Communicator>> group;
  for (int rank = 0; rank < world_size; ++rank) {
    group.push_back(
        MakeRank(job, job->DeviceOf(rank), "world", rank, world_size, std::move(links[rank])));
  }
  return group;
}

absl::Status RunSimulatedRanks(SimulatedDevices& devices, int world_size,
                               absl::FunctionRef<absl::Status(Communicator&)> body,
                               const SimulatedGroupOptions& options) {
  EK_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<Communicator>> group,
                      CreateSimulatedGroup(devices, world_size, options));
  return RunGroup(group, body);
}

}  // namespace evenkeel::internal
