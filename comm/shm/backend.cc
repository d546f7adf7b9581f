#include "evenkeel/comm/shm/backend.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/arith/common_part.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/librarys_thread.h"
#include "evenkeel/comm/base/shared_memory.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/shm/board.h"
#include "evenkeel/comm/shm/lane.h"
#include "evenkeel/comm/shm/mesh.h"
#include "evenkeel/comm/shm/registered_memory.h"
#include "evenkeel/comm/shm/tags.h"
#include "evenkeel/comm/shm/transfer.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// The id of the memory that rank 0 gives the others. Ids of registered memory are small.
constexpr uint64_t kBoardId = uint64_t{1} << 63;

// A rank that has this many lanes, and needs one more, leaves its idle ones. Programs usually have
// fewer; joining a lane again takes microseconds. Messages to and from all ranks, with and without
// tags, need four lanes for each rank.
constexpr size_t kLanes = 16;
constexpr size_t kLanesPerRank = 4;

// The part of an operation that the issuing call does itself, if it depends on no other rank: it
// costs about as much as handing the operation over.
constexpr int64_t kIssuersBytes = 512 << 10;
// The bytes that it moves before the others see that no thread polls its lane.
constexpr int64_t kFirstBytes = 64 << 10;
// The bytes moved between two checks of the clock, the other lanes, and the end of the group.
constexpr int64_t kStepBytes = 4 << 20;
// The time for which a thread polls before it sleeps. Waking it takes some 20 to 30 microseconds,
// and another rank some 10. The communication thread takes the processor from threads that compute;
// a waiting thread does not.
constexpr absl::Duration kThreadsPatience = absl::Microseconds(5);
constexpr absl::Duration kThreadsPatienceUnderWay = absl::Microseconds(50);  // All ranks are at it.
constexpr absl::Duration kWaitersPatience = absl::Microseconds(300);
// Start() waits so long for a rank that holds the board's lock; then the communication thread tries
// again and again. A rank holds it for about a microsecond.
constexpr absl::Duration kLocksPatience = absl::Milliseconds(1);
constexpr absl::Duration kJoinPause = absl::Milliseconds(1);
constexpr int kPausesPerLook = 4;
constexpr int kLooksPerGlance = 8;  // At the clock.
// The time that a broken connection waits for the control plane to report the cause. It usually
// takes milliseconds.
constexpr absl::Duration kMeetingPatience = absl::Seconds(2);

// The lock of the thread that drives a lane; no thread waits for it. Unlike a mutex's try, Try()
// fails only if another thread holds it.
class ABSL_LOCKABLE TryLock {
 public:
  bool Try() ABSL_EXCLUSIVE_TRYLOCK_FUNCTION(true) { return !is_held_.exchange(true); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { is_held_.store(false); }
  // For a lane that this rank has left: closed, it looks as if a thread held it.
  bool TryToClose() { return !is_held_.exchange(true); }
  void Open() { is_held_.store(false); }

 private:
  std::atomic<bool> is_held_ = true;
};

bool SharesProcessors(int ranks) {
  cpu_set_t processors;
  CPU_ZERO(&processors);
  return sched_getaffinity(0, sizeof(processors), &processors) == 0 &&
         ranks > CPU_COUNT(&processors);
}

}  // namespace

// Threads of this rank share three things. Lane::drive: its holder moves the lane's data.
// touching_: the number of threads that do so at the moment; Abort() waits until it is 0, and owns
// the lanes from then on. queue_mutex: guards the issued operations.
class ShmBackend::Core : public std::enable_shared_from_this<ShmBackend::Core> {
 public:
  Core(int rank, int world_size, std::string group, const RankNames& names)
      : rank_(rank),
        world_size_(world_size),
        group_(std::move(group)),
        names_(names),
        shares_processors_(SharesProcessors(world_size)) {}

  absl::StatusOr<std::string> Listen(std::string key);
  absl::Status Connect(const std::vector<std::string>& addresses, absl::Duration timeout);
  void Start(Operation operation, std::shared_ptr<WorkState> work);
  void Abort(const absl::Status& why);
  // The communication thread, until Stop().
  void Run();
  void Stop();

 private:
  struct Lane;

  struct Call : WorkHelper {
    Call(std::shared_ptr<Core> core, Operation operation, std::shared_ptr<WorkState> work)
        : core(std::move(core)), operation(std::move(operation)), work(std::move(work)) {}
    void Help(absl::Time until) override { core->Help(*this, until); }

    const std::shared_ptr<Core> core;
    std::atomic<Lane*> lane = nullptr;  // Null while it is in `joining_`.
    const Operation operation;
    // Guarded by lanes_mutex_, and then by the lane's queue_mutex; null once it is ended.
    std::shared_ptr<WorkState> work;
    std::atomic<bool> is_over = false;
  };

  // A lane to join, with the operations that wait for it.
  struct Joining {
    uint64_t key = 0;
    std::vector<int> ranks;
    int me = 0;
    bool has_tags = false;
    std::deque<std::shared_ptr<Call>> calls;  // Not empty.
  };

  struct Ending {
    std::shared_ptr<WorkState> work;
    absl::Status status;
  };

  // This rank's part of a place, which serves one lane after the other. `drive` is closed while the
  // rank is in no lane there.
  struct Lane {
    TryLock drive;
    // This and the next two are used by the holder of `drive`, between BeginTouching() and
    // EndTouching(). Join() and LeaveIfIdle() use it under lanes_mutex_ while `drive` is closed.
    ShmLane shared;
    std::shared_ptr<Call> driven;
    std::optional<ShmTransfer> transfer;     // The transfer of `driven`.
    std::atomic<bool> is_under_way = false;  // All ranks have come to `driven`.

    absl::Mutex queue_mutex;
    std::deque<std::shared_ptr<Call>> queue ABSL_GUARDED_BY(queue_mutex);
    ShmTags tags ABSL_GUARDED_BY(queue_mutex);
    std::atomic<int> waiting = 0;  // In `queue`.
    // For the communication thread. It is still at it while `has_endings`.
    std::vector<Ending> endings ABSL_GUARDED_BY(queue_mutex);
    std::atomic<bool> has_endings = false;
  };

  enum class Found { kNothing, kBlocked, kMore, kMoved };

  absl::Status Meet(const std::vector<std::string>& addresses, absl::Time deadline);
  // Returns the lane of the operation; null if it waits until this rank can join one.
  absl::StatusOr<Lane*> Queue(Operation operation, const std::shared_ptr<WorkState>& work);
  uint64_t KeyOf(const Operation& operation) const;
  Joining ToJoin(std::shared_ptr<Call> call) const;
  static void QueueIn(Lane& lane, std::shared_ptr<Call> call);
  // Joins the lane, and queues its operations; null: another rank held the board's lock.
  absl::StatusOr<Lane*> Join(Joining& joining, absl::Duration patience)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(lanes_mutex_);
  // Joins the lanes that others kept this rank from.
  void JoinLater();
  void LeaveIdleLanes() ABSL_EXCLUSIVE_LOCKS_REQUIRED(lanes_mutex_);
  bool LeaveIfIdle(Lane& lane, absl::Time until) ABSL_EXCLUSIVE_LOCKS_REQUIRED(lanes_mutex_);
  std::vector<Lane*> Lanes();

  // Moves the lane on once. Works that have ended are added to `endings`, or left to the
  // communication thread.
  Found Step(Lane& lane, int64_t budget, std::vector<Ending>& endings)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(lane.drive);
  // Returns the call of the queue that comes next; null if none can begin yet.
  static std::shared_ptr<Call> Next(Lane& lane) ABSL_EXCLUSIVE_LOCKS_REQUIRED(lane.queue_mutex);
  void EndDriven(Lane& lane, const absl::Status& status, std::vector<Ending>& endings);
  static void SetWatch(Lane& lane, ShmWatch watch);
  // Releases the lane such that no later event in it is lost: the thread that is rung for sees it,
  // or the thread that issues.
  void LetGo(Lane& lane, std::vector<Ending>& endings) ABSL_UNLOCK_FUNCTION(lane.drive);
  void Help(Call& call, absl::Time until);
  void FinishLeft(Lane& lane);
  static void Finish(std::vector<Ending>& endings);
  void RingThread();

  // Around each use of users' memory, and of a lane's state. False: the group has ended.
  bool BeginTouching();
  void EndTouching() { touching_.fetch_sub(1); }

  const int rank_;
  const int world_size_;
  const std::string group_;
  const RankNames names_;
  const bool shares_processors_;
  std::unique_ptr<ShmMesh> mesh_;
  std::unique_ptr<ShmBoard> board_;
  std::shared_ptr<void> when_freed_;

  std::atomic<bool> stop_ = false;
  std::atomic<int> touching_ = 0;
  std::atomic<bool> thread_sleeps_ = false;
  std::atomic<bool> thread_stops_ = false;

  absl::Mutex abort_mutex_;  // Held while memory is fenced.
  absl::Mutex lanes_mutex_;
  absl::Status ended_ ABSL_GUARDED_BY(lanes_mutex_);
  std::map<uint64_t, Lane*> lanes_ ABSL_GUARDED_BY(lanes_mutex_);  // By key: those it has joined.
  std::map<uint64_t, Joining> joining_ ABSL_GUARDED_BY(lanes_mutex_);  // By key.
  std::atomic<bool> is_joining_ = false;                               // `joining_` is not empty.
  // With fewer lanes than this, it leaves none.
  size_t leaves_at_ ABSL_GUARDED_BY(lanes_mutex_) = 0;
  // By place, ordered, so that all runs destroy them in one order. Each stays where it is: threads
  // may still look at a lane that this rank has left.
  std::map<int64_t, std::unique_ptr<Lane>> all_lanes_ ABSL_GUARDED_BY(lanes_mutex_);
  std::vector<Lane*> lane_list_ ABSL_GUARDED_BY(lanes_mutex_);
};

// Making ------------------------------------------------------------------------------------------

absl::StatusOr<std::string> ShmBackend::Core::Listen(std::string key) {
  EK_ASSIGN_OR_RETURN(std::unique_ptr<ShmMesh> mesh,
                      ShmMesh::Listen(rank_, {group_, world_size_, std::move(key), names_}));
  absl::MutexLock lock(&lanes_mutex_);
  mesh_ = std::move(mesh);
  return mesh_->address();
}

absl::Status ShmBackend::Core::Connect(const std::vector<std::string>& addresses,
                                       absl::Duration timeout) {
  const absl::Status status = Meet(addresses, SteadyNow() + timeout);
  if (status.ok() || absl::IsPermissionDenied(status)) return status;
  // A missing rank may be lost; the control plane then has the cause.
  const auto has_ended = [this]()
                             ABSL_EXCLUSIVE_LOCKS_REQUIRED(lanes_mutex_) { return !ended_.ok(); };
  absl::MutexLock lock(&lanes_mutex_);
  if (AwaitFor(lanes_mutex_, absl::Condition(&has_ended), kMeetingPatience)) return ended_;
  return Annotate(status, absl::StrCat("rank ", names_[rank_],
                                       " could not connect to the other ranks of its host"));
}

absl::Status ShmBackend::Core::Meet(const std::vector<std::string>& addresses,
                                    absl::Time deadline) {
  std::shared_ptr<SharedMemory> board;
  {
    absl::MutexLock lock(&lanes_mutex_);
    EK_RETURN_IF_ERROR(ended_);
  }
  if (world_size_ > 1) EK_RETURN_IF_ERROR(mesh_->Connect(addresses, deadline));
  if (rank_ == 0) {
    EK_ASSIGN_OR_RETURN(board, ShmBoard::CreateMemory(world_size_));
    if (world_size_ > 1) EK_RETURN_IF_ERROR(mesh_->Give(kBoardId, *board));
  }
  // Rank 0 gives it as soon as all have connected to it.
  while (board == nullptr) {
    absl::StatusOr<std::shared_ptr<SharedMemory>> given = mesh_->Find(0, kBoardId);
    if (given.ok()) {
      board = *std::move(given);
      break;
    }
    if (!absl::IsNotFound(given.status())) return given.status();
    if (stop_) break;
    if (SteadyNow() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("rank ", names_[rank_], ": rank ", names_[0],
                                                      " has not given the shared memory"));
    }
    absl::SleepFor(absl::Microseconds(100));
  }
  absl::MutexLock lock(&lanes_mutex_);
  EK_RETURN_IF_ERROR(ended_);
  board_ = std::make_unique<ShmBoard>(std::move(board), world_size_);
  when_freed_ = WhenRegisteredIsFreed([mesh = mesh_.get()](uint64_t id) {
    if (mesh != nullptr) mesh->TakeBack(id);
  });
  return absl::OkStatus();
}

uint64_t ShmBackend::Core::KeyOf(const Operation& operation) const {
  const Collective& what = operation.what;
  if (!IsPair(what.kind)) return StableHash(operation.channel, uint64_t{0});
  const bool sends = what.kind == CollectiveKind::kSend;
  const auto from = static_cast<uint64_t>(sends ? rank_ : what.root);
  const auto to = static_cast<uint64_t>(sends ? what.root : rank_);
  const uint64_t key = StableHash(operation.channel, (from << 32 | to) + 1);
  return what.tag == 0 ? key : StableHash(key, uint64_t{1});
}

ShmBackend::Core::Joining ShmBackend::Core::ToJoin(std::shared_ptr<Call> call) const {
  const Collective& what = call->operation.what;
  Joining lane{.key = KeyOf(call->operation), .me = rank_, .has_tags = what.tag != 0};
  if (IsPair(what.kind)) {
    lane.ranks = {rank_, what.root};
    lane.me = what.kind == CollectiveKind::kSend ? 0 : 1;
    if (lane.me == 1) std::swap(lane.ranks[0], lane.ranks[1]);
  } else {
    lane.ranks.resize(world_size_);
    std::iota(lane.ranks.begin(), lane.ranks.end(), 0);
  }
  lane.calls.push_back(std::move(call));
  return lane;
}

absl::StatusOr<ShmBackend::Core::Lane*> ShmBackend::Core::Join(Joining& joining,
                                                               absl::Duration patience) {
  EK_ASSIGN_OR_RETURN(const std::optional<ShmPlace> place, board_->Join(joining.key, patience));
  if (!place.has_value()) return nullptr;
  std::unique_ptr<Lane>& lane = all_lanes_[place->index];
  if (lane == nullptr) {
    lane = std::make_unique<Lane>();
    lane_list_.push_back(lane.get());
  }
  // This rank may join again before the last rank has left: then the lane continues.
  if (lane->shared.place.use != place->use) {
    EK_ASSIGN_OR_RETURN(ShmSeat* const seats, board_->Seats(*place, joining.ranks.size()));
    lane->shared = {.board = board_.get(),
                    .mesh = mesh_.get(),
                    .place = *place,
                    .seats = seats,
                    .ranks = std::move(joining.ranks),
                    .me = joining.me,
                    .has_tags = joining.has_tags,
                    .names = names_};
    absl::MutexLock lock(&lane->queue_mutex);
    lane->tags = {};
  }
  lanes_[joining.key] = lane.get();
  for (std::shared_ptr<Call>& call : joining.calls) QueueIn(*lane, std::move(call));
  lane->drive.Open();
  return lane.get();
}

void ShmBackend::Core::JoinLater() {
  std::vector<Ending> failed;
  {
    absl::MutexLock lock(&lanes_mutex_);
    for (auto at = joining_.begin(); at != joining_.end(); at = joining_.erase(at)) {
      const absl::StatusOr<Lane*> lane = Join(at->second, absl::ZeroDuration());
      if (lane.ok() && *lane == nullptr) break;
      if (lane.ok()) continue;
      for (const std::shared_ptr<Call>& call : at->second.calls)
        failed.push_back({std::move(call->work), lane.status()});
    }
    is_joining_ = !joining_.empty();
  }
  Finish(failed);
}

void ShmBackend::Core::LeaveIdleLanes() {
  const size_t enough = kLanes + kLanesPerRank * world_size_;
  if (lanes_.size() < std::max(enough, leaves_at_)) return;
  const absl::Time until = SteadyNow() + kLocksPatience;
  for (auto at = lanes_.begin(); at != lanes_.end();)
    at = LeaveIfIdle(*at->second, until) ? lanes_.erase(at) : std::next(at);
  leaves_at_ = 2 * lanes_.size();  // So that lanes in use are not looked at each time.
}

bool ShmBackend::Core::LeaveIfIdle(Lane& lane, absl::Time until) {
  // No thread needs to drive it while it is closed: the caller's lock keeps operations from being
  // issued meanwhile.
  if (lane.waiting > 0 || lane.has_endings || !lane.drive.TryToClose()) return false;
  const std::span<ShmSeat> seats(lane.shared.seats, lane.shared.ranks.size());
  const absl::StatusOr<bool> has_left =
      board_->Leave(lane.shared.place, seats, until - SteadyNow());
  if (has_left.ok() && *has_left) return true;
  lane.drive.Open();
  return false;
}

std::vector<ShmBackend::Core::Lane*> ShmBackend::Core::Lanes() {
  absl::MutexLock lock(&lanes_mutex_);
  return lane_list_;
}

// Driving -----------------------------------------------------------------------------------------

ShmBackend::Core::Found ShmBackend::Core::Step(Lane& lane, int64_t budget,
                                               std::vector<Ending>& endings) {
  if (!BeginTouching()) return Found::kNothing;
  Found found = Found::kMoved;
  if (lane.driven == nullptr && lane.waiting.load() > 0) {
    absl::MutexLock lock(&lane.queue_mutex);
    lane.driven = Next(lane);
  }
  if (lane.driven == nullptr) {
    found = lane.waiting.load() > 0 ? Found::kBlocked : Found::kNothing;
  } else if (lane.driven->is_over) {
    found = Found::kBlocked;  // It failed, and the group ends with it.
  } else {
    if (!lane.transfer.has_value()) lane.transfer.emplace(lane.shared, lane.driven->operation);
    const absl::StatusOr<ShmProgress> progress = lane.transfer->Advance(budget, stop_);
    const bool has_ended = progress.ok() && *progress == ShmProgress::kEnded;
    lane.is_under_way = progress.ok() && !has_ended && lane.transfer->all_are_here();
    if (!progress.ok()) {
      const Operation& operation = lane.driven->operation;
      EndDriven(lane,
                names_.AtOperation(progress.status(), rank_, operation.sequence, operation.what),
                endings);
    } else if (has_ended) {
      EndDriven(lane, absl::OkStatus(), endings);
    } else if (*progress == ShmProgress::kMore) {
      found = Found::kMore;
    } else if (*progress == ShmProgress::kBlocked) {
      found = Found::kBlocked;
    }
  }
  EndTouching();
  return found;
}

std::shared_ptr<ShmBackend::Core::Call> ShmBackend::Core::Next(Lane& lane) {
  if (lane.queue.empty()) return nullptr;
  if (!lane.shared.has_tags) return lane.queue.front();
  const std::optional<int64_t> tag = lane.tags.Next(lane.shared);
  if (!tag.has_value()) return nullptr;
  const auto found = std::find_if(lane.queue.begin(), lane.queue.end(), [&](const auto& call) {
    return call->operation.what.tag == *tag;
  });
  return found == lane.queue.end() ? nullptr : *found;
}

void ShmBackend::Core::EndDriven(Lane& lane, const absl::Status& status,
                                 std::vector<Ending>& endings) {
  if (!status.ok()) {  // Other ranks may still use it without an error; and a thread that waits for
                       // it has its memory back before Abort().
    board_->SayEnded(rank_);
    lane.transfer->Fence();
  }
  absl::MutexLock lock(&lane.queue_mutex);
  const std::shared_ptr<Call> call = lane.driven;
  call->is_over = true;
  if (status
          .ok()) {  // Else Abort() needs the transfer, and nothing more comes to pass in this lane.
    lane.transfer.reset();
    lane.driven = nullptr;
    lane.queue.erase(std::find(lane.queue.begin(), lane.queue.end(), call));
    lane.waiting.fetch_sub(1);
  }
  // In order; and callbacks on the communication thread, because they may want what a thread that
  // waits holds.
  if (lane.has_endings || call->work->HasCallbacks()) {
    lane.endings.push_back({std::move(call->work), status});
    lane.has_endings = true;
    RingThread();  // Now: the thread that drives may wait for an effect of these callbacks.
  } else {
    endings.push_back({std::move(call->work), status});
  }
}

void ShmBackend::Core::Finish(std::vector<Ending>& endings) {
  for (Ending& ending : endings) ending.work->Finish(ending.status);
  endings.clear();
}

void ShmBackend::Core::FinishLeft(Lane& lane) {
  while (lane.has_endings) {
    std::vector<Ending> endings;
    {
      absl::MutexLock lock(&lane.queue_mutex);
      endings.swap(lane.endings);
      if (endings.empty()) lane.has_endings = false;
    }
    Finish(endings);
  }
}

void ShmBackend::Core::SetWatch(Lane& lane, ShmWatch watch) {
  lane.shared.seats[lane.shared.me].watch.store(static_cast<uint32_t>(watch),
                                                std::memory_order_relaxed);
  // A thread that is about to sleep looks again after this: either it sees an event, or the thread
  // that caused the event sees `watch` (Notify()).
  if (watch != ShmWatch::kAwake) std::atomic_thread_fence(std::memory_order_seq_cst);
}

void ShmBackend::Core::RingThread() {
  std::atomic<uint32_t>& bell = board_->bell(rank_);
  bell.fetch_add(1);
  if (thread_sleeps_.load()) RingBell(bell);
}

void ShmBackend::Core::LetGo(Lane& lane, std::vector<Ending>& endings) {
  while (true) {
    Found found = Found::kNothing;
    const std::atomic<uint32_t>& watch = lane.shared.seats[lane.shared.me].watch;
    while (lane.waiting.load() > 0) {
      SetWatch(lane, ShmWatch::kRingThread);
      // Finds events from before the watch was visible. Data is moved while it is kAwake: the other
      // ranks need not ring.
      found = Step(lane, 0, endings);
      if (found == Found::kBlocked) break;
      SetWatch(lane, ShmWatch::kAwake);
      if (found == Found::kNothing) break;
      found = Step(lane, kIssuersBytes, endings);
      if (found == Found::kMore) break;
    }
    lane.drive.Unlock();
    if (found == Found::kMore) RingThread();
    // The communication thread, if it was rung for after the last look, may have found the lane
    // held.
    const bool was_rung =
        found == Found::kBlocked && watch.load() == static_cast<uint32_t>(ShmWatch::kAwake);
    // An operation was issued after the last look, by a thread that could not drive it.
    const bool has_more =
        found != Found::kBlocked && found != Found::kMore && lane.waiting.load() > 0;
    if ((!was_rung && !has_more) || stop_ || !lane.drive.Try()) return;
  }
}

void ShmBackend::Core::Start(Operation operation, std::shared_ptr<WorkState> work) {
  const absl::StatusOr<Lane*> queued = Queue(std::move(operation), work);
  if (!queued.ok()) return work->Finish(queued.status());
  if (*queued == nullptr) return RingThread();
  Lane& lane = **queued;
  if (!lane.drive.Try()) return;
  std::vector<Ending> endings;
  // A thread that waits for a small operation takes over a moment later. So the others see that
  // no thread polls as late as possible: they would ring for the communication thread, which would
  // take the processor of this one.
  SetWatch(lane, ShmWatch::kAwake);
  while (Step(lane, kFirstBytes, endings) == Found::kMoved) {
  }
  LetGo(lane, endings);
  Finish(endings);
}

// Holds one lock throughout: so no lane is left while an operation is about to be queued in it, and
// Abort() finds all operations.
absl::StatusOr<ShmBackend::Core::Lane*> ShmBackend::Core::Queue(
    Operation operation, const std::shared_ptr<WorkState>& work) {
  const uint64_t key = KeyOf(operation);
  absl::MutexLock lock(&lanes_mutex_);
  EK_RETURN_IF_ERROR(ended_);
  const auto call = std::make_shared<Call>(shared_from_this(), std::move(operation), work);
  work->helper = call;
  if (const auto joined = lanes_.find(key); joined != lanes_.end()) {
    QueueIn(*joined->second, call);
    return joined->second;
  }
  if (const auto waits = joining_.find(key); waits != joining_.end()) {
    waits->second.calls.push_back(call);
    return nullptr;
  }
  LeaveIdleLanes();
  Joining joining = ToJoin(call);
  const absl::StatusOr<Lane*> lane = Join(joining, kLocksPatience);
  if (!lane.ok()) call->work = nullptr;  // The caller ends it.
  if (lane.ok() && *lane == nullptr) {
    joining_.emplace(key, std::move(joining));
    is_joining_ = true;
  }
  return lane;
}

void ShmBackend::Core::QueueIn(Lane& lane, std::shared_ptr<Call> call) {
  absl::MutexLock lock(&lane.queue_mutex);
  call->lane = &lane;
  if (lane.shared.has_tags) lane.tags.Add(call->operation.what.tag);
  lane.queue.push_back(std::move(call));
  lane.waiting.fetch_add(1);
}

void ShmBackend::Core::Help(Call& call, absl::Time until) {
  if (call.lane == nullptr) return;  // The communication thread joins the lane.
  Lane& lane = *call.lane;
  if (call.is_over || !lane.drive.Try()) return;
  std::vector<Ending> endings;
  std::atomic<uint32_t>& bell = lane.shared.seats[lane.shared.me].bell;
  absl::Time asleep_at = absl::InfinitePast();
  SetWatch(lane, ShmWatch::kAwake);
  for (int look = 1; !call.is_over && !stop_; ++look) {
    const Found found = Step(lane, kStepBytes, endings);
    if (found == Found::kMoved || found == Found::kMore) {
      if (!call.is_over) Finish(endings);
      asleep_at = absl::InfinitePast();
      continue;
    }
    if (shares_processors_) sched_yield();
    for (int pause = 0; pause < kPausesPerLook; ++pause) Pause();
    if (look % kLooksPerGlance != 0) continue;
    const absl::Time now = SteadyNow();
    if (asleep_at == absl::InfinitePast()) asleep_at = now + kWaitersPatience;
    if (now >= until) break;
    if (now < asleep_at) continue;
    const uint32_t seen = bell.load();
    SetWatch(lane, ShmWatch::kRingWaiter);
    if (Step(lane, kStepBytes, endings) == Found::kBlocked && !stop_)
      AwaitBell(bell, seen, until - now);
    SetWatch(lane, ShmWatch::kAwake);
    if (!call.is_over) Finish(endings);
  }
  LetGo(lane, endings);
  Finish(endings);
}

void ShmBackend::Core::Run() {
  ThisThreadIsTheLibrarys();
  std::atomic<uint32_t>& bell = board_->bell(rank_);
  std::vector<Ending> endings;
  absl::Time asleep_at = absl::InfinitePast();
  while (!thread_stops_) {
    // A look at all lanes. Before it sleeps, it lets go of them with the others told to ring.
    const uint32_t seen = bell.load();
    const bool is_last_look = SteadyNow() >= asleep_at;
    bool has_moved = false;
    bool is_under_way = false;
    if (is_joining_) JoinLater();
    for (Lane* lane : Lanes()) {
      FinishLeft(*lane);
      if (lane->waiting.load() == 0 || !lane->drive.Try()) continue;
      if (is_last_look) {
        LetGo(*lane, endings);
      } else {
        SetWatch(*lane, ShmWatch::kAwake);
        const Found found = Step(*lane, kStepBytes, endings);
        has_moved |= found == Found::kMoved || found == Found::kMore;
        is_under_way |= lane->is_under_way.load();
        lane->drive.Unlock();
      }
      Finish(endings);
      FinishLeft(*lane);
    }
    if (!is_last_look) {
      if (has_moved) {
        asleep_at = SteadyNow() + (is_under_way && !shares_processors_ ? kThreadsPatienceUnderWay
                                                                       : kThreadsPatience);
      }
      continue;
    }
    thread_sleeps_ = true;
    if (bell.load() == seen && !thread_stops_)
      AwaitBell(bell, seen, is_joining_ ? kJoinPause : absl::InfiniteDuration());
    thread_sleeps_ = false;
    asleep_at = SteadyNow() + kThreadsPatience;
  }
  for (Lane* lane : Lanes()) FinishLeft(*lane);
}

void ShmBackend::Core::Stop() {
  thread_stops_ = true;
  if (board_ != nullptr) RingBell(board_->bell(rank_));
}

// Ending ------------------------------------------------------------------------------------------

bool ShmBackend::Core::BeginTouching() {
  touching_.fetch_add(1);
  if (!stop_) return true;
  touching_.fetch_sub(1);
  return false;
}

void ShmBackend::Core::Abort(const absl::Status& why) {
  std::vector<Ending> endings;
  {
    absl::MutexLock fencing(&abort_mutex_);
    std::vector<Lane*> lanes;
    absl::Status first;
    {
      absl::MutexLock lock(&lanes_mutex_);
      if (ended_.ok()) ended_ = why;
      first = ended_;
      for (const auto& [key, lane] : lanes_) lanes.push_back(lane);
      for (const auto& [key, joining] : joining_)
        for (const std::shared_ptr<Call>& call : joining.calls)
          endings.push_back({std::move(call->work), first});
      joining_.clear();
      is_joining_ = false;
      stop_ = true;
      if (mesh_ != nullptr) mesh_->Close();
    }
    while (touching_.load() > 0)
      absl::SleepFor(absl::Microseconds(20));  // Until the end of a block.
    if (!lanes.empty()) board_->SayEnded(rank_);
    for (Lane* lane : lanes) {
      if (lane->transfer.has_value()) lane->transfer->Fence();
      lane->transfer.reset();
      lane->driven = nullptr;  // Has this object, which has the lane.
      RingBell(lane->shared.seats[lane->shared.me].bell);
      absl::MutexLock lock(&lane->queue_mutex);
      for (const std::shared_ptr<Call>& call : lane->queue) {
        call->is_over = true;
        if (call->work != nullptr) endings.push_back({std::move(call->work), first});
      }
      lane->queue.clear();
      lane->waiting = 0;
    }
  }
  Finish(endings);
}

// ShmBackend --------------------------------------------------------------------------------------

ShmBackend::ShmBackend(int rank, int world_size, std::string group, const RankNames& names)
    : core_(std::make_shared<Core>(rank, world_size, std::move(group), names)) {}

ShmBackend::~ShmBackend() {
  core_->Abort(absl::CancelledError("the communicator is gone"));
  core_->Stop();
  if (thread_.joinable()) thread_.join();
}

absl::StatusOr<std::string> ShmBackend::Listen(std::string key) {
  return core_->Listen(std::move(key));
}

absl::Status ShmBackend::Connect(const std::vector<std::string>& addresses,
                                 absl::Duration timeout) {
  EK_RETURN_IF_ERROR(core_->Connect(addresses, timeout));
  EK_ASSIGN_OR_RETURN(thread_, StartThread("shared memory", [core = core_.get()] { core->Run(); }));
  return absl::OkStatus();
}

void ShmBackend::Start(Operation operation, std::shared_ptr<WorkState> work) {
  core_->Start(std::move(operation), std::move(work));
}

void ShmBackend::Abort(const absl::Status& why) { core_->Abort(why); }

absl::StatusOr<Memory> ShmBackend::Allocate(int64_t bytes) { return AllocateRegistered(bytes); }

}  // namespace evenkeel::internal
