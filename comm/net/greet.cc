#include "evenkeel/comm/net/greet.h"

#include <poll.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/warn.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

std::string NameOf(const Hello& hello) {
  return hello.kind == Hello::Kind::kObserver ? "the observer" : absl::StrCat("rank ", hello.rank);
}

constexpr absl::Duration kFirstPause = absl::Milliseconds(5);
constexpr absl::Duration kLongestPause = absl::Milliseconds(250);
// A foreign server may accept the connection and send nothing, and the next address may be the
// right one. A store speaks first, but on a busy machine this may take long. So the patience grows
// from round to round.
constexpr absl::Duration kFirstPatience = absl::Seconds(1);
constexpr absl::Duration kLongestPatience = absl::Seconds(10);

// A refusal without proof is an error after this time: the store's ranks may have another secret or
// build. Or a stranger listens where the store would, and the store comes later, elsewhere.
constexpr absl::Duration kUnprovedPatience = absl::Seconds(5);

enum class Reply { kNone, kUnprovedRefusal, kProved };

struct Attempt {
  absl::StatusOr<Greeted> result;
  Reply reply = Reply::kNone;
};

absl::StatusOr<std::string> ReceiveFrame(const UniqueFd& fd, FrameParser& parser,
                                         absl::Time deadline, const Cancelled& cancelled) {
  while (true) {
    EK_ASSIGN_OR_RETURN(std::optional<std::string> frame, parser.Next());
    if (frame) return *std::move(frame);
    EK_RETURN_IF_ERROR(WaitFor(fd, POLLIN, deadline, cancelled));
    std::string bytes;
    if (ReceiveSome(fd, bytes).is_over) return absl::UnavailableError("the connection was closed");
    parser.Append(bytes);
  }
}

// A server that has sent a challenge is a store. After a reply the client must not leave it, since
// the store counts this rank as connected. So from then on only the deadline ends the wait, and
// `cancelled`, after which this rank does not come back.
absl::Status Exchange(Greeted& greeted, Hello hello, const JobSecret& job, absl::Time challenge_by,
                      absl::Time deadline, const Cancelled& cancelled, Reply& reply) {
  FrameParser& parser = greeted.received;
  parser.set_max_payload(kMaxGreetingFrame);
  EK_ASSIGN_OR_RETURN(const std::string first,
                      ReceiveFrame(greeted.fd, parser, challenge_by, cancelled));
  EK_ASSIGN_OR_RETURN(const Challenge challenge, Challenge::Parse(first));
  if (!job.job.empty() && !challenge.job.empty() && job.job != challenge.job) {
    return absl::UnavailableError(
        absl::StrCat("it serves the job ", absl::CHexEscape(challenge.job), ", not ", job.job));
  }
  reply = Reply::kUnprovedRefusal;
  EK_RETURN_IF_ERROR(
      CheckSameBuild("the store", challenge.version, challenge.build, NameOf(hello)));
  reply = Reply::kNone;
  EK_ASSIGN_OR_RETURN(hello.nonce, RandomBytes(kNonceSize));
  hello.proof = ProofOf(job.secret, challenge, hello);
  EK_RETURN_IF_ERROR(SendAll(greeted.fd, Frame(hello.Serialize()), deadline));

  EK_ASSIGN_OR_RETURN(const std::string answer,
                      ReceiveFrame(greeted.fd, parser, deadline, cancelled));
  EK_ASSIGN_OR_RETURN(const Verdict verdict, Verdict::Parse(answer));
  if (!IsDigest(verdict.proof, ProofOf(job.secret, challenge, hello, verdict))) {
    reply = Reply::kUnprovedRefusal;
    EK_RETURN_IF_ERROR(verdict.status);
    return absl::PermissionDeniedError("it does not have the job's secret");
  }
  reply = Reply::kProved;
  EK_RETURN_IF_ERROR(verdict.status);
  parser.set_max_payload(kMaxLinkFrame);
  greeted.host = verdict.host;
  return absl::OkStatus();
}

Attempt GreetOnce(const HostPort& server, const Hello& hello, const JobSecret& job,
                  absl::Time challenge_by, absl::Time deadline, const Cancelled& cancelled) {
  challenge_by = std::min(challenge_by, deadline);
  absl::StatusOr<UniqueFd> fd = ConnectTo(server, challenge_by, cancelled);
  if (!fd.ok()) return {Annotate(fd.status(), server.ToString())};
  Greeted greeted{.fd = *std::move(fd), .server = server};
  absl::StatusOr<HostPort> local = LocalAddress(greeted.fd);
  if (!local.ok()) return {local.status()};
  greeted.local = *local;
  Attempt attempt{absl::UnknownError("")};
  const absl::Status status =
      Exchange(greeted, hello, job, challenge_by, deadline, cancelled, attempt.reply);
  if (status.ok()) {
    attempt.result = std::move(greeted);
  } else if (attempt.reply != Reply::kNone) {
    attempt.result =
        Annotate(status, absl::StrCat("the store at ", server.ToString(), " and ", NameOf(hello)));
  } else {
    attempt.result = Annotate(
        status, absl::StrCat("the server at ", server.ToString(), " is not this job's store"));
  }
  return attempt;
}

std::string Places(const std::vector<HostPort>& servers) {
  return servers.empty()
             ? "an address that is not published yet"
             : absl::StrJoin(servers, " or ", [](std::string* out, const HostPort& server) {
                 absl::StrAppend(out, server.ToString());
               });
}

}  // namespace

absl::StatusOr<Greeted> Greet(const FindServer& find, const Hello& hello, const JobSecret& job,
                              absl::Time deadline, const Cancelled& cancelled) {
  const absl::Time start = SteadyNow();
  absl::Time warn_at = start + kSilentWait;
  absl::Duration pause = kFirstPause, patience = kFirstPatience;
  absl::Time lacks_since = absl::InfiniteFuture(), refused_since = absl::InfiniteFuture();
  absl::Status last, refusal;
  while (true) {
    EK_ASSIGN_OR_RETURN(const std::vector<HostPort> servers, find());
    refusal = absl::OkStatus();
    for (const HostPort& server : servers) {
      // The warning does not wait for an attempt to end; later attempts have their full patience.
      const absl::Time begin = SteadyNow();
      const absl::Time challenge_by =
          begin < warn_at ? std::min(warn_at, begin + patience) : begin + patience;
      Attempt attempt = GreetOnce(server, hello, job, challenge_by, deadline, cancelled);
      if (attempt.result.ok() || attempt.reply == Reply::kProved) return std::move(attempt.result);
      if (attempt.reply == Reply::kUnprovedRefusal) {
        refusal = attempt.result.status();
        if (refused_since == absl::InfiniteFuture())
          Warn(nullptr, absl::StrCat(refusal.message(), "; ", server.ToString(),
                                     " has not proved that it is the job's store: retrying"));
        refused_since = std::min(refused_since, begin);
      } else if (absl::IsResourceExhausted(attempt.result.status())) {  // Of descriptors, here.
        lacks_since = std::min(lacks_since, begin);
        if (SteadyNow() - lacks_since > kDescriptorPatience) return attempt.result.status();
      } else {
        lacks_since = absl::InfiniteFuture();
      }
      // An attempt that the deadline has cut short is no better reason than the one before.
      if (last.ok() || SteadyNow() < deadline) last = attempt.result.status();
      if (cancelled != nullptr) EK_RETURN_IF_ERROR(cancelled());
    }
    const absl::Time now = SteadyNow();
    const auto text = [&] {
      return absl::StrCat(
          NameOf(hello), " found no store at ", Places(servers), " within ",
          absl::FormatDuration(absl::Trunc(now - start, absl::Milliseconds(1))),
          last.ok() ? "" : absl::StrCat(" (", last.message(), ")"),
          job.host.empty() ? "" : absl::StrCat(": ", job.host, ", which hosts it, is missing"));
    };
    if (!refusal.ok() && (now - refused_since > kUnprovedPatience || now + pause >= deadline))
      return refusal;
    if (now + pause >= deadline) return absl::DeadlineExceededError(text());
    if (now >= warn_at) {
      Warn(nullptr, absl::StrCat(text(), "; retrying"));
      warn_at = absl::InfiniteFuture();
    }
    absl::SleepFor(pause);
    pause = std::min(pause * 1.5, kLongestPause);
    patience = std::min(patience * 2, kLongestPatience);
  }
}

}  // namespace evenkeel::internal
