// A job of replacement_rank processes on this host, with its store in this process, whose ranks a
// test kills and replaces.
//
//   ReplacedJob job(/*steps=*/400, /*pause_us=*/2000);
//   job.AwaitSteps();
//   job.Kill(2);
//   job.StartPlace(2);
//   EXPECT_TRUE(job.Listen(absl::Seconds(60)));
//   EXPECT_THAT(job.Ends(), testing::Each(expected));

#ifndef EVENKEEL_TESTS_REPLACEMENT_REPLACED_JOB_H_
#define EVENKEEL_TESTS_REPLACEMENT_REPLACED_JOB_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/tests/child_processes.h"
#include "gtest/gtest.h"

namespace evenkeel {

inline constexpr char kReplacedSecret[] = "00112233445566778899aabbccddeeff";
inline std::string ReplacementRank() {
  const std::string self = ThisProgram();
  return absl::StrCat(self.substr(0, self.rfind('/')), "/replacement_rank");
}

// A job whose lost ranks are replaced at once.
class ReplacedJob {
 public:
  static constexpr int kRanks = 4;

  explicit ReplacedJob(int steps, int pause_us, Variables variables = {})
      : variables_(std::move(variables)),
        command_({ReplacementRank(), absl::StrCat(steps), absl::StrCat(pause_us)}) {
    server_ = *TcpStoreServer::Create({.secret = kReplacedSecret, .world_size = kRanks});
    for (int place = 0; place < kRanks; ++place) StartPlace(place);
  }

  void StartPlace(int place, const Variables& more = {}) {
    Variables variables = RankVariables(place, kRanks, server_->address(), kReplacedSecret);
    variables.insert(variables_.begin(), variables_.end());
    const int number = started_[place]++;
    if (number > 0) variables["EVENKEEL_NEWCOMER"] = absl::StrCat(number);
    for (const auto& [name, value] : more) variables[name] = value;
    child_of_[place] = children_.count();
    if (number > 0) without_state_.insert(children_.count());
    ASSERT_TRUE(children_.Start(command_, variables).ok());
  }
  void Kill(int place) { children_.Kill(child_of_[place]); }
  // Returns the standard error of the last process of a place, when it has ended.
  std::string ComplaintOf(int place) {
    const int child = child_of_[place];
    children_.Listen(
        absl::Now() + absl::Seconds(30), [](int, absl::string_view) {},
        [this, child] { return !children_.is_running(child); });
    EXPECT_FALSE(children_.is_running(child));
    return children_.complaints(child);
  }
  int process_of(int place) const { return children_.process(child_of_.at(place)); }
  // Waits until ranks train.
  void AwaitSteps() {
    last_line_.clear();
    while (last_line_.empty()) ASSERT_FALSE(Listen(absl::Milliseconds(10)));
  }

  // Listens until the job has ended, or `pause` has passed. Returns whether it has ended.
  bool Listen(absl::Duration pause) {
    children_.Listen(
        absl::Now() + pause,
        [this](int child, absl::string_view line) {
          if (absl::ConsumePrefix(&line, "done ")) done_[child] = std::string(line);
          if (absl::StartsWith(line, "step ")) last_line_ = std::string(line);
          if (absl::StartsWith(line, "recovered ")) recovered_.emplace_back(line);
          if (absl::ConsumePrefix(&line, "times ")) times_.push_back(std::stoll(std::string(line)));
          if (line == "entered") without_state_.erase(child);
        },
        [this] { return IsOver(); });
    return IsOver();
  }
  bool HasBegunToEnd() const { return !done_.empty(); }
  // Returns whether no other process has a state: without this one the job cannot go on.
  bool IsLastWithState(int place) const {
    return std::ranges::all_of(child_of_, [&](const auto& entry) {
      return entry.first == place || without_state_.contains(entry.second);
    });
  }
  bool IsOver() const {
    return std::ranges::all_of(
        child_of_, [this](const auto& entry) { return !children_.is_running(entry.second); });
  }
  // Returns the hashes with which the ranks ended.
  std::vector<std::string> Ends() const {
    std::vector<std::string> ends;
    for (const auto& [place, child] : child_of_) {
      const auto found = done_.find(child);
      ends.push_back(found == done_.end() ? absl::StrCat("rank ", place, " ended with code ",
                                                         children_.exit_code(child), ": ",
                                                         children_.complaints(child))
                                          : found->second);
    }
    return ends;
  }
  const std::vector<std::string>& recovered() const { return recovered_; }
  // With REPLACEMENT_TIMES: the median nanoseconds of a step, after the start and each recovery, of
  // a rank that has been there from the beginning.
  const std::vector<int64_t>& times() const { return times_; }
  const std::string& last_line() const { return last_line_; }

 private:
  const Variables variables_;  // Of all ranks.
  const std::vector<std::string> command_;
  std::unique_ptr<TcpStoreServer> server_;
  ChildProcesses children_;
  std::map<int, int> started_, child_of_;  // By place.
  std::map<int, std::string> done_;        // By child.
  std::set<int> without_state_;            // Children that have not entered yet.
  std::vector<std::string> recovered_;
  std::vector<int64_t> times_;
  std::string last_line_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_REPLACEMENT_REPLACED_JOB_H_
