#include "evenkeel/launch/launcher.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/launch/signal_reader.h"

extern char** environ;

namespace evenkeel {
namespace {

absl::StatusOr<std::string> NewSecret() {
  char bytes[32];
  if (getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes)) {
    return absl::UnavailableError(
        absl::StrCat("cannot generate random bytes for a secret: ", std::strerror(errno)));
  }
  return absl::BytesToHexString(absl::string_view(bytes, sizeof(bytes)));
}

// One that nobody listens at now. Programs that know nothing of our store meet there, and one of
// them listens.
absl::StatusOr<int> FreePort() {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<TcpStoreServer> anybody,
                      TcpStoreServer::Create({.secret = "unused"}));
  return anybody->port();
}

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::vector<std::string> EnvironmentWith(const std::map<std::string, std::string>& variables) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const char* equals = std::strchr(*entry, '=');
    if (equals == nullptr || !variables.contains(std::string(*entry, equals - *entry)))
      result.emplace_back(*entry);
  }
  for (const auto& [name, value] : variables) result.push_back(absl::StrCat(name, "=", value));
  return result;
}

// Between fork and exec only calls that are safe beside other threads: everything is prepared
// before.
[[noreturn]] void RunChild(pid_t parent, pid_t group, const sigset_t& signals, int error_fd,
                           char* const* arguments, char* const* variables) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // It died before the line above.
  setpgid(0, group);
  const int null = open("/dev/null", O_RDONLY);
  if (null >= 0) dup2(null, STDIN_FILENO);
  sigprocmask(SIG_SETMASK, &signals, nullptr);
  execvpe(arguments[0], arguments, variables);
  const int error = errno;
  (void)!write(error_fd, &error, sizeof(error));
  _exit(127);
}

std::string SignalName(int signal) {
  const char* name = sigabbrev_np(signal);
  return name == nullptr ? absl::StrCat("signal ", signal) : absl::StrCat("SIG", name);
}

constexpr char kWorld[] = "world";  // The usual name of a job's group (comm/factory.h).
constexpr size_t kFailuresToList = 8;
// Failures that are found in so short a time have one cause.
constexpr absl::Duration kOneBlow = absl::Milliseconds(500);

// State of the group of all ranks, passed from the server's thread to the launcher's: the ranks
// that caused its failure, none once ranks have made it again; and those that it has lost.
class GroupNews {
 public:
  void OnMade(int world_size) {
    absl::MutexLock lock(&mutex_);
    world_size_ = world_size;
    culprits_.clear();
    made_at_ = SteadyNow();
  }
  void OnFailed(const absl::Status& why) {
    absl::MutexLock lock(&mutex_);
    const FailureInfo info = FailureInfoOf(why).value_or(FailureInfo{});
    culprits_ = info.ranks;
    if (info.kind == FailureKind::kRankLost) {
      for (const int rank : info.ranks) lost_.emplace_back(rank, made_at_);
    }
    kill(getpid(), SIGCHLD);  // Wakes the launcher's thread.
  }
  bool IsCulprit(int rank) const {
    absl::MutexLock lock(&mutex_);
    return std::ranges::find(culprits_, rank) != culprits_.end();
  }
  // Returns when the group of all ranks, or one that continues it, was made last; never, before.
  absl::Time made_at() const {
    absl::MutexLock lock(&mutex_);
    return made_at_;
  }
  // Returns the number of ranks of that group.
  int world_size() const {
    absl::MutexLock lock(&mutex_);
    return world_size_;
  }
  // Returns the ranks that were declared lost since the last call, with the time when their group
  // was made: processes that have started later are others.
  std::vector<std::pair<int, absl::Time>> TakeLost() {
    absl::MutexLock lock(&mutex_);
    return std::exchange(lost_, {});
  }

 private:
  mutable absl::Mutex mutex_;
  std::vector<int> culprits_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<int, absl::Time>> lost_ ABSL_GUARDED_BY(mutex_);
  absl::Time made_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int world_size_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Returns whether it is the group of all ranks, or one that they have made again after an error.
// Other groups number their ranks differently, and so does one of fewer ranks.
bool IsWorld(absl::string_view group) {
  return absl::ConsumePrefix(&group, kWorld) &&
         group.find_first_not_of("+0123456789") == absl::string_view::npos;
}

class Job {
 public:
  Job(const LaunchOptions& options, GroupNews& news, std::map<std::string, std::string> variables,
      const SignalReader& signals)
      : options_(options),
        news_(news),
        variables_(std::move(variables)),
        signals_(signals),
        places_(options.ranks) {}
  ~Job() {
    for (const Place& place : places_) {
      if (place.pid > 0) kill(place.pid, SIGKILL);
    }
    for (const Place& place : places_) {
      if (place.pid > 0) waitpid(place.pid, nullptr, 0);
    }
    if (group_ > 0) kill(-group_, SIGKILL);  // Processes that ranks have started and left behind.
  }

  absl::Status Start() {
    for (int rank = 0; rank < options_.ranks; ++rank) EK_RETURN_IF_ERROR(StartOne(rank));
    return absl::OkStatus();
  }

  LaunchResult WaitForAll(SignalReader& signals) {
    absl::Time next_measure = absl::InfiniteFuture();
    absl::Duration patience = absl::InfiniteDuration();
    int done = 0;
    while (Reap() > 0 || NextStart() < absl::InfiniteFuture()) {
      EndLost();
      StartDue();
      const bool is_nearer = options_.on_failure != OnFailure::kStop && ended_well_ != done;
      // Once ranks have been told to end, there is no way back.
      if (measures_ == 0 && (is_nearer || Patience() != patience)) {
        patience = Patience();
        done = ended_well_;
        next_measure = SteadyNow() + patience;
      }
      for (int signal : signals.Wait(std::min({next_measure, NextStart(), NextEnd()})))
        Forward(signal);
      if (SteadyNow() < next_measure) continue;
      if (measures_ == 0) {
        waited_ = patience;
        // The signal may be followed by one that continues them.
        for (Place& place : places_) place.stopped_when_told = place.stopped_by;
      }
      kill(-group_, measures_++ == 0 ? SIGTERM : SIGKILL);
      next_measure = SteadyNow() + options_.patience;
    }
    return Result();
  }

 private:
  struct Place {
    pid_t pid = 0;  // 0: has ended.
    int stopped_by =
        0;  // The signal after which it does nothing until it is continued; 0: it runs.
    int stopped_when_told = 0;  // The same before the job was told to end.
    absl::Time started;
    absl::Time ends_at = absl::InfiniteFuture();     // The group has declared it lost.
    bool was_declared_lost = false;                  // And this process has killed it for that.
    int replacements = 0;                            // Processes in this place after the first.
    absl::Time next_start = absl::InfiniteFuture();  // Of another process.
    absl::Duration pause;                            // Before that one.
    int own_failures = 0;                            // Of processes that lived shortly, in a row.
  };
  struct Failure {
    int rank = 0;
    int exit_code = 0;
    bool by_signal = false;          // The signal did not come from this process.
    std::string what;                // "was killed by SIGSEGV"
    bool came_after_signal = false;  // A signal to end it had been sent before it was found.
    absl::Time found = SteadyNow();

    std::string ToString() const { return absl::StrCat("rank ", rank, " ", what); }
  };

  absl::Status StartOne(int rank) {
    Place& place = places_[rank];
    std::map<std::string, std::string> variables = variables_;
    variables["RANK"] = variables["LOCAL_RANK"] = absl::StrCat(rank);
    if (place.replacements > 0) variables["EVENKEEL_NEWCOMER"] = absl::StrCat(place.replacements);
    std::vector<std::string> environment = EnvironmentWith(variables), command = options_.command;
    const std::vector<char*> arguments = Pointers(command), pointers = Pointers(environment);
    int error_pipe[2];
    if (pipe2(error_pipe, O_CLOEXEC) != 0) return absl::UnavailableError(std::strerror(errno));
    const pid_t parent = getpid();
    const pid_t pid = fork();
    if (pid == 0)
      RunChild(parent, group_, signals_.before(), error_pipe[1], arguments.data(), pointers.data());
    close(error_pipe[1]);
    int error = 0;
    // The pipe closes when the program runs.
    const bool has_failed = pid > 0 && read(error_pipe[0], &error, sizeof(error)) == sizeof(error);
    close(error_pipe[0]);
    if (pid < 0) {
      return absl::UnavailableError(
          absl::StrCat("cannot start rank ", rank, ": ", std::strerror(errno)));
    }
    setpgid(pid, group_);  // Also here, so that it is done whoever comes first.
    if (group_ == 0) group_ = pid;
    place.pid = pid;
    place.stopped_by = 0;
    place.started = SteadyNow();
    place.next_start = place.ends_at = absl::InfiniteFuture();
    place.was_declared_lost = false;
    if (!has_failed) return absl::OkStatus();
    return absl::NotFoundError(
        absl::StrCat("cannot run ", arguments[0], ": ", std::strerror(error)));
  }

  // With kReplace: ends the processes that the group has declared lost and that still exist. One
  // that is not stopped may be about to end with its own error.
  void EndLost() {
    if (options_.on_failure != OnFailure::kReplace) return;
    const absl::Time now = SteadyNow();
    for (const auto& [rank, made_at] : news_.TakeLost()) {
      Place& place = places_[rank];
      if (place.pid > 0 && place.started < made_at) place.ends_at = now + options_.patience;
    }
    for (Place& place : places_) {
      const bool is_due = place.ends_at <= now || place.stopped_by != 0;
      if (place.pid == 0 || place.ends_at == absl::InfiniteFuture() || !is_due) continue;
      place.was_declared_lost = true;
      kill(place.pid, SIGKILL);
    }
  }

  // Returns when the next process is to be started; never, if there is none.
  absl::Time NextStart() const {
    absl::Time next = absl::InfiniteFuture();
    for (const Place& place : places_) next = std::min(next, place.next_start);
    return next;
  }
  // Returns when the next process that is declared lost is to be ended.
  absl::Time NextEnd() const {
    absl::Time next = absl::InfiniteFuture();
    for (const Place& place : places_) {
      if (place.pid > 0) next = std::min(next, place.ends_at);
    }
    return next;
  }

  void StartDue() {
    for (size_t rank = 0; rank < places_.size(); ++rank) {
      Place& place = places_[rank];
      if (place.next_start > SteadyNow()) continue;
      place.next_start = absl::InfiniteFuture();
      if (!StartsMore() || !HasSurvivor()) {  // Meanwhile: nothing takes its place.
        const auto failed =
            std::find_if(replaced_.rbegin(), replaced_.rend(),
                         [&](const Failure& f) { return f.rank == static_cast<int>(rank); });
        failures_.push_back(std::move(*failed));
        replaced_.erase(std::next(failed).base());
        continue;
      }
      ++place.replacements;
      ++replacements_;
      if (const absl::Status started = StartOne(static_cast<int>(rank)); !started.ok())
        Note({static_cast<int>(rank), 1, false, std::string(started.message())});
    }
  }

  // Returns whether another process takes the place of the one that has failed.
  bool Replaces(const Failure& failure) {
    if (options_.on_failure != OnFailure::kReplace || !StartsMore() ||
        replacements_ + StartsDue() >= options_.max_replacements)
      return false;
    Place& place = places_[failure.rank];
    const bool was_short = SteadyNow() - place.started < options_.short_life;
    if (!was_short) place.own_failures = 0;
    place.own_failures += was_short && IsOwn(failure);
    if (place.own_failures >= options_.most_failures) return false;
    // Where the group has given up places, a process that comes for one of them is refused.
    if (place.replacements > 0 && IsOwn(failure) && news_.world_size() < options_.ranks)
      return false;
    if (news_.made_at() == absl::InfinitePast()) {
      why_given_up_ = "the ranks had not met yet";
    } else if (!HasSurvivor()) {
      why_given_up_ = "no rank of the group was left";
    }
    if (!why_given_up_.empty()) return false;
    constexpr absl::Duration kFirstPause = absl::Milliseconds(100), kLongest = absl::Seconds(2);
    place.next_start = SteadyNow() + place.pause;
    place.pause =
        was_short ? std::clamp(2 * place.pause, kFirstPause, kLongest) : absl::ZeroDuration();
    return true;
  }

  // Returns whether the program is at fault: its process was not killed from outside.
  static bool IsOwn(const Failure& failure) {
    constexpr int kFaults[] = {SIGSEGV, SIGABRT, SIGBUS, SIGILL, SIGFPE};
    return !failure.by_signal || std::ranges::count(kFaults, failure.exit_code - 128) > 0;
  }

  bool StartsMore() const {
    return measures_ == 0 && !was_forwarded_ && ended_well_ == 0 && why_given_up_.empty();
  }

  // Returns whether a process is left that was in the group.
  bool HasSurvivor() const {
    const absl::Time made_at = news_.made_at();
    return std::ranges::any_of(places_, [made_at](const Place& place) {
      return place.pid > 0 && place.started < made_at;
    });
  }

  int StartsDue() const {
    return static_cast<int>(std::ranges::count_if(
        places_, [](const Place& place) { return place.next_start < absl::InfiniteFuture(); }));
  }

  // Takes note of ranks that have ended; answers how many have not.
  int Reap() {
    const size_t known = failures_.size();
    stopped_ = running_ = 0;
    for (size_t rank = 0; rank < places_.size(); ++rank) {
      if (places_[rank].pid > 0) Look(static_cast<int>(rank));
    }
    // Where both are found at once, the signal is the cause and the others gave up because of it.
    std::stable_partition(failures_.begin() + known, failures_.end(),
                          [](const Failure& f) { return f.by_signal; });
    return running_;
  }

  void Look(int rank) {
    Place& place = places_[rank];
    pid_t& pid = place.pid;
    int status = 0;
    // Each call tells of one change, the last one is how things are.
    while (const pid_t answer = waitpid(pid, &status, WNOHANG | WUNTRACED | WCONTINUED)) {
      if (answer > 0 && (WIFSTOPPED(status) || WIFCONTINUED(status))) {
        place.stopped_by = WIFSTOPPED(status) ? WSTOPSIG(status) : 0;
        continue;
      }
      pid = 0;
      if (answer > 0 && status != 0 && WasEndedHere(status)) {
        Note({rank, 1, false, WhyEnded(rank)});
      } else if (answer < 0) {  // Other code in this process waits for children of all kinds.
        Note({rank, 1, false, "ended with an unknown exit status"});
      } else if (WIFSIGNALED(status)) {
        const int signal = WTERMSIG(status);
        Note({rank, 128 + signal, true,
              place.was_declared_lost ? "was declared lost by its group, and was ended"
                                      : absl::StrCat("was killed by ", SignalName(signal))});
      } else if (const int code = WEXITSTATUS(status); code != 0) {
        Note({rank, code, false, absl::StrCat("ended with exit code ", code)});
      } else {
        ++ended_well_;
      }
      return;
    }
    ++running_;
    if (place.stopped_by != 0) ++stopped_;
  }

  void Note(Failure failure) {
    failure.came_after_signal = measures_ > 0 || was_forwarded_;
    failure.by_signal &= !failure.came_after_signal;
    (Replaces(failure) ? replaced_ : failures_).push_back(std::move(failure));
  }

  // How long ranks that are running may be, as things are.
  absl::Duration Patience() const {
    if (options_.on_failure == OnFailure::kStop || !why_given_up_.empty()) {
      return failures_.empty() ? absl::InfiniteDuration() : options_.patience;
    }
    const bool has_one_ended = ended_well_ > 0 || !failures_.empty();
    if (has_one_ended && stopped_ == running_) return options_.patience;
    return ended_well_ > 0 ? options_.last_patience : absl::InfiniteDuration();
  }

  void Forward(int signal) {
    if (signal == SIGUSR1) {
      kill(-group_, signal);
      return;
    }
    // The first one is the ranks' to handle, and saving may take them long; who asks twice means
    // it.
    kill(-group_, was_forwarded_ ? SIGKILL : signal);
    was_forwarded_ = true;
  }

  // Whether a rank that went on has ended because it was told to, whatever code it then gave.
  bool WasEndedHere(int status) const {
    if (options_.on_failure == OnFailure::kStop || measures_ == 0) return false;
    return !WIFSIGNALED(status) || WTERMSIG(status) == SIGTERM || WTERMSIG(status) == SIGKILL;
  }

  std::string WhyEnded(int rank) const {
    if (const int signal = places_[rank].stopped_when_told; signal != 0) {
      return absl::StrCat("was stopped (", SignalName(signal),
                          ") and was ended when the others were done");
    }
    return absl::StrCat("was still running ", absl::FormatDuration(waited_),
                        " after the others were done and was ended");
  }

  // A rank often ends because of another one that ends later: that one first reports its error to
  // the others, or its connections close before the launcher can reap it. The group's error names
  // the cause. Without it, a signal explains an exit code, not the reverse.
  const Failure& Cause() const {
    const Failure* named = nullptr;
    for (const Failure& failure : failures_) {
      if (failure.came_after_signal || !news_.IsCulprit(failure.rank)) continue;
      if (named == nullptr || (failure.by_signal && !named->by_signal)) named = &failure;
    }
    if (named != nullptr) return *named;
    const auto killed = std::ranges::find_if(failures_, &Failure::by_signal);
    const bool is_cause =
        killed != failures_.end() && killed->found - failures_[0].found < kOneBlow;
    return is_cause ? *killed : failures_[0];
  }

  LaunchResult StoppedResult() const {
    const Failure& cause = Cause();
    LaunchResult result{
        .exit_code = cause.exit_code, .message = cause.ToString(), .by_signal = cause.by_signal};
    const auto killed = std::ranges::find_if(failures_, &Failure::by_signal);
    if (!cause.by_signal && killed != failures_.end()) {
      absl::StrAppend(&result.message, ", and ", killed->ToString());
      result.by_signal = true;
    }
    if (measures_ == 0) return result;
    // Who interrupts the job knows why the ranks ended.
    result.has_ended_others = !was_forwarded_;
    absl::StrAppend(&result.message,
                    options_.ranks == 2 ? "; the other rank was" : "; the other ranks were",
                    " ended after ", absl::FormatDuration(options_.patience));
    return result;
  }

  LaunchResult Result() const {
    LaunchResult result = failures_.empty()                         ? LaunchResult{}
                          : options_.on_failure == OnFailure::kStop ? StoppedResult()
                                                                    : GoneOnResult();
    result.was_interrupted = was_forwarded_;
    result.replacements = replacements_;
    if (!replaced_.empty()) {
      result.message =
          absl::StrCat(Listed(replaced_), replaced_.size() == 1 ? ", and was" : ", and were",
                       " replaced", result.message.empty() ? "" : "; then ", result.message);
    }
    return result;
  }

  static std::string Listed(const std::vector<Failure>& failures) {
    std::string list;
    for (size_t i = 0; i < std::min(failures.size(), kFailuresToList); ++i)
      absl::StrAppend(&list, i == 0 ? "" : ", ", failures[i].ToString());
    if (failures.size() > kFailuresToList)
      absl::StrAppend(&list, ", and ", failures.size() - kFailuresToList, " more failed");
    return list;
  }

  LaunchResult GoneOnResult() const {
    LaunchResult result{.exit_code = ended_well_ > 0 ? 0 : failures_[0].exit_code,
                        .by_signal = std::ranges::any_of(
                            failures_, [](const Failure& failure) { return failure.by_signal; })};
    result.message = Listed(failures_);
    if (!why_given_up_.empty()) {
      absl::StrAppend(&result.message, "; ", why_given_up_, ", and the job was ended");
      return result;
    }
    absl::StrAppend(&result.message, ended_well_ == 0 ? "; no rank ended well"
                                     : ended_well_ == 1
                                         ? "; the other rank went on and ended well"
                                         : "; the other ranks went on and ended well");
    return result;
  }

  const LaunchOptions& options_;
  GroupNews& news_;
  const std::map<std::string, std::string> variables_;
  const SignalReader& signals_;
  std::vector<Place> places_;  // By rank.
  pid_t group_ = 0;
  bool was_forwarded_ = false;  // The ranks were asked to end.
  int measures_ = 0;            // That were taken to end the job: first SIGTERM, then SIGKILL.
  // As it was before the first of them.
  absl::Duration waited_;
  // As the last Reap() found it.
  int running_ = 0;
  int stopped_ = 0;
  int ended_well_ = 0;
  std::vector<Failure> failures_;  // In the order in which they were found.
  std::vector<Failure> replaced_;  // Those in whose places other processes were started.
  int replacements_ = 0;
  std::string why_given_up_;  // Why no further process is started; empty: they are.
};

absl::StatusOr<LaunchResult> RunAttempt(const LaunchOptions& options,
                                        std::map<std::string, std::string> variables, int restarts,
                                        SignalReader& signals) {
  EK_ASSIGN_OR_RETURN(const std::string secret, NewSecret());
  GroupNews news;
  const auto on_group = [&](const std::string& group, int world_size, const absl::Status& status) {
    if (!IsWorld(group)) return;
    if (status.ok()) return news.OnMade(world_size);
    if (world_size == options.ranks) news.OnFailed(status);
  };
  EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpStoreServer> server,
                      TcpStoreServer::Create({.secret = secret,
                                              .world_size = options.ranks,
                                              .host = "the launcher",
                                              .on_group = on_group}));
  if (options.on_store) EK_RETURN_IF_ERROR(options.on_store(server->address(), secret));
  variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = absl::StrCat(options.ranks);
  variables["MASTER_ADDR"] = "127.0.0.1";
  EK_ASSIGN_OR_RETURN(const int free_port, FreePort());
  variables["MASTER_PORT"] = absl::StrCat(free_port);
  variables["EVENKEEL_STORE"] = server->address();
  variables["EVENKEEL_STORE_HOSTED"] = "1";
  variables["EVENKEEL_SECRET"] = secret;
  variables["EVENKEEL_RESTART"] = absl::StrCat(restarts);
  Job job(options, news, std::move(variables), signals);
  EK_RETURN_IF_ERROR(job.Start());
  LaunchResult result = job.WaitForAll(signals);
  result.restarts = restarts;
  return result;
}

// Whether the user asked the job to end while it waited. Asking where it is (SIGUSR1) has no answer
// then.
bool IsInterruptedWithin(absl::Duration pause, SignalReader& signals) {
  const absl::Time end = SteadyNow() + pause;
  do {
    for (int signal : signals.Wait(end)) {
      if (signal != SIGUSR1) return true;
    }
  } while (SteadyNow() < end);
  return false;
}

}  // namespace

absl::Duration PauseAfter(absl::Duration lived, absl::Duration pause_before,
                          const LaunchOptions& options) {
  if (lived >= options.long_life || pause_before == absl::ZeroDuration())
    return options.restart_pause;
  return std::min(2 * pause_before, std::max(options.restart_pause, options.longest_restart_pause));
}

absl::StatusOr<LaunchResult> Launch(const LaunchOptions& options) {
  if (options.ranks < 1)
    return absl::InvalidArgumentError(absl::StrCat("cannot start ", options.ranks, " ranks"));
  if (options.command.empty()) return absl::InvalidArgumentError("no program to start is given");
  SignalReader signals;  // Before the server's thread, which then has them blocked too.
  if (!signals.is_valid())
    return absl::UnavailableError(absl::StrCat("signalfd: ", std::strerror(errno)));
  const auto attempt_name = [&](int restarts) {
    return absl::StrCat("attempt ", restarts + 1, " of ", options.max_restarts + 1);
  };
  std::map<std::string, std::string> variables = options.variables;
  absl::Duration pause = absl::ZeroDuration();
  for (int restarts = 0;; ++restarts) {
    const absl::Time begin = SteadyNow();
    EK_ASSIGN_OR_RETURN(LaunchResult result, RunAttempt(options, variables, restarts, signals));
    if (restarts > 0 && !result.message.empty())
      absl::StrAppend(&result.message, "; it was ", attempt_name(restarts));
    if (result.exit_code == 0 || result.was_interrupted || restarts >= options.max_restarts)
      return result;

    pause = PauseAfter(SteadyNow() - begin, pause, options);
    if (options.on_restart) {
      EK_RETURN_IF_ERROR(options.on_restart({restarts + 1, pause, result.message}, variables));
    }
    if (IsInterruptedWithin(pause, signals)) {
      result.was_interrupted = true;
      absl::StrAppend(&result.message, "; interrupted before ", attempt_name(restarts + 1));
      return result;
    }
  }
}

std::string OwnPath() {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? "/proc/self/exe" : path.string();
}

}  // namespace evenkeel
