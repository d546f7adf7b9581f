#include "evenkeel/comm/net/greet.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
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
// As long as another server has this rank's hello and has not replied: it may be the store, slow.
constexpr absl::Duration kPatienceWhileWaiting = absl::Seconds(30);

enum class Reply { kNone, kUnprovedRefusal, kProved };

// A connection to a server that may be the job's store.
struct Attempt {
  std::vector<HostPort> servers;  // The server's addresses.
  Hello hello;
  Greeted greeted = {};
  Challenge challenge = {};
  bool awaits_verdict = false;  // The hello is sent.
  absl::Status status = {};
  Reply reply = Reply::kNone;
};

absl::StatusOr<std::string> ReceiveFrame(Greeted& greeted, absl::Time deadline,
                                         const Cancelled& cancelled) {
  while (true) {
    EK_ASSIGN_OR_RETURN(std::optional<std::string> frame, greeted.received.Next());
    if (frame) return *std::move(frame);
    EK_RETURN_IF_ERROR(WaitFor(greeted.fd, POLLIN, deadline, cancelled));
    std::string bytes;
    if (ReceiveSome(greeted.fd, bytes).is_over)
      return absl::UnavailableError("the connection was closed");
    greeted.received.Append(bytes);
  }
}

bool IsSamePeer(const UniqueFd& a, const UniqueFd& b) {
  sockaddr_storage peers[2] = {};
  socklen_t sizes[2] = {sizeof(peers[0]), sizeof(peers[1])};
  return getpeername(a.get(), reinterpret_cast<sockaddr*>(&peers[0]), &sizes[0]) == 0 &&
         getpeername(b.get(), reinterpret_cast<sockaddr*>(&peers[1]), &sizes[1]) == 0 &&
         sizes[0] == sizes[1] && std::memcmp(&peers[0], &peers[1], sizes[0]) == 0;
}

// The store counts a rank as connected once it has its hello. So a server that one of `others` has
// greeted at another address gets none, and the result is the other's.
absl::Status SayHello(Attempt& attempt, const JobSecret& job, std::vector<Attempt>& others,
                      absl::Time deadline, const Cancelled& cancelled) {
  Greeted& greeted = attempt.greeted;
  EK_ASSIGN_OR_RETURN(greeted.fd, ConnectTo(greeted.server, deadline, cancelled));
  for (Attempt& other : others) {
    if (!IsSamePeer(other.greeted.fd, greeted.fd)) continue;
    other.servers.push_back(greeted.server);
    greeted.fd = UniqueFd();
    return other.status;
  }
  EK_ASSIGN_OR_RETURN(greeted.local, LocalAddress(greeted.fd));
  greeted.received.set_max_payload(kMaxGreetingFrame);
  EK_ASSIGN_OR_RETURN(const std::string first, ReceiveFrame(greeted, deadline, cancelled));
  EK_ASSIGN_OR_RETURN(attempt.challenge, Challenge::Parse(first));
  const Challenge& challenge = attempt.challenge;
  if (!job.job.empty() && !challenge.job.empty() && job.job != challenge.job) {
    return absl::UnavailableError(
        absl::StrCat("it serves the job ", absl::CHexEscape(challenge.job), ", not ", job.job));
  }
  attempt.reply = Reply::kUnprovedRefusal;
  EK_RETURN_IF_ERROR(
      CheckSameBuild("the store", challenge.version, challenge.build, NameOf(attempt.hello)));
  attempt.reply = Reply::kNone;
  EK_ASSIGN_OR_RETURN(attempt.hello.nonce, RandomBytes(kNonceSize));
  attempt.hello.proof = ProofOf(job.secret, challenge, attempt.hello);
  EK_RETURN_IF_ERROR(SendAll(greeted.fd, Frame(attempt.hello.Serialize()), deadline));
  attempt.awaits_verdict = true;
  return absl::OkStatus();
}

absl::Status TakeVerdict(Attempt& attempt, const JobSecret& job, absl::Time deadline,
                         const Cancelled& cancelled) {
  Greeted& greeted = attempt.greeted;
  const absl::StatusOr<std::string> answer = ReceiveFrame(greeted, deadline, cancelled);
  attempt.awaits_verdict = absl::IsDeadlineExceeded(answer.status());
  EK_RETURN_IF_ERROR(answer.status());
  EK_ASSIGN_OR_RETURN(const Verdict verdict, Verdict::Parse(*answer));
  if (!IsDigest(verdict.proof, ProofOf(job.secret, attempt.challenge, attempt.hello, verdict))) {
    attempt.reply = Reply::kUnprovedRefusal;
    EK_RETURN_IF_ERROR(verdict.status);
    return absl::PermissionDeniedError("it does not have the job's secret");
  }
  attempt.reply = Reply::kProved;
  EK_RETURN_IF_ERROR(verdict.status);
  greeted.received.set_max_payload(kMaxLinkFrame);
  greeted.host = verdict.host;
  return absl::OkStatus();
}

// Continues an attempt until the deadline; it may still wait for a verdict then.
void Continue(Attempt& attempt, const JobSecret& job, std::vector<Attempt>& others,
              absl::Time deadline, const Cancelled& cancelled) {
  const std::string server = attempt.greeted.server.ToString();
  absl::Status status;
  if (!attempt.awaits_verdict) status = SayHello(attempt, job, others, deadline, cancelled);
  if (attempt.awaits_verdict) status = TakeVerdict(attempt, job, deadline, cancelled);
  if (attempt.awaits_verdict) {
    status = absl::DeadlineExceededError(
        absl::StrCat("the server at ", server, " has sent a challenge and no verdict"));
  } else if (attempt.reply != Reply::kNone) {
    status =
        Annotate(status, absl::StrCat("the store at ", server, " and ", NameOf(attempt.hello)));
  } else if (!attempt.greeted.fd) {
    status = Annotate(status, server);
  } else {
    status = Annotate(status, absl::StrCat("the server at ", server, " is not this job's store"));
  }
  attempt.status = status;
}

std::string Places(const std::vector<HostPort>& servers) {
  return servers.empty()
             ? "an address that is not published yet"
             : absl::StrJoin(servers, " or ", [](std::string* out, const HostPort& server) {
                 absl::StrAppend(out, server.ToString());
               });
}

// Adds an attempt at each server that none of them tries.
void AddMissing(const std::vector<HostPort>& servers, const Hello& hello,
                std::vector<Attempt>& attempts) {
  for (const HostPort& server : servers) {
    const auto has_it = [&](const Attempt& attempt) {
      return absl::c_linear_search(attempt.servers, server);
    };
    if (!absl::c_any_of(attempts, has_it))
      attempts.push_back({.servers = {server}, .hello = hello, .greeted = {.server = server}});
  }
}

}  // namespace

absl::StatusOr<Greeted> Greet(const FindServer& find, const Hello& hello, const JobSecret& job,
                              absl::Time deadline, const Cancelled& cancelled) {
  const absl::Time start = SteadyNow();
  absl::Time warn_at = start + kSilentWait;
  absl::Duration pause = kFirstPause, patience = kFirstPatience;
  absl::Time lacks_since = absl::InfiniteFuture(), refused_since = absl::InfiniteFuture();
  absl::Status last, refusal;
  // A stranger's server may send a challenge and nothing else, and a store may be slow. So these
  // connections stay open while the rank tries the other addresses.
  std::vector<Attempt> waiting;
  while (true) {
    EK_ASSIGN_OR_RETURN(const std::vector<HostPort> servers, find());
    refusal = absl::OkStatus();
    std::vector<Attempt> attempts = std::exchange(waiting, {});
    AddMissing(servers, hello, attempts);
    for (Attempt& attempt : attempts) {
      // The warning does not wait for an attempt to end; later attempts have their full patience.
      const absl::Time begin = SteadyNow();
      const absl::Time until = attempt.awaits_verdict ? begin
                               : begin < warn_at      ? std::min(warn_at, begin + patience)
                                                      : begin + patience;
      Continue(attempt, job, waiting, std::min(until, deadline), cancelled);
      if (attempt.reply == Reply::kProved) {
        EK_RETURN_IF_ERROR(attempt.status);
        return std::move(attempt.greeted);
      }
      const absl::Status& status = attempt.status;
      // An attempt that the deadline has cut short is no better reason than the one before.
      if (last.ok() || SteadyNow() < deadline) last = status;
      if (cancelled != nullptr) EK_RETURN_IF_ERROR(cancelled());
      if (attempt.awaits_verdict) {
        waiting.push_back(std::move(attempt));
      } else if (attempt.reply == Reply::kUnprovedRefusal) {
        refusal = status;
        if (refused_since == absl::InfiniteFuture())
          Warn(nullptr, absl::StrCat(refusal.message(), "; ", attempt.greeted.server.ToString(),
                                     " has not proved that it is the job's store: retrying"));
        refused_since = std::min(refused_since, begin);
      } else if (absl::IsResourceExhausted(status)) {  // This process can open no socket.
        lacks_since = std::min(lacks_since, begin);
        if (SteadyNow() - lacks_since > kDescriptorPatience) return status;
      } else {
        lacks_since = absl::InfiniteFuture();
      }
    }
    const absl::Time now = SteadyNow();
    const auto text = [&] {
      return absl::StrCat(
          NameOf(hello), " found no store at ", Places(servers), " within ",
          absl::FormatDuration(absl::Trunc(now - start, absl::Milliseconds(1))),
          last.ok() ? "" : absl::StrCat(" (", last.message(), ")"),
          job.host.empty() ? "" : absl::StrCat(": ", job.host, ", which hosts it, is missing"));
    };
    const absl::Duration longest = waiting.empty() ? kUnprovedPatience : kPatienceWhileWaiting;
    if (!refusal.ok() && (now - refused_since > longest || now + pause >= deadline)) return refusal;
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
