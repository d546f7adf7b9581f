#include "evenkeel/comm/net/peer_meeting.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

absl::StatusOr<std::unique_ptr<PeerMeeting>> PeerMeeting::OverTcp(
    int rank, PeerGroup group, const std::string& bind_address, const PeerMeetingOptions& options) {
  absl::StatusOr<PeerListener> listener = ListenOverTcp(bind_address);
  if (!listener.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", group.names[rank], ": ", listener.status().message()));
  }
  EK_ASSIGN_OR_RETURN(WakeUp wake, WakeUp::Create());
  return absl::WrapUnique(
      new PeerMeeting(rank, std::move(group), *std::move(listener), std::move(wake), options));
}

absl::StatusOr<std::unique_ptr<PeerMeeting>> PeerMeeting::OnThisHost(int rank, PeerGroup group) {
  // A proof for this meeting is none over TCP, nor the other way round.
  group.name = absl::StrCat("shared memory ", group.name);
  EK_ASSIGN_OR_RETURN(PeerListener listener, ListenOnThisHost());
  EK_ASSIGN_OR_RETURN(WakeUp wake, WakeUp::Create());
  return absl::WrapUnique(new PeerMeeting(rank, std::move(group), std::move(listener),
                                          std::move(wake),
                                          {.greeting_timeout = absl::InfiniteDuration(),
                                           .descriptor_patience = kDescriptorPatience,
                                           .warn_after = absl::InfiniteDuration()}));
}

PeerMeeting::PeerMeeting(int rank, PeerGroup group, PeerListener listener, WakeUp wake,
                         const PeerMeetingOptions& options)
    : rank_(rank),
      group_(std::move(group)),
      options_(options),
      wake_(std::move(wake)),
      address_(listener.address),
      reception_(std::make_unique<PeerReception>(rank, group_, std::move(listener),
                                                 options.greeting_timeout)) {}

void PeerMeeting::Cancel(const absl::Status& why) {
  {
    absl::MutexLock lock(&mutex_);
    if (cancelled_.ok()) cancelled_ = why;
  }
  wake_.Signal();
}

absl::StatusOr<std::vector<UniqueFd>> PeerMeeting::Run(const std::vector<std::string>& addresses,
                                                       absl::Time deadline) {
  absl::StatusOr<std::vector<UniqueFd>> connections = Meet(addresses, deadline);
  reception_ = nullptr;
  calls_.clear();
  return connections;
}

absl::Status PeerMeeting::StartCalls(const std::vector<std::string>& addresses) {
  if (static_cast<int>(addresses.size()) != group_.world_size) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", group_.names[rank_], " got ",
                                                   addresses.size(), " addresses of ",
                                                   group_.world_size, " ranks"));
  }
  for (int to = 0; to < rank_; ++to) {
    absl::StatusOr<PeerAddress> address = address_.IsUnix() ? PeerAddress::ParseUnix(addresses[to])
                                                            : PeerAddress::ParseTcp(addresses[to]);
    if (!address.ok()) return Annotate(address.status(), absl::StrCat("rank ", group_.names[to]));
    calls_.emplace_back(rank_, group_, to, *std::move(address));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<UniqueFd>> PeerMeeting::Meet(const std::vector<std::string>& addresses,
                                                        absl::Time deadline) {
  EK_RETURN_IF_ERROR(StartCalls(addresses));
  const absl::Time start = SteadyNow();
  absl::Time warn_at = start + options_.warn_after;
  while (true) {
    const absl::Time now = SteadyNow();
    EK_RETURN_IF_ERROR(cancelled());
    for (PeerCall& call : calls_) {
      if (!call.IsDone()) EK_RETURN_IF_ERROR(call.Turn(now));
    }
    EK_RETURN_IF_ERROR(reception_->Turn(now));
    if (IsComplete()) break;
    EK_RETURN_IF_ERROR(CheckDescriptors(now));
    if (now >= deadline) return MissingRanks(now - start);
    if (now >= warn_at) {
      Warn(options_.warn, std::string(MissingRanks(now - start).message()));
      warn_at = absl::InfiniteFuture();
    }
    Wait(std::min(deadline, warn_at));
  }
  std::vector<UniqueFd> connections = std::move(reception_->admitted());
  for (PeerCall& call : calls_) connections[call.to()] = std::move(call.connection());
  return connections;
}

absl::Status PeerMeeting::CheckDescriptors(absl::Time now) {
  absl::Status lack = reception_->lack();
  for (const PeerCall& call : calls_) lack.Update(call.Lack());
  lacks_since_ = lack.ok() ? absl::InfiniteFuture() : std::min(lacks_since_, now);
  return now - lacks_since_ < options_.descriptor_patience ? absl::OkStatus() : lack;
}

bool PeerMeeting::IsComplete() const {
  return reception_->IsComplete() &&
         std::all_of(calls_.begin(), calls_.end(),
                     [](const PeerCall& call) { return call.IsDone(); });
}

void PeerMeeting::Wait(absl::Time deadline) const {
  std::vector<pollfd> entries = {{wake_.fd(), POLLIN, 0}};
  for (const PeerCall& call : calls_) call.AddTo(entries, deadline);
  reception_->AddTo(entries, deadline);
  poll(entries.data(), entries.size(), PollTimeout(deadline));
}

absl::Status PeerMeeting::MissingRanks(absl::Duration waited) const {
  std::vector<int> missing;
  std::string obstacles;
  for (const PeerCall& call : calls_) {
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

absl::Status PeerMeeting::cancelled() const {
  absl::MutexLock lock(&mutex_);
  return cancelled_;
}

}  // namespace evenkeel::internal
