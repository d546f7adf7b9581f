#include "evenkeel/comm/testing/simulated_nccl.h"

#include <atomic>
#include <cstring>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/testing/simulated_nccl_meeting.h"

namespace evenkeel::internal {
namespace {

// For kernels on one device.
class Room {
 public:
  explicit Room(int places) : free_(places) {}

  class Stay {
   public:
    explicit Stay(std::shared_ptr<Room> room) : room_(std::move(room)) {
      if (room_ != nullptr) room_->Enter();
    }
    ~Stay() {
      if (room_ != nullptr) room_->Leave();
    }
    Stay(const Stay&) = delete;
    Stay& operator=(const Stay&) = delete;

   private:
    const std::shared_ptr<Room> room_;
  };

 private:
  void Enter() {
    absl::MutexLock lock(&mutex_);
    const auto is_free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return free_ > 0; };
    mutex_.Await(absl::Condition(&is_free));
    --free_;
  }
  void Leave() {
    absl::MutexLock lock(&mutex_);
    ++free_;
  }

  absl::Mutex mutex_;
  int free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

// Those who called Init() with one id.
struct SimulatedNccl::Group {
  explicit Group(int world_size) : meeting(std::make_shared<SimulatedNcclMeeting>(world_size)) {}

  struct Member {
    Process process;
    Device device;
  };
  const std::shared_ptr<SimulatedNcclMeeting> meeting;
  std::map<int, Member> members;  // By rank.

  // Returns the state of the connection.
  NcclAnswer State() const {
    if (static_cast<int>(members.size()) < meeting->world_size()) return {NcclCode::kInProgress};
    for (auto a = members.begin(); a != members.end(); ++a) {
      if (a->second.process.version != members.begin()->second.process.version)
        return {NcclCode::kInProgress};
      for (auto b = std::next(a); b != members.end(); ++b) {
        const bool is_shared = a->second.process.host == b->second.process.host &&
                               a->second.device == b->second.device;
        if (!is_shared || a->second.process.may_share_device) continue;
        return {NcclCode::kInvalidUsage,
                absl::StrCat("Duplicate GPU detected : rank ", a->first, " and rank ", b->first,
                             " both on CUDA device ", a->second.device.index)};
      }
    }
    return {};
  }
};

struct SimulatedNccl::World {
  World(SimulatedDevices* of, int at_once) : devices(of), kernels_at_once(at_once) {}

  SimulatedDevices* const devices;
  const int kernels_at_once;
  mutable absl::Mutex mutex;
  std::map<int, std::unique_ptr<Loaded>> libraries ABSL_GUARDED_BY(mutex);
  std::map<std::string, std::shared_ptr<Group>> groups ABSL_GUARDED_BY(mutex);  // By id.
  int64_t ids ABSL_GUARDED_BY(mutex) = 0;
  struct Failure {
    NcclAnswer answer;
    int after = 0;
  };
  std::map<std::pair<int, std::string>, Failure> failures ABSL_GUARDED_BY(mutex);
  std::map<std::pair<int, std::string>, bool> hangs ABSL_GUARDED_BY(mutex);
  int hanging ABSL_GUARDED_BY(mutex) = 0;
  bool is_released ABSL_GUARDED_BY(mutex) = false;
  int aborts_in_flight ABSL_GUARDED_BY(mutex) = 0;
  std::map<int, NcclAnswer> states ABSL_GUARDED_BY(mutex);
  std::map<int, bool> unconnected ABSL_GUARDED_BY(mutex);
  std::vector<std::shared_ptr<SimulatedNcclMeeting>> meetings ABSL_GUARDED_BY(mutex);
  std::map<int, std::shared_ptr<Room>> rooms ABSL_GUARDED_BY(mutex);  // By device.
  int64_t kernels ABSL_GUARDED_BY(mutex) = 0;
  int64_t registered ABSL_GUARDED_BY(mutex) = 0;
  int64_t communicators ABSL_GUARDED_BY(mutex) = 0;
  std::vector<std::string> mistakes ABSL_GUARDED_BY(mutex);
  std::map<void*, Memory> memory ABSL_GUARDED_BY(mutex);
};

struct SimulatedNccl::Comm {
  std::shared_ptr<Group> group;
  int rank = 0;
  int64_t calls = 0;  // Guarded by nothing: NCCL's are not either.
  std::atomic<int> running = 0;
  bool is_connected = false;
  NcclAnswer failure;                  // Set by a failed group of calls, for good.
  std::vector<SimulatedCall> grouped;  // Since GroupStart().
  StreamRef stream;
  int polls_until_launched =
      0;  // How often State() is asked before a group of calls is on the stream.
  struct ScaledSum {
    double scale = 1.0;
    DType dtype = DType::kFloat32;
  };
  std::map<int, ScaledSum> scaled_sums;
  int next_op = kNcclAverage + 1;
  std::map<void*, int64_t> registrations;
  bool is_aborted = false;  // Guarded by the world's mutex.
};

namespace {

thread_local int groups_begun = 0;  // NCCL counts on each thread, too.

}  // namespace

class SimulatedNccl::Loaded : public NcclApi {
 public:
  Loaded(World* world, int process, const Process& options)
      : world_(*world), process_(process), options_(options) {}

  int version() override { return options_.version; }
  absl::StatusOr<NcclPlace> PlaceOf(Device device) override {
    return NcclPlace{.host = options_.host,
                     .device = absl::StrCat("0000:0", device.index, ":00.0"),
                     .may_share_device = options_.may_share_device};
  }

  NcclAnswer GetUniqueId(std::string* id) override {
    NcclAnswer answer = Scripted("GetUniqueId", nullptr);
    absl::MutexLock lock(&world_.mutex);
    *id = absl::StrCat("id ", world_.ids++);
    return answer;
  }

  NcclAnswer Init(Device device, const std::string& id, int rank, int world_size,
                  NcclComm* comm) override {
    if (NcclAnswer answer = Scripted("Init", nullptr); answer.is_failure()) return answer;
    auto made = std::make_unique<Comm>();
    made->rank = rank;
    absl::MutexLock lock(&world_.mutex);
    std::shared_ptr<Group>& group = world_.groups[id];
    if (group == nullptr) {
      group = std::make_shared<Group>(world_size);
      world_.meetings.push_back(group->meeting);
    }
    if (world_.unconnected.count(process_) == 0) group->members[rank] = {options_, device};
    made->group = group;
    *comm = made.release();
    ++world_.communicators;
    return {NcclCode::kInProgress};
  }

  NcclAnswer State(NcclComm of) override {
    const Running call(world_, of, "State");
    Comm& comm = call.comm;
    if (NcclAnswer answer = Scripted("State", &comm); answer.is_failure()) return answer;
    absl::MutexLock lock(&world_.mutex);
    const auto scripted = world_.states.find(process_);
    if (scripted != world_.states.end()) return scripted->second;
    if (!comm.is_connected) {
      const NcclAnswer state = comm.group->State();
      comm.is_connected = state.code == NcclCode::kSuccess;
      return state;
    }
    if (comm.polls_until_launched == 0) return comm.failure;
    if (--comm.polls_until_launched > 0) return {NcclCode::kInProgress};
    return PutOnStream(comm);
  }

  NcclAnswer Abort(NcclComm of) override {
    Comm& comm = *static_cast<Comm*>(of);
    {
      absl::MutexLock lock(&world_.mutex);
      ++world_.aborts_in_flight;
      if (comm.is_aborted) world_.mistakes.push_back("Abort: of a communicator that is gone");
      comm.is_aborted = true;
      world_.registered -= static_cast<int64_t>(comm.registrations.size());
    }
    comm.group->meeting->Abort(comm.rank);
    const NcclAnswer answer = Scripted("Abort", nullptr);
    const absl::MutexLock lock(&world_.mutex);
    graveyard_.push_back(std::unique_ptr<Comm>(&comm));  // A call that hung still looks at it.
    --world_.aborts_in_flight;
    --world_.communicators;
    return answer;
  }

  NcclAnswer GroupStart() override {
    const NcclAnswer answer = Scripted("GroupStart", nullptr);
    if (!answer.is_failure()) ++groups_begun;
    return answer;
  }

  NcclAnswer GroupEnd(NcclComm of) override {
    const Running call(world_, of, "GroupEnd");
    Comm& comm = call.comm;
    if (groups_begun == 0) {
      absl::MutexLock lock(&world_.mutex);
      world_.mistakes.push_back("GroupEnd: no group of calls has begun on this thread");
    } else {
      --groups_begun;
    }
    NcclAnswer answer = Scripted("GroupEnd", &comm);
    if (comm.failure.is_failure()) answer = comm.failure;
    if (answer.is_failure()) {
      comm.grouped.clear();
      return comm.failure = answer;
    }
    if (comm.grouped.empty()) return {};
    absl::MutexLock lock(&world_.mutex);
    comm.polls_until_launched = 2;
    return {NcclCode::kInProgress};
  }

  NcclAnswer Enqueue(const NcclCall& call, NcclComm of, StreamRef stream) override {
    const Running running(world_, of, "Enqueue");
    Comm& comm = running.comm;
    if (groups_begun == 0)
      return {NcclCode::kInvalidUsage, "not between GroupStart() and GroupEnd()"};
    if (NcclAnswer answer = Scripted("Enqueue", &comm); answer.is_failure())
      return comm.failure = answer;
    if (NcclAnswer answer = CheckReady(comm); answer.is_failure()) return comm.failure = answer;
    if (NcclAnswer answer = CheckCall(call, comm); answer.is_failure())
      return comm.failure = answer;
    SimulatedCall resolved{.call = call, .is_registered = IsRegistered(comm, call)};
    if (call.op > kNcclAverage) {
      const auto made = comm.scaled_sums.find(call.op);
      if (made == comm.scaled_sums.end() || made->second.dtype != call.dtype) {
        return comm.failure = {NcclCode::kInvalidArgument,
                               "there is no such reduction of that type"};
      }
      resolved.scale = made->second.scale;
      resolved.call.op = kNcclSum;
    }
    comm.grouped.push_back(resolved);
    comm.stream = stream;
    return {};
  }

  NcclAnswer MakeScaledSum(double scale, DType dtype, NcclComm of, int* op) override {
    const Running call(world_, of, "MakeScaledSum");
    Comm& comm = call.comm;
    if (NcclAnswer answer = Scripted("MakeScaledSum", &comm); answer.is_failure()) return answer;
    if (NcclAnswer answer = CheckReady(comm); answer.is_failure()) return answer;
    *op = comm.next_op++;
    comm.scaled_sums[*op] = {scale, dtype};
    return {};
  }
  NcclAnswer DropReduction(int op, NcclComm of) override {
    const Running call(world_, of, "DropReduction");
    Comm& comm = call.comm;
    comm.scaled_sums.erase(op);
    return Scripted("DropReduction", &comm);
  }

  NcclAnswer AllocateMemory(Device device, int64_t bytes, void** data) override {
    if (NcclAnswer answer = Scripted("AllocateMemory", nullptr); answer.is_failure()) return answer;
    absl::StatusOr<Memory> memory = world_.devices->Allocate(device, bytes);
    if (!memory.ok())
      return {NcclCode::kUnhandledCudaError, std::string(memory.status().message())};
    *data = memory->data.get();
    {
      const absl::StatusOr<Stream> stream =
          world_.devices->CreateStream(device);  // Has done it when it goes.
      if (!stream.ok())
        return {NcclCode::kUnhandledCudaError, std::string(stream.status().message())};
      (void)world_.devices->Put(stream->ref(),
                                [to = *data, bytes] { std::memset(to, 0xa5, bytes); });
    }
    absl::MutexLock lock(&world_.mutex);
    world_.memory[*data] = *std::move(memory);
    return {};
  }
  NcclAnswer FreeMemory(Device, void* data) override {
    const NcclAnswer answer = Scripted("FreeMemory", nullptr);
    Memory freed;
    absl::MutexLock lock(&world_.mutex);
    std::swap(freed, world_.memory[data]);
    world_.memory.erase(data);
    return answer;
  }
  NcclAnswer Register(NcclComm of, void* data, int64_t bytes, void** handle) override {
    const Running call(world_, of, "Register");
    Comm& comm = call.comm;
    if (NcclAnswer answer = Scripted("Register", &comm); answer.is_failure()) return answer;
    if (NcclAnswer answer = CheckReady(comm); answer.is_failure()) return answer;
    *handle = nullptr;
    if (!options_.registers) return {};
    *handle = data;
    absl::MutexLock lock(&world_.mutex);
    comm.registrations[data] = bytes;
    ++world_.registered;
    return {};
  }
  NcclAnswer Deregister(NcclComm of, void* handle) override {
    const Running call(world_, of, "Deregister");
    Comm& comm = call.comm;
    if (NcclAnswer answer = Scripted("Deregister", &comm); answer.is_failure()) return answer;
    if (NcclAnswer answer = CheckReady(comm); answer.is_failure()) return answer;
    absl::MutexLock lock(&world_.mutex);
    world_.registered -= static_cast<int64_t>(comm.registrations.erase(handle));
    return {};
  }

 private:
  // A call into a communicator.
  struct Running {
    Running(World& world, NcclComm of, absl::string_view name) : comm(*static_cast<Comm*>(of)) {
      ++comm.calls;
      const bool is_second = ++comm.running > 1;
      absl::MutexLock lock(&world.mutex);
      if (is_second) world.mistakes.push_back(absl::StrCat(name, ": while another call runs"));
      if (comm.is_aborted)
        world.mistakes.push_back(absl::StrCat(name, ": into a communicator that is gone"));
    }
    ~Running() { --comm.running; }
    Comm& comm;
  };

  static NcclAnswer CheckReady(const Comm& comm) {
    if (comm.failure.is_failure()) return comm.failure;
    if (comm.is_connected && comm.polls_until_launched == 0) return {};
    return {NcclCode::kInvalidArgument,
            "Attempt to use communicator before the previous operation returned ncclSuccess"};
  }

  // NCCL itself says nothing of buffers that overlap, and of types that it does not have.
  static NcclAnswer CheckCall(const NcclCall& call, const Comm& comm) {
    const int ranks = comm.group->meeting->world_size();
    if (HasRoot(call.kind) && (call.root < 0 || call.root >= ranks))
      return {NcclCode::kInvalidArgument, "there is no such root"};
    if (Reduces(call.kind) && call.dtype == DType::kInt16)
      return {NcclCode::kInvalidArgument, "no reduction of int16"};
    if (call.in == nullptr || call.out == nullptr) return {};
    const int64_t part = call.count * SizeOf(call.dtype);
    const auto* const in = static_cast<const char*>(call.in);
    const auto* const out = static_cast<const char*>(call.out);
    int64_t in_bytes = part, out_bytes = part, in_place = 0;  // in_place: of output from input.
    if (SlicesInput(call.kind)) in_bytes *= ranks;
    if (SlicesOutput(call.kind)) out_bytes *= ranks;
    if (call.kind == CollectiveKind::kReduceScatter) in_place = comm.rank * part;
    if (call.kind == CollectiveKind::kAllGather) in_place = -comm.rank * part;
    if (in >= out + out_bytes || out >= in + in_bytes) return {};
    if (out - in == in_place && call.kind != CollectiveKind::kAllToAll) return {};
    return {NcclCode::kInvalidArgument, "the buffers overlap, and not as they do in place"};
  }

  NcclAnswer Scripted(absl::string_view call, const Comm* comm) {
    const std::pair<int, std::string> key(process_, std::string(call));
    absl::MutexLock lock(&world_.mutex);
    if (world_.hangs.erase(key) > 0) {
      const auto may_go = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(world_.mutex) {
        return world_.is_released || (comm != nullptr && comm->is_aborted);
      };
      ++world_.hanging;
      world_.mutex.Await(absl::Condition(&may_go));
      --world_.hanging;
      if (comm != nullptr && comm->is_aborted) return {NcclCode::kInternalError, "aborted"};
    }
    const auto failure = world_.failures.find(key);
    if (failure == world_.failures.end() || failure->second.after-- > 0) return {};
    const NcclAnswer answer = failure->second.answer;
    world_.failures.erase(failure);
    return answer;
  }

  bool IsRegistered(const Comm& comm, const NcclCall& call) const {
    for (const auto& [data, bytes] : comm.registrations) {
      for (const void* const buffer : {call.in, static_cast<const void*>(call.out)}) {
        const auto* const begin = static_cast<const char*>(data);
        const auto* const at = static_cast<const char*>(buffer);
        if (at != nullptr && at >= begin && at < begin + bytes) return true;
      }
    }
    return false;
  }

  std::shared_ptr<Room> RoomOn(Device device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(world_.mutex) {
    if (world_.kernels_at_once == 0) return nullptr;
    std::shared_ptr<Room>& room = world_.rooms[device.index];
    if (room == nullptr) room = std::make_shared<Room>(world_.kernels_at_once);
    return room;
  }

  NcclAnswer PutOnStream(Comm& comm) ABSL_EXCLUSIVE_LOCKS_REQUIRED(world_.mutex) {
    ++world_.kernels;
    const std::shared_ptr<SimulatedNcclMeeting> meeting = comm.group->meeting;
    const auto kernel = meeting->Launch(comm.rank, std::exchange(comm.grouped, {}));
    const absl::Status put = world_.devices->Put(
        comm.stream, [meeting, kernel, rank = comm.rank, room = RoomOn(comm.stream.device)] {
          const Room::Stay stay(room);
          meeting->Run(rank, kernel);
        });
    if (put.ok()) return {};
    return comm.failure = {NcclCode::kUnhandledCudaError, std::string(put.message())};
  }

  World& world_;
  const int process_;
  const Process options_;
  std::vector<std::unique_ptr<Comm>> graveyard_ ABSL_GUARDED_BY(world_.mutex);
};

SimulatedNccl::SimulatedNccl(SimulatedDevices& devices, int kernels_at_once)
    : world_(std::make_shared<World>(&devices, kernels_at_once)) {}
SimulatedNccl::~SimulatedNccl() { Release(); }

NcclApi& SimulatedNccl::Library(int process, const Process& options) {
  absl::MutexLock lock(&world_->mutex);
  std::unique_ptr<Loaded>& library = world_->libraries[process];
  if (library == nullptr) library = std::make_unique<Loaded>(world_.get(), process, options);
  return *library;
}

void SimulatedNccl::FailNext(int process, absl::string_view call, NcclAnswer answer, int after) {
  absl::MutexLock lock(&world_->mutex);
  world_->failures[{process, std::string(call)}] = {std::move(answer), after};
}
void SimulatedNccl::HangNext(int process, absl::string_view call) {
  absl::MutexLock lock(&world_->mutex);
  world_->hangs[{process, std::string(call)}] = true;
}
void SimulatedNccl::Release() {
  World& world = *world_;
  absl::MutexLock lock(&world.mutex);
  world.is_released = true;
  const auto are_out = [&world]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(world.mutex) {
    return world.aborts_in_flight == 0;
  };
  world.mutex.Await(absl::Condition(&are_out));
}
int SimulatedNccl::hanging() const {
  absl::MutexLock lock(&world_->mutex);
  return world_->hanging;
}
void SimulatedNccl::SetState(int process, NcclAnswer answer) {
  absl::MutexLock lock(&world_->mutex);
  world_->states[process] = std::move(answer);
}
void SimulatedNccl::NeverConnect(int process) {
  absl::MutexLock lock(&world_->mutex);
  world_->unconnected[process] = true;
}

int64_t SimulatedNccl::garbage() const {
  absl::MutexLock lock(&world_->mutex);
  int64_t garbage = 0;
  for (const auto& meeting : world_->meetings) garbage += meeting->garbage();
  return garbage;
}
int64_t SimulatedNccl::kernels() const {
  absl::MutexLock lock(&world_->mutex);
  return world_->kernels;
}
int64_t SimulatedNccl::registered() const {
  absl::MutexLock lock(&world_->mutex);
  return world_->registered;
}
int64_t SimulatedNccl::communicators() const {
  absl::MutexLock lock(&world_->mutex);
  return world_->communicators;
}
std::vector<std::string> SimulatedNccl::mistakes() const {
  absl::MutexLock lock(&world_->mutex);
  return world_->mistakes;
}
int64_t SimulatedNccl::allocated() const {
  absl::MutexLock lock(&world_->mutex);
  return static_cast<int64_t>(world_->memory.size());
}

}  // namespace evenkeel::internal
