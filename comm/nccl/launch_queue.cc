#include "evenkeel/comm/nccl/launch_queue.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/base/librarys_thread.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

LaunchQueue::LaunchQueue(ControlChannel& control, absl::string_view topic)
    : control_(control),
      requests_(absl::StrCat("launch requests of ", topic)),
      turns_(absl::StrCat("launch order of ", topic)),
      order_(control.world_size()) {
  if (control.rank() == 0 && control.world_size() > 1)
    Start(request_thread_, [this] { RunRequests(); });
  Start(launch_thread_, [this] { RunLaunches(); });
}

void LaunchQueue::Start(std::thread& thread, std::function<void()> body) {
  absl::StatusOr<std::thread> started = StartThread("launches of NCCL", std::move(body));
  if (!started.ok()) return Abort(started.status());
  thread = *std::move(started);
}

LaunchQueue::~LaunchQueue() {
  Abort(absl::CancelledError("the launch queue is gone"));
  if (launch_thread_.joinable()) launch_thread_.join();
  if (request_thread_.joinable()) request_thread_.join();
}

void LaunchQueue::Push(const LaunchRequest& request, Launch launch) {
  absl::Status ended;
  {
    absl::MutexLock lock(&mutex_);
    ended = ended_;
    if (ended.ok()) {
      launches_[request.key] = std::move(launch);
      // Under the lock: requests of one rank come in the order of its calls.
      if (control_.rank() == 0) {
        Arrive(0, request);
      } else {
        control_.Send(0, requests_,
                      ByteWriter().I32(control_.rank()).Bytes(ToBytes(request)).Take());
      }
    }
  }
  if (!ended.ok()) launch({ended});
}

void LaunchQueue::Abort(const absl::Status& why) {
  std::map<LaunchKey, Launch> launches;
  absl::Status first;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_.ok()) ended_ = why;
    first = ended_;
    launches.swap(launches_);
  }
  for (const auto& [key, launch] : launches) launch({first});
}

void LaunchQueue::RunRequests() {
  ThisThreadIsTheLibrarys();
  while (true) {
    absl::StatusOr<std::string> word = control_.Receive(requests_, absl::InfiniteDuration());
    if (!word.ok()) return Abort(word.status());
    ByteReader reader(*word);
    const int rank = reader.I32();
    const absl::StatusOr<LaunchRequest> request =
        FromBytes<LaunchRequest>(reader.Bytes(), "a rank's launch request");
    if (!request.ok()) return Abort(request.status());
    absl::MutexLock lock(&mutex_);
    Arrive(rank, *request);
  }
}

void LaunchQueue::Arrive(int rank, const LaunchRequest& request) {
  if (has_disagreed_) return;
  const absl::StatusOr<std::optional<LaunchTurn>> turn = order_.Arrive(rank, request);
  if (!turn.ok()) {
    has_disagreed_ = true;
    control_.Fail(turn.status());  // Comes back to every rank, this one too, and ends what is here.
    return;
  }
  if (!turn->has_value()) return;
  const std::string word = ToBytes(**turn);
  for (int other = 1; other < control_.world_size(); ++other) {
    if ((*turn)->key.Concerns(other)) control_.Send(other, turns_, word);
  }
  if ((*turn)->key.Concerns(0)) next_.push_back(**turn);
}

void LaunchQueue::RunLaunches() {
  ThisThreadIsTheLibrarys();
  while (true) {
    const absl::StatusOr<LaunchTurn> turn = NextTurn();
    if (!turn.ok()) return Abort(turn.status());
    Launch launch;
    {
      absl::MutexLock lock(&mutex_);
      const auto found = launches_.find(turn->key);
      if (found == launches_.end()) continue;  // Abort() was faster.
      launch = std::move(found->second);
      launches_.erase(found);
    }
    launch({absl::OkStatus(), turn->is_alike});
  }
}

absl::StatusOr<LaunchTurn> LaunchQueue::NextTurn() {
  if (control_.rank() != 0) {
    EK_ASSIGN_OR_RETURN(const std::string word, control_.Receive(turns_, absl::InfiniteDuration()));
    return FromBytes<LaunchTurn>(word, "the launch order of rank 0");
  }
  absl::MutexLock lock(&mutex_);
  const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !next_.empty() || !ended_.ok();
  };
  mutex_.Await(absl::Condition(&ready));
  if (!ended_.ok()) return ended_;
  LaunchTurn turn = std::move(next_.front());
  next_.pop_front();
  return turn;
}

}  // namespace evenkeel::internal
