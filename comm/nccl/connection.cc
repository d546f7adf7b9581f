#include "evenkeel/comm/nccl/connection.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/notification.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kShortestPause = absl::Microseconds(5);
constexpr absl::Duration kLongestPause = absl::Milliseconds(1);

// Aborts on a thread of its own, because NCCL may wait for what never comes.
absl::Status AbortWithin(absl::Duration patience, NcclApi& api, NcclComm comm) {
  struct Shared {
    Notification is_done;
    NcclAnswer answer;
  };
  auto shared = std::make_shared<Shared>();
  absl::StatusOr<std::thread> started = StartThread("ncclCommAbort", [shared, &api, comm] {
    shared->answer = api.Abort(comm);
    shared->is_done.Notify();
  });
  if (!started.ok()) return ToStatus("ncclCommAbort", api.Abort(comm));
  std::thread thread = *std::move(started);
  if (shared->is_done.WaitUntil(SteadyNow() + patience)) {
    thread.join();
    return ToStatus("ncclCommAbort", shared->answer);
  }
  thread.detach();
  return absl::DeadlineExceededError(
      absl::StrCat("nccl: ncclCommAbort has not returned within ", absl::FormatDuration(patience)));
}

}  // namespace

NcclConnection::~NcclConnection() { (void)Abort(absl::CancelledError("the communicator is gone")); }

absl::Status NcclConnection::Begin(absl::string_view what, Kind kind, absl::Time deadline,
                                   NcclComm* comm) {
  absl::MutexLock lock(&mutex_);
  const auto ready = [this, kind]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const bool must_wait = is_busy_ || (is_in_progress_ && kind == Kind::kCommand);
    return !must_wait || !ended_.ok();
  };
  if (!AwaitUntil(mutex_, absl::Condition(&ready), deadline)) {
    return absl::DeadlineExceededError(
        absl::StrCat("nccl: ", what, ": an earlier call is still in progress at the deadline"));
  }
  if (!ended_.ok()) return ended_;
  is_busy_ = true;
  *comm = comm_;
  return absl::OkStatus();
}

void NcclConnection::End(const NcclAnswer& answer) {
  absl::MutexLock lock(&mutex_);
  is_busy_ = false;
  is_in_progress_ = answer.code == NcclCode::kInProgress;
}

absl::Status NcclConnection::Open(const std::string& id, int rank, int world_size,
                                  absl::Time deadline) {
  NcclComm comm = nullptr;
  EK_RETURN_IF_ERROR(Begin("ncclCommInitRankConfig", Kind::kCommand, deadline, &comm));
  const NcclAnswer answer = api_.Init(device_, id, rank, world_size, &comm);
  absl::Status ended;
  {
    absl::MutexLock lock(&mutex_);
    ended = ended_;
    if (ended.ok()) comm_ = comm;
  }
  if (!ended.ok() && comm != nullptr) {
    const absl::Status aborted = AbortWithin(patience_, api_, comm);  // Abort() did not find it.
    absl::MutexLock lock(&mutex_);
    late_abort_ = aborted;
  }
  End(answer);
  if (!ended.ok()) return ended;
  EK_RETURN_IF_ERROR(ToStatus("ncclCommInitRankConfig", answer));
  return AwaitProgress("connecting the group", deadline);
}

absl::Status NcclConnection::Call(absl::string_view what, absl::Time deadline,
                                  absl::FunctionRef<NcclAnswer(NcclComm)> call) {
  NcclComm comm = nullptr;
  EK_RETURN_IF_ERROR(Begin(what, Kind::kCommand, deadline, &comm));
  const NcclAnswer answer = comm == nullptr
                                ? NcclAnswer{NcclCode::kInvalidUsage, "there is no communicator"}
                                : call(comm);
  End(answer);
  return ToStatus(what, answer);
}

absl::Status NcclConnection::Ask(absl::string_view what, absl::Time deadline, NcclAnswer* state) {
  NcclComm comm = nullptr;
  EK_RETURN_IF_ERROR(Begin(what, Kind::kQuestion, deadline, &comm));
  if (comm != nullptr) *state = api_.State(comm);
  End(*state);
  return ToStatus(what, *state);
}

absl::Status NcclConnection::AwaitProgress(absl::string_view what, absl::Time deadline) {
  for (absl::Duration pause = kShortestPause;; pause = std::min(2 * pause, kLongestPause)) {
    NcclAnswer state;
    EK_RETURN_IF_ERROR(Ask(what, deadline, &state));
    if (state.code != NcclCode::kInProgress) return absl::OkStatus();
    if (SteadyNow() > deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("nccl: ", what, ": still in progress at the deadline"));
    }
    absl::SleepFor(pause);
  }
}

absl::Status NcclConnection::CheckErrors(absl::string_view what) {
  NcclAnswer state;
  return Ask(what, absl::InfiniteFuture(), &state);
}

absl::Status NcclConnection::Abort(const absl::Status& why) {
  NcclComm comm = nullptr;
  absl::Status trouble;
  {
    absl::MutexLock lock(&mutex_);
    if (!ended_.ok()) {
      // Another thread does it.
      if (!AwaitFor(mutex_, absl::Condition(&has_let_go_), 3 * patience_)) {
        return absl::DeadlineExceededError("nccl: an abort on another thread has not ended");
      }
      return abort_;
    }
    ended_ = why;
    // A call that hangs is what ncclCommAbort may come into; any other is over soon.
    const auto is_free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !is_busy_; };
    (void)AwaitFor(mutex_, absl::Condition(&is_free), patience_ / 2);
    comm = comm_;
    comm_ = nullptr;
  }
  if (comm != nullptr) trouble = AbortWithin(patience_, api_, comm);
  absl::MutexLock lock(&mutex_);
  const auto is_free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !is_busy_; };
  if (trouble.ok() && !AwaitFor(mutex_, absl::Condition(&is_free), patience_)) {
    trouble = absl::DeadlineExceededError("nccl: a call has not returned after ncclCommAbort");
  }
  trouble.Update(late_abort_);
  abort_ = trouble;
  has_let_go_ = true;
  return trouble;
}

void NcclConnection::LeaveBehind() {
  absl::MutexLock lock(&mutex_);
  is_left_behind_ = true;
}

bool NcclConnection::has_ended() const {
  absl::MutexLock lock(&mutex_);
  return !ended_.ok();
}

bool NcclConnection::MayFree() const {
  absl::MutexLock lock(&mutex_);
  if (ended_.ok()) return true;
  return AwaitFor(mutex_, absl::Condition(&has_let_go_), 3 * patience_) && abort_.ok() &&
         !is_left_behind_;
}

void KeepForever(std::shared_ptr<void> what) {
  static absl::Mutex& mutex = *new absl::Mutex;
  static auto& kept = *new std::vector<std::shared_ptr<void>>;
  absl::MutexLock lock(&mutex);
  kept.push_back(std::move(what));
}

Memory FreedByLeaveOf(std::shared_ptr<const NcclConnection> connection, Memory memory) {
  void* const data = memory.data.get();
  const int64_t bytes = memory.bytes;
  auto free = [connection = std::move(connection), held = std::move(memory.data)](void*) mutable {
    if (!connection->MayFree()) KeepForever(std::move(held));
    held.reset();
  };
  return {std::shared_ptr<void>(data, std::move(free)), bytes};
}

}  // namespace evenkeel::internal
