// A live job of real processes while strangers do their worst on every socket on which it listens.

#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/net/frame.h"
#include "evenkeel/comm/net/handshake.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/rendezvous/file_store.h"
#include "evenkeel/comm/rendezvous/tcp_store.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tests/hostile/listeners.h"
#include "evenkeel/tests/hostile/stranger.h"
#include "evenkeel/tests/training/program.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::HostPort;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr char kRank[] = "tests/hostile/rank";
constexpr int kWorld = 3;
constexpr char kSecret[] = "only the ranks know it";
constexpr absl::Duration kSoon =
    absl::Seconds(30);  // For what takes milliseconds when the machine is free.
// The strangers live on the same few cores as the ranks, so the ranks may get slower, but not much:
// by this factor.
constexpr double kSlower = 8;
// Memory that a server may need for strangers: 1024 that have not identified themselves, with a few
// kilobytes each, and what the allocator keeps. Sanitizers keep much of the freed memory.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kMoreMemory = int64_t{1} << 30;
#else
constexpr int64_t kMoreMemory = int64_t{32} << 20;
#endif

std::string NewFolder() {
  std::string pattern = testing::TempDir() + "/hostileXXXXXX";
  return mkdtemp(pattern.data());
}

// Ranks that run until they are told to stop.
class Job {
 public:
  explicit Job(int ranks = kWorld) : folder_(NewFolder()), stop_file_(folder_ + "/stop") {
    StartUpTo(ranks);
  }

  // Starts ranks until there are so many.
  void StartUpTo(int ranks) {
    for (int rank = static_cast<int>(ranks_.size()); rank < ranks; ++rank) {
      const std::map<std::string, std::string> variables = {
          {"RANK", absl::StrCat(rank)},
          {"WORLD_SIZE", absl::StrCat(kWorld)},
          {"LOCAL_RANK", absl::StrCat(rank)},
          {"LOCAL_WORLD_SIZE", absl::StrCat(kWorld)},
          {"EVENKEEL_STORE", folder_ + "/store"},
          {"EVENKEEL_JOB", "attacked"},
          {"EVENKEEL_SECRET", kSecret}};
      ranks_.push_back(std::make_unique<Program>(
          std::vector<std::string>{kRank, stop_file_, "30"},
          ProgramOptions{.environment = variables, .timeout = absl::Seconds(90)}));
    }
  }

  std::vector<pid_t> pids() const {
    std::vector<pid_t> pids;
    for (const auto& rank : ranks_) pids.push_back(rank->pid());
    return pids;
  }
  // Where the store is; waits until it is there.
  std::string store() const {
    const auto folder = FileStore::Open(folder_ + "/store");
    return folder.ok() ? (*folder)->Get(kAddressKey, kSoon).value_or("") : "";
  }
  void Stop() { std::ofstream{stop_file_}; }
  std::vector<Ended> Wait() {
    std::vector<Ended> ended;
    for (const auto& rank : ranks_) ended.push_back(rank->Wait());
    return ended;
  }

 private:
  const std::string folder_, stop_file_;
  std::vector<std::unique_ptr<Program>> ranks_;
};

// Rank 0's progress: when it had done how many steps.
std::map<int64_t, int64_t> ProgressOf(const std::string& out) {
  std::map<int64_t, int64_t> steps_at;
  for (const std::string& line : Lines(out)) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    int64_t micros = 0, steps = 0;
    if (words.size() == 2 && absl::SimpleAtoi(words[0], &micros) &&
        absl::SimpleAtoi(words[1], &steps)) {
      steps_at[micros] = steps;
    }
  }
  return steps_at;
}

double StepsPerSecond(const std::map<int64_t, int64_t>& steps_at, absl::Time from, absl::Time to) {
  const auto first = steps_at.lower_bound(absl::ToUnixMicros(from)),
             end = steps_at.lower_bound(absl::ToUnixMicros(to));
  if (first == end || first == std::prev(end)) return 0;
  const auto last = std::prev(end);
  return 1e6 * static_cast<double>(last->second - first->second) /
         static_cast<double>(last->first - first->first);
}

// A rank's handshake with the store as an eavesdropper hears it: the hello, with its frame.
absl::StatusOr<std::string> OverhearHello(const std::string& store) {
  EK_ASSIGN_OR_RETURN(const HostPort address, HostPort::Parse(store));
  const absl::Time deadline = absl::Now() + kSoon;
  EK_ASSIGN_OR_RETURN(const internal::UniqueFd fd, internal::ConnectTo(address, deadline));
  internal::FrameParser parser(internal::kMaxGreetingFrame);
  std::string frames[2], hello_frame;
  for (std::string& frame : frames) {
    while (true) {
      EK_ASSIGN_OR_RETURN(std::optional<std::string> next, parser.Next());
      if (next) {
        frame = *std::move(next);
        break;
      }
      EK_RETURN_IF_ERROR(internal::WaitFor(fd, POLLIN, deadline));
      std::string bytes;
      if (internal::ReceiveSome(fd, bytes).is_over) return absl::UnavailableError("cut off");
      parser.Append(bytes);
    }
    if (!hello_frame.empty()) break;
    EK_ASSIGN_OR_RETURN(const internal::Challenge challenge, internal::Challenge::Parse(frame));
    internal::Hello hello{
        .rank = 1, .world_size = kWorld, .nonce = std::string(internal::kNonceSize, 'n')};
    hello.proof = internal::ProofOf(kSecret, challenge, hello);
    hello_frame = internal::Frame(hello.Serialize());
    EK_RETURN_IF_ERROR(internal::SendAll(fd, hello_frame, deadline));
  }
  EK_ASSIGN_OR_RETURN(const internal::Verdict verdict, internal::Verdict::Parse(frames[1]));
  EK_RETURN_IF_ERROR(verdict.status);
  return hello_frame;
}

// Attacks whatever listens until `end`; the addresses that were found.
std::vector<HostPort> Attack(Stranger& stranger, const Job& job, absl::Time end,
                             int turns_per_look = 20) {
  constexpr absl::Duration kBetweenTurns =
      absl::Milliseconds(2);  // Leaves the cores to the ranks, mostly.
  std::vector<HostPort> all, now;
  for (int turn = 0; absl::Now() < end; ++turn) {
    if (turn % turns_per_look == 0) {
      now = ListenersOf(job.pids());
      for (const HostPort& address : now) {
        if (std::find(all.begin(), all.end(), address) == all.end()) all.push_back(address);
      }
    }
    stranger.Turn(now);
    absl::SleepFor(kBetweenTurns);
  }
  return all;
}

TEST(HostileTest, ALiveJobGoesOnUndisturbed) {
  Job job;
  const std::string store = job.store();
  ASSERT_NE(store, "");
  const absl::StatusOr<std::string> hello = OverhearHello(store);
  ASSERT_TRUE(hello.ok()) << hello.status();

  constexpr absl::Duration kQuiet = absl::Seconds(1), kAttack = absl::Seconds(5);
  const absl::Time start = absl::Now() + absl::Seconds(1);  // The ranks connect meanwhile.
  absl::SleepFor(start + kQuiet - absl::Now());
  const int64_t memory_before = ResidentBytesOf(job.pids()[0]);

  constexpr uint64_t kSeed = 20261120;
  Stranger stranger(kSeed, /*most_open=*/500);
  stranger.Heard(*hello);
  const absl::Time attack = absl::Now();
  std::vector<HostPort> attacked = Attack(stranger, job, attack + kAttack / 2);
  // In the middle of it a member is let in as always.
  const auto member = TcpStore::Connect(
      {.addresses = {store}, .secret = kSecret, .rank = 2, .world_size = kWorld, .timeout = kSoon});
  ASSERT_TRUE(member.ok()) << member.status();
  EXPECT_TRUE((*member)->Set("from a member", "value").ok());
  for (const HostPort& address : Attack(stranger, job, attack + kAttack))
    attacked.push_back(address);
  const absl::Time end = absl::Now();
  const int64_t memory_after = ResidentBytesOf(job.pids()[0]);
  EXPECT_EQ((*member)->Get("from a member", kSoon).value_or(""), "value");
  stranger.Hangup();
  job.Stop();
  const std::vector<Ended> ended = job.Wait();

  for (int rank = 0; rank < kWorld; ++rank) {
    EXPECT_EQ(ended[rank].code, 0) << "rank " << rank << ": " << ended[rank].out << ended[rank].err;
    EXPECT_THAT(ended[rank].out, HasSubstr("ends: OK"));
    EXPECT_THAT(ended[rank].err, IsEmpty());
  }
  ASSERT_THAT(attacked, Not(IsEmpty()));
  for (const HostPort& address : attacked)
    EXPECT_EQ(address.host, "127.0.0.1") << "listens where nobody told it to";
  for (const Trick trick : kTricks) {
    EXPECT_GT(stranger.tried().count(trick), 0u) << ToString(trick);
  }
  EXPECT_EQ(stranger.admitted(), 0);
  EXPECT_GT(stranger.refused(), 0);
  EXPECT_THAT(stranger.refusals().at(Trick::kPlayBack), HasSubstr("the secrets differ"));
  EXPECT_THAT(stranger.refusals().at(Trick::kWrongProof), HasSubstr("the secrets differ"));
  EXPECT_LT(memory_after - memory_before, kMoreMemory);

  const std::map<int64_t, int64_t> progress = ProgressOf(ended[0].out);
  const double quiet = StepsPerSecond(progress, start, attack),
               attacked_rate = StepsPerSecond(progress, attack, end);
  int connections = 0;
  for (const auto& [trick, count] : stranger.tried()) connections += count;
  std::cout << "steps per second: " << quiet << " alone, " << attacked_rate << " under attack ("
            << connections << " connections, " << stranger.refused()
            << " refusals); memory of rank 0: " << (memory_after - memory_before) / 1024
            << " KiB more\n";
  EXPECT_GT(quiet, 0);
  EXPECT_GT(attacked_rate * kSlower, quiet);
}

// The first ranks wait for the last one, and so do their listeners; then it comes, under fire as
// they are.
TEST(HostileTest, AJobStartsUnderAttack) {
  Job job(kWorld - 1);
  Stranger stranger(/*seed=*/7);
  const absl::Time deadline = absl::Now() + kSoon;
  size_t listeners = 0;  // The store's, and one of each rank.
  while (listeners < kWorld && absl::Now() < deadline) {
    listeners =
        Attack(stranger, job, absl::Now() + absl::Milliseconds(100), /*turns_per_look=*/1).size();
  }
  EXPECT_EQ(listeners, size_t{kWorld}) << "there was nothing to attack";
  Attack(stranger, job, absl::Now() + absl::Milliseconds(500));
  job.StartUpTo(kWorld);
  Attack(stranger, job, absl::Now() + absl::Seconds(2), /*turns_per_look=*/1);
  stranger.Hangup();
  job.Stop();
  for (const Ended& rank : job.Wait()) {
    EXPECT_EQ(rank.code, 0) << rank.out << rank.err;
    EXPECT_THAT(rank.out, HasSubstr("ends: OK"));
  }
  EXPECT_EQ(stranger.admitted(), 0);
}

// torchrun's agent listens on MASTER_PORT itself, and leaves meeting elsewhere to the ranks.
TEST(OccupiedPortTest, ProcessesOfTorchrunMeetBesideItsAgent) {
  const internal::UniqueFd agent = internal::ListenOn({"127.0.0.1", 0}).value();
  const std::string folder = NewFolder(), stop_file = folder + "/stop";
  std::ofstream{stop_file};  // They leave after their first step.
  std::map<std::string, std::string> variables = {
      {"WORLD_SIZE", absl::StrCat(kWorld)},
      {"LOCAL_WORLD_SIZE", absl::StrCat(kWorld)},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", absl::StrCat(internal::LocalAddress(agent)->port)},
      {"TORCHELASTIC_RUN_ID", "none"},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
      {"TORCHELASTIC_MAX_RESTARTS", "0"},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
      {"GROUP_RANK", "0"},
      {"ROLE_NAME", "default"},
      {"TMPDIR", folder}};
  std::vector<std::unique_ptr<Program>> ranks;
  for (int rank = 0; rank < kWorld; ++rank) {
    variables["RANK"] = variables["LOCAL_RANK"] = variables["ROLE_RANK"] = absl::StrCat(rank);
    ranks.push_back(std::make_unique<Program>(std::vector<std::string>{kRank, stop_file, "30"},
                                              ProgramOptions{.environment = variables}));
  }
  for (const auto& rank : ranks) {
    const Ended ended = rank->Wait();
    EXPECT_EQ(ended.code, 0) << ended.out << ended.err;
    EXPECT_THAT(ended.out, HasSubstr("ends: OK"));
  }
}

}  // namespace
}  // namespace evenkeel
