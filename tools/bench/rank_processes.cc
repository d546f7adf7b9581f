#include "evenkeel/tools/bench/rank_processes.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <sstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/bench/rank_side.h"

namespace evenkeel::bench {
namespace {

// A rank ends itself when a line has taken it longer than it may.
constexpr absl::Duration kAnswerTimeout = absl::Seconds(kMostSecondsOfALine + 10);
constexpr absl::Duration kLeaveTimeout = absl::Seconds(10);

absl::Status SystemError(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// One rank's socket, line by line.
class Line {
 public:
  explicit Line(Descriptor fd) : fd_(std::move(fd)) {}

  int fd() const { return fd_.get(); }
  bool Say(const std::string& text) { return WriteAll(fd_.get(), text); }
  bool Has() const { return absl::StrContains(received_, '\n'); }
  std::string Take() {
    const size_t end = received_.find('\n');
    std::string line = received_.substr(0, end);
    received_.erase(0, end + 1);
    return line;
  }
  // Reads what is there; false at its end.
  bool Read() {
    char bytes[16384];
    const ssize_t size = read(fd_.get(), bytes, sizeof(bytes));
    if (size > 0) received_.append(bytes, static_cast<size_t>(size));
    return size > 0 || (size < 0 && errno == EINTR);
  }

 private:
  Descriptor fd_;
  std::string received_;
};

class RankProcesses : public Peer {
 public:
  explicit RankProcesses(const RankOptions& options)
      : name_(options.name),
        folder_(options.folder),
        patience_(options.patience),
        ranks_(options.world) {}

  ~RankProcesses() override {
    ranks_.clear();
    for (const absl::Time end = SteadyNow() + (has_failed_ ? absl::ZeroDuration() : kLeaveTimeout);
         !Reap() && SteadyNow() < end;) {
      absl::SleepFor(absl::Milliseconds(5));
    }
    for (const pid_t pid : pids_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
  }

  absl::Status Start(const std::vector<Program>& programs) {
    EK_RETURN_IF_ERROR(Listen());
    for (const Program& program : programs) {
      EK_ASSIGN_OR_RETURN(const pid_t pid, Spawn(program, Log()));
      pids_.push_back(pid);
    }
    absl::Status status = Meet(SteadyNow() + patience_);
    has_failed_ = !status.ok();
    return status;
  }

  const std::string& name() const override { return name_; }

  absl::StatusOr<std::vector<double>> Time(const Case& what, const Block& block) override {
    EK_ASSIGN_OR_RETURN(std::vector<double> slowest, Measure("time", what, block));
    if (static_cast<int>(slowest.size()) == block.repetitions) return slowest;
    return absl::InternalError(
        absl::StrCat(name_, " measured ", slowest.size(), " of ", block.repetitions));
  }

  absl::StatusOr<double> Loop(const Case& what, const Block& block) override {
    EK_ASSIGN_OR_RETURN(const std::vector<double> slowest, Measure("loop", what, block));
    if (slowest.size() == 1) return slowest[0];
    return absl::InternalError(
        absl::StrCat(name_, " measured ", slowest.size(), " loops, expected is one"));
  }

  absl::Status Check(const Case& what) override {
    return Ask(absl::StrCat("check ", TextOf(what))).status();
  }
  absl::Status Forget() override { return Ask("forget").status(); }

 private:
  std::string Log() const { return folder_ + "/log"; }

  static std::string TextOf(const Case& what) {
    return absl::StrCat(NameOf(what.op), " ", NameOf(what.scalar), " ", what.bytes, " ",
                        what.registered ? 1 : 0);
  }

  absl::Status Listen() {
    const Descriptor barrier(
        open((folder_ + "/barrier").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (barrier.get() < 0 || ftruncate(barrier.get(), sizeof(SharedBarrier)) != 0)
      return SystemError(folder_);
    const Descriptor at(open(folder_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    listener_ = Descriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_un address = SocketAddressIn(at.get());
    if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
        listen(listener_.get(), SOMAXCONN) != 0) {
      return SystemError(absl::StrCat("cannot listen in ", folder_));
    }
    return absl::OkStatus();
  }

  // Until each rank has said which one it is.
  absl::Status Meet(absl::Time deadline) {
    for (size_t come = 0; come < ranks_.size(); ++come) {
      for (pollfd ready{.fd = listener_.get(), .events = POLLIN}; poll(&ready, 1, 100) <= 0;) {
        if (Reap(/*stops_at_one=*/true)) return Gone("a rank ended before it connected");
        if (SteadyNow() >= deadline) {
          return Gone(absl::StrCat(come, " of ", ranks_.size(), " ranks connected within ",
                                   absl::FormatDuration(patience_)));
        }
      }
      auto line = std::make_unique<Line>(
          Descriptor(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)));
      while (!line->Has()) {
        if (!line->Read()) return Gone("a rank connected and disconnected again");
      }
      const std::string said = line->Take();
      absl::string_view text = said;
      size_t rank = 0;
      if (!absl::ConsumePrefix(&text, "rank ") || !absl::SimpleAtoi(text, &rank) ||
          rank >= ranks_.size() || ranks_[rank] != nullptr) {
        return Gone(absl::StrCat("a rank of ", ranks_.size(), " sent \"", said, "\""));
      }
      ranks_[rank] = std::move(line);
    }
    return absl::OkStatus();
  }

  // Sends `text` to all ranks, and returns each one's text after its "ok".
  absl::StatusOr<std::vector<std::string>> Ask(const std::string& text) {
    absl::StatusOr<std::vector<std::string>> answers = AskAll(text);
    has_failed_ |= !answers.ok() && !absl::IsUnimplemented(answers.status());
    return answers;
  }

  absl::StatusOr<std::vector<std::string>> AskAll(const std::string& text) {
    for (const auto& rank : ranks_) rank->Say(text + "\n");
    std::vector<std::string> answers(ranks_.size());
    std::set<size_t> open;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) open.insert(rank);
    absl::Status status;
    const absl::Time deadline = SteadyNow() + kAnswerTimeout;
    while (!open.empty()) {
      std::vector<pollfd> fds;
      for (const size_t rank : open) fds.push_back({.fd = ranks_[rank]->fd(), .events = POLLIN});
      if (poll(fds.data(), fds.size(),
               static_cast<int>(absl::ToInt64Milliseconds(kAnswerTimeout))) < 0 &&
          errno != EINTR) {
        return SystemError("poll");
      }
      if (SteadyNow() >= deadline)
        return Gone(absl::StrCat("rank ", *open.begin(), " does not respond to \"", text, "\""));
      for (const pollfd& fd : fds) {
        if (fd.revents == 0) continue;
        const size_t rank = *std::find_if(open.begin(), open.end(),
                                          [&](size_t r) { return ranks_[r]->fd() == fd.fd; });
        if (!ranks_[rank]->Read())
          return Gone(absl::StrCat("rank ", rank, " disconnected at \"", text, "\""));
        if (!ranks_[rank]->Has()) continue;
        answers[rank] = ranks_[rank]->Take();
        open.erase(rank);
        // All ranks skip together; the first that fails leaves the others waiting for it.
        status.Update(StatusOf(answers[rank]));
        if (!status.ok() && !absl::IsUnimplemented(status)) return status;
      }
    }
    if (!status.ok()) return status;
    return answers;
  }

  absl::Status StatusOf(absl::string_view answer) const {
    if (absl::ConsumePrefix(&answer, "ok")) return absl::OkStatus();
    if (absl::ConsumePrefix(&answer, "skip "))
      return absl::UnimplementedError(absl::StrCat(name_, ": ", answer));
    if (absl::ConsumePrefix(&answer, "wrong ")) {
      return absl::DataLossError(absl::StrCat(name_, " computed a wrong result: ", answer));
    }
    absl::ConsumePrefix(&answer, "error ");
    return absl::InternalError(absl::StrCat(name_, " failed: ", answer));
  }

  // In seconds, each the slowest rank's.
  absl::StatusOr<std::vector<double>> Measure(absl::string_view verb, const Case& what,
                                              const Block& block) {
    EK_ASSIGN_OR_RETURN(
        const std::vector<std::string> answers,
        Ask(absl::StrCat(verb, " ", TextOf(what), " ", block.warmups, " ", block.repetitions)));
    std::vector<double> slowest;
    for (const std::string& answer : answers) {
      std::istringstream words(answer.substr(2));
      int64_t ns = 0;
      for (size_t i = 0; words >> ns; ++i) {
        if (i == slowest.size()) slowest.push_back(0);
        slowest[i] = std::max(slowest[i], 1e-9 * static_cast<double>(ns));
      }
    }
    return slowest;
  }

  // True if all processes have ended, or one has.
  bool Reap(bool stops_at_one = false) {
    const size_t before = pids_.size();
    std::erase_if(pids_, [](pid_t pid) { return waitpid(pid, nullptr, WNOHANG) == pid; });
    return pids_.empty() || (stops_at_one && pids_.size() < before);
  }

  absl::Status Gone(absl::string_view what) const {
    return absl::UnavailableError(absl::StrCat(name_, ": ", what, "; the log: ", EndOfLog(Log())));
  }

  const std::string name_;
  const std::string folder_;
  const absl::Duration patience_;
  Descriptor listener_;
  std::vector<std::unique_ptr<Line>> ranks_;  // By rank.
  std::vector<pid_t> pids_;                   // Those that have not ended.
  bool has_failed_ = false;                   // There is no point in waiting for them.
};

}  // namespace

absl::StatusOr<std::unique_ptr<Peer>> StartRanks(const RankOptions& options) {
  auto peer = std::make_unique<RankProcesses>(options);
  EK_RETURN_IF_ERROR(peer->Start(options.programs));
  return peer;
}

}  // namespace evenkeel::bench
