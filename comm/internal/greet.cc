#include "evenkeel/comm/internal/greet.h"

#include <poll.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/internal/hmac.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kFirstPause = absl::Milliseconds(5);
constexpr absl::Duration kLongestPause = absl::Milliseconds(250);
// Somebody else's server may take the connection and say nothing.
constexpr absl::Duration kAttempt = absl::Seconds(10);

struct Attempt {
  absl::StatusOr<Greeted> result;
  bool is_final = false;  // The job's own store has said no.
};

absl::StatusOr<std::string> ReceiveFrame(const UniqueFd& fd, FrameParser& parser, absl::Time deadline) {
  while (true) {
    EK_ASSIGN_OR_RETURN(std::optional<std::string> frame, parser.Next());
    if (frame) return *std::move(frame);
    EK_RETURN_IF_ERROR(WaitFor(fd, POLLIN, deadline));
    std::string bytes;
    if (ReceiveSome(fd, bytes).is_over) return absl::UnavailableError("the connection was closed");
    parser.Append(bytes);
  }
}

std::string VersionText(uint32_t server, uint32_t client) {
  return absl::StrCat("it speaks protocol version ", server, ", this rank speaks ", client,
                      ": all ranks must run the same build");
}

absl::Status Exchange(Greeted& greeted, Hello hello, const JobSecret& job, absl::Time deadline, bool& is_final) {
  FrameParser& parser = greeted.received;
  parser.set_max_payload(kMaxGreetingFrame);
  EK_ASSIGN_OR_RETURN(const std::string first, ReceiveFrame(greeted.fd, parser, deadline));
  EK_ASSIGN_OR_RETURN(const Challenge challenge, Challenge::Parse(first));
  if (challenge.version != kProtocolVersion) {
    return absl::FailedPreconditionError(VersionText(challenge.version, hello.version));
  }
  if (!job.job.empty() && !challenge.job.empty() && job.job != challenge.job) {
    return absl::UnavailableError(absl::StrCat("it serves the job ", challenge.job, ", not ", job.job));
  }
  EK_ASSIGN_OR_RETURN(hello.nonce, RandomBytes(kNonceSize));
  hello.proof = ProofOf(job.secret, challenge, hello);
  EK_RETURN_IF_ERROR(SendAll(greeted.fd, Frame(hello.Serialize()), deadline));

  EK_ASSIGN_OR_RETURN(const std::string answer, ReceiveFrame(greeted.fd, parser, deadline));
  EK_ASSIGN_OR_RETURN(const Verdict verdict, Verdict::Parse(answer));
  is_final = true;
  EK_RETURN_IF_ERROR(verdict.status);
  if (!IsDigest(verdict.proof, ProofOf(job.secret, challenge, hello, verdict))) {
    return absl::PermissionDeniedError("it does not know the job's secret");
  }
  parser.set_max_payload(kMaxFrame);
  greeted.host = verdict.host;
  return absl::OkStatus();
}

Attempt GreetOnce(const HostPort& server, const Hello& hello, const JobSecret& job, absl::Time deadline) {
  absl::StatusOr<UniqueFd> fd = ConnectTo(server, deadline);
  if (!fd.ok()) return {Annotate(fd.status(), server.ToString())};
  Greeted greeted{.fd = *std::move(fd), .server = server};
  absl::StatusOr<HostPort> local = LocalAddress(greeted.fd);
  if (!local.ok()) return {local.status()};
  greeted.local = *local;
  Attempt attempt{absl::UnknownError("")};
  const absl::Status status = Exchange(greeted, hello, job, deadline, attempt.is_final);
  if (status.ok()) {
    attempt.result = std::move(greeted);
  } else if (attempt.is_final) {
    attempt.result = Annotate(status, absl::StrCat("the store at ", server.ToString(), " and rank ", hello.rank));
  } else {
    attempt.result = Annotate(status, absl::StrCat(server.ToString(), " answers, but not as this job's store"));
  }
  return attempt;
}

std::string Places(const std::vector<HostPort>& servers) {
  return servers.empty() ? "an address that nobody has published"
                         : absl::StrJoin(servers, " or ", [](std::string* out, const HostPort& server) {
                             absl::StrAppend(out, server.ToString());
                           });
}

}  // namespace

absl::StatusOr<Greeted> Greet(const FindServer& find, const Hello& hello, const JobSecret& job, absl::Time deadline) {
  const absl::Time start = absl::Now();
  absl::Duration pause = kFirstPause;
  absl::Status last;
  while (true) {
    EK_ASSIGN_OR_RETURN(const std::vector<HostPort> servers, find());
    for (const HostPort& server : servers) {
      Attempt attempt = GreetOnce(server, hello, job, std::min(deadline, absl::Now() + kAttempt));
      if (attempt.result.ok() || attempt.is_final) return std::move(attempt.result);
      last = attempt.result.status();
    }
    if (absl::Now() + pause >= deadline) {
      const absl::Duration waited = absl::Trunc(absl::Now() - start, absl::Milliseconds(1));
      return absl::DeadlineExceededError(absl::StrCat("rank ", hello.rank, " found no store at ", Places(servers),
                                                      " within ", absl::FormatDuration(waited),
                                                      last.ok() ? "" : absl::StrCat(" (", last.message(), ")")));
    }
    absl::SleepFor(pause);
    pause = std::min(pause * 1.5, kLongestPause);
  }
}

}  // namespace evenkeel::internal
