// The way of a collective through a group:
//
//   Start() on each rank     puts its operation into a seat of a Meeting, which is found by lane
//     and sequence;
//   the last one to arrive   makes the meeting ready; the meetings of a lane run one after the
//     other;
//   a worker                 opens it: cuts it into slices and posts them;
//   all workers              move the slices' data;
//   the last slice           closes it: finishes the ranks' works, then lets the lane's next
//     meeting run.
//
// A rank that is aborted breaks its meetings: they never run any more, and slices that run give up.
// The other ranks' works stay until these are aborted too, by the notice that they get over the
// control plane. Only a contradiction ends the group for all ranks from here.
//
// Works are finished without the lock, because that runs callbacks; and by workers, because Start()
// runs under its caller's locks.

#include "evenkeel/comm/local/backend.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/arith/common_part.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/local/exchange.h"
#include "evenkeel/comm/local/meeting.h"
#include "evenkeel/comm/work.h"

namespace evenkeel::internal {
namespace {

// Below this a slice takes no longer than waking up another thread, some ten microseconds.
constexpr int64_t kSliceBytes = 256 << 10;

// A work that is to be finished.
struct Ending {
  int rank = -1;
  std::shared_ptr<WorkState> work;
  absl::Status status;
};
using Endings = std::vector<Ending>;

int SlicesFor(const LocalExchange& exchange, int workers) {
  const int64_t most = std::min<int64_t>(workers, exchange.elements());
  return static_cast<int>(std::max<int64_t>(1, std::min(most, exchange.bytes() / kSliceBytes)));
}

bool HaveEqualSizes(const TensorList& a, const TensorList& b) {
  return std::equal(
      a.begin(), a.end(), b.begin(), b.end(),
      [](const TensorView& x, const TensorView& y) { return x.bytes() == y.bytes(); });
}

// Makes `other` do what `first` does, if their bytes are as many.
void PassFor(const Operation& first, Operation& other) {
  if (!HaveEqualSizes(first.in, other.in) || !HaveEqualSizes(first.out, other.out)) return;
  other.what = first.what;
  other.scale = first.scale;
  const auto pass = [](const TensorList& as, TensorList& list) {
    for (size_t i = 0; i < list.size(); ++i)
      list[i] = {list[i].data, as[i].count, as[i].dtype, list[i].device};
  };
  pass(first.in, other.in);
  pass(first.out, other.out);
}

absl::Condition IsZero(const int* count) {
  return absl::Condition(
      +[](const int* n) { return *n == 0; }, count);
}

class LocalGroup {
 public:
  LocalGroup(int world_size, const LocalBackendOptions& options)
      : world_size_(world_size),
        is_blind_(options.is_blind),
        names_(options.names),
        ended_(world_size),
        running_(world_size),
        finishing_(world_size),
        leaving_(world_size),
        workers_(world_size) {}

  bool is_blind() const { return is_blind_; }
  const RankNames& names() const { return names_; }
  void Start(int rank, Operation operation, std::shared_ptr<WorkState> work);
  void Abort(int rank, const absl::Status& why);

  // Runs tasks, of all ranks, until Leave(rank).
  void RunWorker(int rank);
  // After Abort(): waits for callbacks of the rank's works that run, and lets its worker stop.
  void Leave(int rank);

 private:
  Lane& LaneOf(int rank, const Operation& operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunFrontIfReady(Lane& lane) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Open(Lane& lane, const std::shared_ptr<Meeting>& meeting);
  void RunSlice(Lane& lane, const std::shared_ptr<Meeting>& meeting, int index, int count);
  void Close(Lane& lane, Meeting& meeting);

  // Brackets around touching the buffers of a meeting. False: they may not be touched.
  bool BeginTouching(const Meeting& meeting) ABSL_LOCKS_EXCLUDED(mutex_);
  void EndTouching(const Meeting& meeting) ABSL_LOCKS_EXCLUDED(mutex_);

  template <typename Visit>
  void ForEachSeatOf(int rank, Visit visit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndForAll(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the work out of the seat, unless it has been taken already.
  void Take(Seat& seat, const absl::Status& status, Endings& endings)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Finish(Endings endings) ABSL_LOCKS_EXCLUDED(mutex_);
  void Post(std::function<void()> task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int world_size_;
  const bool is_blind_;
  const RankNames names_;
  absl::Mutex mutex_;
  absl::CondVar tasks_posted_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  std::map<LaneKey, Lane> lanes_ ABSL_GUARDED_BY(mutex_);
  // By rank:
  std::vector<absl::Status> ended_ ABSL_GUARDED_BY(mutex_);  // Why; OK while it lives.
  std::vector<int> running_ ABSL_GUARDED_BY(mutex_);         // Slices that touch its buffers now.
  std::vector<int> finishing_ ABSL_GUARDED_BY(mutex_);       // Works that are being finished now.
  std::vector<bool> leaving_ ABSL_GUARDED_BY(mutex_);        // Its worker is to stop.
  int workers_ ABSL_GUARDED_BY(mutex_);
};

void LocalGroup::Start(int rank, Operation operation, std::shared_ptr<WorkState> work) {
  absl::MutexLock lock(&mutex_);
  const CollectiveKind kind = operation.what.kind;
  const int index = IsPair(kind) ? kind == CollectiveKind::kRecv : rank;
  Seat seat{.rank = rank, .operation = std::move(operation), .work = std::move(work)};
  if (!ended_[rank].ok()) {
    Endings endings;
    Take(seat, ended_[rank], endings);
    return Post([this, endings] { Finish(endings); });
  }
  Lane& lane = LaneOf(rank, seat.operation);
  Meeting& meeting = lane.At(seat.operation.sequence);
  if (is_blind_ && !meeting.seats.empty())
    PassFor(meeting.seats.begin()->second.operation, seat.operation);
  const bool agree =
      meeting.seats.empty() || Agree(meeting.seats.begin()->second.operation, seat.operation);
  meeting.seats[index] = std::move(seat);
  if (!agree) return EndForAll(DisagreementOf(meeting.seats, names_));
  if (IsUneven(kind)) {
    const absl::Status fits = CheckUnevenSizes(meeting.seats, rank, names_);
    if (!fits.ok()) return EndForAll(fits);
  }
  RunFrontIfReady(lane);
}

Lane& LocalGroup::LaneOf(int rank, const Operation& operation) {
  const Collective& what = operation.what;
  LaneKey key(operation.channel, -1, -1, -1);
  if (IsPair(what.kind)) {
    const bool sends = what.kind == CollectiveKind::kSend;
    key = {operation.channel, sends ? rank : what.root, sends ? what.root : rank, what.tag};
  }
  const auto [at, is_new] = lanes_.try_emplace(key);
  Lane& lane = at->second;
  if (is_new) {
    lane.key = key;
    lane.is_pair = IsPair(what.kind);
    lane.seats = lane.is_pair ? 2 : world_size_;
  }
  // The same on all its ranks, since nothing is under way.
  if (lane.meetings.empty()) lane.first = operation.sequence;
  return lane;
}

void LocalGroup::RunFrontIfReady(Lane& lane) {
  if (lane.meetings.empty()) return;
  const std::shared_ptr<Meeting>& front = lane.meetings.front();
  if (front->state != Meeting::State::kGathering || front->seats.size() < lane.seats ||
      front->is_broken)
    return;
  front->state = Meeting::State::kRunning;
  Post([this, &lane, front] { Open(lane, front); });
}

void LocalGroup::Open(Lane& lane, const std::shared_ptr<Meeting>& meeting) {
  int slices = 1;
  if (BeginTouching(*meeting)) {
    std::vector<Operation*> operations;
    for (auto& [index, seat] : meeting->seats) operations.push_back(&seat.operation);
    meeting->exchange = std::make_unique<LocalExchange>(std::move(operations));
    meeting->exchange->Prepare();
    slices = SlicesFor(*meeting->exchange, world_size_);
    EndTouching(*meeting);
  }
  {
    absl::MutexLock lock(&mutex_);
    meeting->slices_left = slices;
    for (int i = 1; i < slices; ++i)
      Post([this, &lane, meeting, i, slices] { RunSlice(lane, meeting, i, slices); });
  }
  RunSlice(lane, meeting, 0, slices);
}

void LocalGroup::RunSlice(Lane& lane, const std::shared_ptr<Meeting>& meeting, int index,
                          int count) {
  if (BeginTouching(*meeting)) {
    const LocalExchange& exchange = *meeting->exchange;
    const int64_t elements = exchange.elements();
    exchange.Run(elements * index / count, elements * (index + 1) / count, meeting->is_broken);
    EndTouching(*meeting);
  }
  {
    absl::MutexLock lock(&mutex_);
    if (--meeting->slices_left > 0) return;
  }
  Close(lane, *meeting);
}

void LocalGroup::Close(Lane& lane, Meeting& meeting) {
  Endings endings;
  bool is_broken = false;
  {
    absl::MutexLock lock(&mutex_);
    meeting.state = Meeting::State::kOver;
    is_broken = meeting.is_broken;
    for (auto& [index, seat] : meeting.seats) {
      if (!is_broken || !ended_[seat.rank].ok()) Take(seat, ended_[seat.rank], endings);
    }
  }
  Finish(std::move(endings));
  if (is_broken) return;
  absl::MutexLock lock(&mutex_);
  lane.meetings.pop_front();
  ++lane.first;
  // The channel's next collective finds its lane; lanes of messages are too many to keep.
  if (lane.meetings.empty() && lane.is_pair) {
    lanes_.erase(LaneKey(lane.key));
  } else {
    RunFrontIfReady(lane);
  }
}

bool LocalGroup::BeginTouching(const Meeting& meeting) {
  absl::MutexLock lock(&mutex_);
  if (meeting.is_broken) return false;
  for (const auto& [index, seat] : meeting.seats) ++running_[seat.rank];
  return true;
}

void LocalGroup::EndTouching(const Meeting& meeting) {
  absl::MutexLock lock(&mutex_);
  for (const auto& [index, seat] : meeting.seats) --running_[seat.rank];
}

void LocalGroup::Abort(int rank, const absl::Status& why) {
  Endings endings;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_[rank].ok()) ended_[rank] = why;
    ForEachSeatOf(rank, [](Meeting& meeting, Seat&) { meeting.is_broken = true; });
    mutex_.Await(IsZero(&running_[rank]));
    ForEachSeatOf(rank, [&](Meeting&, Seat& seat) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      Take(seat, ended_[rank], endings);
    });
  }
  Finish(std::move(endings));
}

void LocalGroup::EndForAll(const absl::Status& why) {
  Endings endings;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (!ended_[rank].ok()) continue;
    ended_[rank] = why;
    ForEachSeatOf(rank, [&](Meeting& meeting, Seat& seat) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      meeting.is_broken = true;
      if (meeting.state != Meeting::State::kRunning)
        Take(seat, why, endings);  // Else Close() does it.
    });
  }
  Post([this, endings] { Finish(endings); });
}

template <typename Visit>
void LocalGroup::ForEachSeatOf(int rank, Visit visit) {
  for (auto& [key, lane] : lanes_) {
    for (const std::shared_ptr<Meeting>& meeting : lane.meetings) {
      for (auto& [index, seat] : meeting->seats) {
        if (seat.rank == rank) visit(*meeting, seat);
      }
    }
  }
}

void LocalGroup::Take(Seat& seat, const absl::Status& status, Endings& endings) {
  if (seat.work == nullptr) return;
  ++finishing_[seat.rank];
  endings.push_back({seat.rank, std::move(seat.work), status});
}

void LocalGroup::Finish(Endings endings) {
  for (Ending& ending : endings) ending.work->Finish(ending.status);
  absl::MutexLock lock(&mutex_);
  for (Ending& ending : endings) --finishing_[ending.rank];
}

void LocalGroup::Post(std::function<void()> task) {
  tasks_.push_back(std::move(task));
  tasks_posted_.Signal();
}

void LocalGroup::RunWorker(int rank) {
  while (true) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mutex_);
      while (tasks_.empty() && !leaving_[rank]) tasks_posted_.Wait(&mutex_);
      if (leaving_[rank] && (tasks_.empty() || workers_ > 1)) {
        --workers_;
        tasks_posted_.Signal();  // The wake-up may have been meant for another one.
        return;
      }
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

void LocalGroup::Leave(int rank) {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(IsZero(&finishing_[rank]));
  leaving_[rank] = true;
  tasks_posted_.SignalAll();
}

class LocalBackend : public Backend {
 public:
  LocalBackend(std::shared_ptr<LocalGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {
    absl::StatusOr<std::thread> worker =
        StartThread("a rank in this process", [this] { group_->RunWorker(rank_); });
    started_ = worker.status();
    if (worker.ok()) worker_ = *std::move(worker);
    if (!worker.ok()) group_->Abort(rank_, started_);
  }

  ~LocalBackend() override {
    group_->Abort(rank_, absl::UnavailableError(
                             absl::StrCat("rank ", group_->names()[rank_], " left the group")));
    group_->Leave(rank_);
    if (worker_.joinable()) worker_.join();
  }

  absl::string_view name() const override { return "local"; }
  bool checks_pairs() const override { return !group_->is_blind(); }
  void Start(Operation operation, std::shared_ptr<WorkState> work) override {
    if (!started_.ok()) return work->Finish(started_);  // Perhaps no worker would end it.
    group_->Start(rank_, std::move(operation), std::move(work));
  }
  void Abort(const absl::Status& why) override { group_->Abort(rank_, why); }

 private:
  const std::shared_ptr<LocalGroup> group_;
  const int rank_;
  absl::Status started_;  // The worker.
  std::thread worker_;
};

}  // namespace

std::vector<std::unique_ptr<Backend>> CreateLocalBackends(int world_size,
                                                          const LocalBackendOptions& options) {
  auto group = std::make_shared<LocalGroup>(world_size, options);
  std::vector<std::unique_ptr<Backend>> backends;
  for (int rank = 0; rank < world_size; ++rank)
    backends.push_back(std::make_unique<LocalBackend>(group, rank));
  return backends;
}

}  // namespace evenkeel::internal
