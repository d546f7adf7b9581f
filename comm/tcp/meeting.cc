#include "evenkeel/comm/tcp/meeting.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

absl::StatusOr<std::unique_ptr<TcpMeeting>> TcpMeeting::Create(int rank, PeerGroup group,
                                                               const TcpMeetingOptions& options) {
  absl::StatusOr<UniqueFd> listener = ListenOn({options.bind_address, 0});
  if (!listener.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", group.names[rank], ": ", listener.status().message()));
  }
  EK_ASSIGN_OR_RETURN(const HostPort address, LocalAddress(*listener));
  EK_ASSIGN_OR_RETURN(WakeUp wake, WakeUp::Create());
  return std::unique_ptr<TcpMeeting>(new TcpMeeting(
      rank, std::move(group), options, *std::move(listener), std::move(wake), address.ToString()));
}

TcpMeeting::TcpMeeting(int rank, PeerGroup group, const TcpMeetingOptions& options,
                       UniqueFd listener, WakeUp wake, std::string address)
    : rank_(rank),
      group_(std::move(group)),
      warn_(options.warn),
      wake_(std::move(wake)),
      address_(std::move(address)),
      reception_(std::make_unique<TcpReception>(rank, group_, std::move(listener),
                                                options.greeting_timeout)) {}

void TcpMeeting::Cancel(const absl::Status& why) {
  {
    absl::MutexLock lock(&mutex_);
    if (cancelled_.ok()) cancelled_ = why;
  }
  wake_.Signal();
}

absl::StatusOr<std::vector<UniqueFd>> TcpMeeting::Run(const std::vector<std::string>& addresses,
                                                      absl::Time deadline) {
  absl::StatusOr<std::vector<UniqueFd>> connections = Meet(addresses, deadline);
  reception_ = nullptr;
  calls_.clear();
  return connections;
}

absl::StatusOr<std::vector<UniqueFd>> TcpMeeting::Meet(const std::vector<std::string>& addresses,
                                                       absl::Time deadline) {
  for (int to = 0; to < rank_; ++to) {
    EK_ASSIGN_OR_RETURN(HostPort address, HostPort::Parse(addresses[to]));
    calls_.emplace_back(rank_, group_, to, std::move(address));
  }
  const absl::Time start = SteadyNow();
  absl::Time warn_at = start + kSilentWait;
  while (true) {
    const absl::Time now = SteadyNow();
    EK_RETURN_IF_ERROR(cancelled());
    for (TcpCall& call : calls_) {
      if (!call.IsDone()) EK_RETURN_IF_ERROR(call.Turn(now));
    }
    reception_->Turn(now);
    if (IsComplete()) break;
    if (now >= deadline) return WhoIsMissing(now - start);
    if (now >= warn_at) {
      Warn(warn_, std::string(WhoIsMissing(now - start).message()));
      warn_at = absl::InfiniteFuture();
    }
    Wait(std::min(deadline, warn_at));
  }
  std::vector<UniqueFd> connections = std::move(reception_->admitted());
  for (TcpCall& call : calls_) connections[call.to()] = std::move(call.connection());
  return connections;
}

bool TcpMeeting::IsComplete() const {
  return reception_->IsComplete() && std::all_of(calls_.begin(), calls_.end(),
                                                 [](const TcpCall& call) { return call.IsDone(); });
}

void TcpMeeting::Wait(absl::Time deadline) const {
  std::vector<pollfd> entries = {{wake_.fd(), POLLIN, 0}};
  for (const TcpCall& call : calls_) call.AddTo(entries, deadline);
  reception_->AddTo(entries, deadline);
  poll(entries.data(), entries.size(), PollTimeout(deadline));
}

absl::Status TcpMeeting::WhoIsMissing(absl::Duration waited) const {
  std::vector<int> missing;
  std::string obstacles;
  for (const TcpCall& call : calls_) {
    if (call.IsDone()) continue;
    missing.push_back(call.to());
    if (!call.obstacle().ok()) {
      absl::StrAppend(&obstacles, "; rank ", group_.names[call.to()], ": ",
                      call.obstacle().message());
    }
  }
  for (const int rank : reception_->Missing()) missing.push_back(rank);
  if (reception_->refused() > 0) {
    absl::StrAppend(&obstacles, "; ", reception_->refused(),
                    " callers did not prove that they belong to the group");
  }
  return absl::DeadlineExceededError(
      absl::StrCat("rank ", group_.names[rank_], " waited ",
                   absl::FormatDuration(absl::Trunc(waited, absl::Milliseconds(1))), " for ",
                   RankList(group_.names.Of(missing)), " to connect", obstacles));
}

absl::Status TcpMeeting::cancelled() const {
  absl::MutexLock lock(&mutex_);
  return cancelled_;
}

}  // namespace evenkeel::internal
