#include "evenkeel/comm/internal/nccl_connection.h"

#include <algorithm>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kShortestPause = absl::Microseconds(5);
constexpr absl::Duration kLongestPause = absl::Milliseconds(1);

// Aborts on a thread of its own, because NCCL may wait for what never comes.
absl::Status AbortWithin(absl::Duration patience, NcclApi& api, NcclComm comm) {
  struct Shared {
    absl::Notification is_done;
    NcclAnswer answer;
  };
  auto shared = std::make_shared<Shared>();
  std::thread thread([shared, &api, comm] {
    shared->answer = api.Abort(comm);
    shared->is_done.Notify();
  });
  if (shared->is_done.WaitForNotificationWithTimeout(patience)) {
    thread.join();
    return ToStatus("ncclCommAbort", shared->answer);
  }
  thread.detach();
  return absl::DeadlineExceededError(
      absl::StrCat("nccl: ncclCommAbort has not come back within ", absl::FormatDuration(patience)));
}

}  // namespace

NcclConnection::~NcclConnection() { (void)Abort(absl::CancelledError("the communicator is gone")); }

absl::Status NcclConnection::Begin(Kind kind, NcclComm* comm) {
  absl::MutexLock lock(&mutex_);
  const auto ready = [this, kind]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const bool must_wait = is_busy_ || (is_in_progress_ && kind == Kind::kCommand);
    return !must_wait || !ended_.ok();
  };
  mutex_.Await(absl::Condition(&ready));
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

absl::Status NcclConnection::Open(const std::string& id, int rank, int world_size, absl::Time deadline) {
  NcclComm comm = nullptr;
  EK_RETURN_IF_ERROR(Begin(Kind::kCommand, &comm));
  const NcclAnswer answer = api_.Init(device_, id, rank, world_size, &comm);
  {
    absl::MutexLock lock(&mutex_);
    comm_ = comm;
  }
  End(answer);
  EK_RETURN_IF_ERROR(ToStatus("ncclCommInitRankConfig", answer));
  return AwaitProgress("connecting the group", deadline);
}

absl::Status NcclConnection::Call(absl::string_view what, absl::FunctionRef<NcclAnswer(NcclComm)> call) {
  NcclComm comm = nullptr;
  EK_RETURN_IF_ERROR(Begin(Kind::kCommand, &comm));
  const NcclAnswer answer =
      comm == nullptr ? NcclAnswer{NcclCode::kInvalidUsage, "there is no communicator"} : call(comm);
  End(answer);
  return ToStatus(what, answer);
}

absl::Status NcclConnection::Ask(absl::string_view what, NcclAnswer* state) {
  NcclComm comm = nullptr;
  EK_RETURN_IF_ERROR(Begin(Kind::kQuestion, &comm));
  if (comm != nullptr) *state = api_.State(comm);
  End(*state);
  return ToStatus(what, *state);
}

absl::Status NcclConnection::AwaitProgress(absl::string_view what, absl::Time deadline) {
  for (absl::Duration pause = kShortestPause;; pause = std::min(2 * pause, kLongestPause)) {
    NcclAnswer state;
    EK_RETURN_IF_ERROR(Ask(what, &state));
    if (state.code != NcclCode::kInProgress) return absl::OkStatus();
    if (absl::Now() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat("nccl: ", what, ": still in progress at the deadline"));
    }
    absl::SleepFor(pause);
  }
}

absl::Status NcclConnection::CheckErrors(absl::string_view what) {
  NcclAnswer state;
  return Ask(what, &state);
}

absl::Status NcclConnection::Abort(const absl::Status& why) {
  NcclComm comm = nullptr;
  absl::Status trouble;
  {
    absl::MutexLock lock(&mutex_);
    if (!ended_.ok()) {
      // Another thread does it.
      if (!mutex_.AwaitWithTimeout(absl::Condition(&has_let_go_), 3 * patience_)) {
        return absl::DeadlineExceededError("nccl: an abort on another thread has not come to its end");
      }
      return abort_;
    }
    ended_ = why;
    // A call that hangs is what ncclCommAbort may come into; any other is over soon.
    const auto is_free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !is_busy_; };
    (void)mutex_.AwaitWithTimeout(absl::Condition(&is_free), patience_ / 2);
    comm = comm_;
    comm_ = nullptr;
  }
  if (comm != nullptr) trouble = AbortWithin(patience_, api_, comm);
  absl::MutexLock lock(&mutex_);
  const auto is_free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !is_busy_; };
  if (trouble.ok() && !mutex_.AwaitWithTimeout(absl::Condition(&is_free), patience_)) {
    trouble = absl::DeadlineExceededError("nccl: a call has not come back after ncclCommAbort");
  }
  abort_ = trouble;
  has_let_go_ = true;
  return trouble;
}

bool NcclConnection::is_left_behind() const {
  absl::MutexLock lock(&mutex_);
  return has_let_go_ && !abort_.ok();
}

}  // namespace evenkeel::internal
