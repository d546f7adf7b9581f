// A live job of real processes while strangers do their worst on every socket on which it listens.
//
// The attack lasts 3 seconds, or --test_env=EVENKEEL_HOSTILE_SECONDS=60 (and --test_timeout=600).

#include <poll.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
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
constexpr char kJob[] = "attacked";
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

// Returns the duration of the attack on a live job.
absl::Duration AttackTime() {
  const char* seconds = std::getenv("EVENKEEL_HOSTILE_SECONDS");
  return absl::Seconds(seconds == nullptr ? 3 : std::atof(seconds));
}

std::string NewFolder() {
  std::string pattern = testing::TempDir() + "/hostileXXXXXX";
  return mkdtemp(pattern.data());
}

struct JobOptions {
  int64_t steps = 0;  // After which the ranks leave; 0: when they are told to.
  std::map<std::string, std::string> variables = {}, of_rank_1 = {};
  int patience_s = 30;          // For the other ranks, at the start.
  std::string candidates = {};  // Where the ranks look for their store; empty: in a folder.
};

// Ranks that train and save until they are told to stop.
class Job {
 public:
  explicit Job(int ranks = kWorld, JobOptions options = {})
      : options_(std::move(options)),
        folder_(NewFolder()),
        stop_file_(folder_ + "/stop"),
        saved_(folder_ + "/saved") {
    std::filesystem::create_directory(saved_);
    StartUpTo(ranks);
  }

  // Starts ranks until there are so many. They may open few files.
  void StartUpTo(int ranks) {
    constexpr rlim_t kFiles = 64;
    for (int rank = static_cast<int>(ranks_.size()); rank < ranks; ++rank) {
      std::map<std::string, std::string> variables = {{"RANK", absl::StrCat(rank)},
                                                      {"WORLD_SIZE", absl::StrCat(kWorld)},
                                                      {"LOCAL_RANK", absl::StrCat(rank)},
                                                      {"LOCAL_WORLD_SIZE", absl::StrCat(kWorld)},
                                                      {"EVENKEEL_STORE", folder_ + "/store"},
                                                      {"EVENKEEL_JOB", kJob},
                                                      {"EVENKEEL_SECRET", kSecret}};
      variables.merge(std::map(options_.variables));
      if (rank == 1) variables.merge(std::map(options_.of_rank_1));
      std::vector<std::string> command = {kRank, stop_file_, absl::StrCat(options_.patience_s),
                                          saved_, absl::StrCat(options_.steps)};
      if (!options_.candidates.empty()) command.push_back(options_.candidates);
      ranks_.push_back(std::make_unique<Program>(
          command,
          ProgramOptions{.environment = variables, .timeout = absl::Seconds(90) + AttackTime()}));
      const rlimit few = {kFiles, kFiles};
      EXPECT_EQ(prlimit(ranks_.back()->pid(), RLIMIT_NOFILE, &few, nullptr), 0);
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
  // Puts malformed manifests where the ranks will save: nested ones, and some of 1 GiB, sparse.
  void PlantManifests() {
    constexpr int64_t kSteps = 50, kLast = 200;  // As the ranks save.
    for (int64_t step = kSteps; step <= kLast; step += kSteps) {
      const std::string folder = absl::StrCat(saved_, "/", step);
      if (!std::filesystem::create_directory(folder)) continue;
      planted_.insert(absl::StrCat(step));
      std::ofstream(folder + "/manifest.json") << std::string(size_t{1} << 20, '[');
      if (step % (2 * kSteps) == 0)
        std::filesystem::resize_file(folder + "/manifest.json", int64_t{1} << 30);
    }
  }
  // Removes those that the ranks have not come to, and returns whether they have replaced another.
  bool RemovePlanted() const {
    bool has_replaced = false;
    for (const auto& entry : std::filesystem::directory_iterator(saved_)) {
      if (!entry.is_directory()) continue;
      const auto files = std::distance(std::filesystem::directory_iterator(entry), {});
      if (files == 1) std::filesystem::remove_all(entry);
      has_replaced |= files > 1 && planted_.contains(entry.path().filename());
    }
    return has_replaced;
  }
  // Returns all that the ranks have saved, by path, without the times in names.
  std::map<std::string, std::string> Saved() const {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(saved_)) {
      if (!entry.is_regular_file()) continue;
      std::ostringstream bytes;
      bytes << std::ifstream(entry.path(), std::ios::binary).rdbuf();
      const std::regex time("-[0-9]{19}|\"checksum\": \"[0-9a-f]+\"");  // Of the names, too.
      files[std::regex_replace(std::filesystem::relative(entry.path(), saved_).string(), time,
                               "")] = std::regex_replace(bytes.str(), time, "");
    }
    return files;
  }
  bool HasSaved() const { return std::filesystem::exists(saved_ + "/0/manifest.json"); }
  void Stop() { std::ofstream{stop_file_}; }
  std::vector<Ended> Wait() {
    std::vector<Ended> ended;
    for (const auto& rank : ranks_) ended.push_back(rank->Wait());
    return ended;
  }

 private:
  const JobOptions options_;
  const std::string folder_, stop_file_, saved_;
  std::set<std::string> planted_;  // Steps.
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

// Returns the number in rank 0's line "steps <number>".
std::string StepsIn(const std::string& out) {
  for (const std::string& line : Lines(out)) {
    if (absl::StartsWith(line, "steps ")) return line.substr(6);
  }
  return "";
}

std::vector<std::string> Names(const std::map<std::string, std::string>& files) {
  std::vector<std::string> names;
  for (const auto& [name, bytes] : files) names.push_back(name);
  return names;
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

// The status server of a job: a process beside it.
class StatusServer {
 public:
  explicit StatusServer(const std::string& store)
      : top_({"tools/top", "--serve=127.0.0.1:0", store},
             {.environment = {{"EVENKEEL_SECRET", kSecret}, {"EVENKEEL_STATUS_TOKEN", "token"}},
              .timeout = absl::Seconds(90) + AttackTime()}) {
    const absl::Time deadline = absl::Now() + kSoon;
    while (address_.port == 0 && absl::Now() < deadline) {
      const std::vector<HostPort> listeners = ListenersOf({top_.pid()});
      if (!listeners.empty()) address_ = listeners[0];
      absl::SleepFor(absl::Milliseconds(20));
    }
  }
  pid_t pid() const { return top_.pid(); }

  // Returns the reply to a request with the token; what has come of it after 2 seconds.
  std::string Get() const {
    const absl::Time deadline = absl::Now() + absl::Seconds(2);
    const auto fd = internal::ConnectTo(address_, deadline);
    if (!fd.ok()) return fd.status().ToString();
    std::string reply;
    (void)internal::SendAll(*fd,
                            "GET /status.json HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
                            "token\r\n\r\n",
                            deadline);
    while (internal::WaitFor(*fd, POLLIN, deadline).ok() &&
           !internal::ReceiveSome(*fd, reply).is_over) {
    }
    return reply;
  }

 private:
  Program top_;
  HostPort address_;
};

// Attacks all sockets on which `pids` listen, until `end`. Returns their addresses.
std::vector<HostPort> Attack(Stranger& stranger, const std::vector<pid_t>& pids, absl::Time end,
                             int turns_per_look = 20) {
  constexpr absl::Duration kBetweenTurns =
      absl::Milliseconds(2);  // Leaves the cores to the ranks, mostly.
  constexpr int kFlood = 8;   // With these pauses, some thousand connections a second.
  std::vector<HostPort> all, now;
  // The strangers' own work is not to take the processors from the ranks.
  const auto attack = [&] {
    setpriority(PRIO_PROCESS, 0, 10);  // Of this thread.
    for (int turn = 0; turn == 0 || absl::Now() < end; ++turn) {
      if (turn % turns_per_look == 0) {
        now = ListenersOf(pids);
        for (const HostPort& address : now) {
          if (std::find(all.begin(), all.end(), address) == all.end()) all.push_back(address);
        }
      }
      stranger.Turn(now);
      for (const HostPort& address : now) stranger.Flood(address, kFlood);
      absl::SleepFor(kBetweenTurns);
    }
  };
  std::thread(attack).join();
  return all;
}

TEST(HostileTest, ALiveJobGoesOnUndisturbed) {
  Job job;
  job.PlantManifests();
  const std::string store = job.store();
  ASSERT_NE(store, "");
  const absl::StatusOr<std::string> hello = OverhearHello(store);
  ASSERT_TRUE(hello.ok()) << hello.status();
  const StatusServer status(store);
  std::vector<pid_t> pids = job.pids();
  pids.push_back(status.pid());

  constexpr absl::Duration kQuiet = absl::Seconds(1);
  const absl::Time start = absl::Now() + absl::Seconds(1);  // The ranks connect meanwhile.
  absl::SleepFor(start + kQuiet - absl::Now());
  // Once all have connected, and saved.
  std::vector<Holdings> holdings;
  for (const absl::Time by = absl::Now() + kSoon; absl::Now() < by;) {
    const std::vector<Holdings> now = HoldingsOf(job.pids());
    if (now == std::exchange(holdings, now) && job.HasSaved()) break;
    absl::SleepFor(absl::Milliseconds(300));
  }
  const int64_t memory_before = ResidentBytesOf(job.pids()[0]);

  constexpr uint64_t kSeed = 20261120;
  Stranger stranger(kSeed, /*most_open=*/500);
  stranger.Heard(*hello);
  const absl::Time attack = absl::Now(), attack_end = attack + AttackTime();
  std::vector<HostPort> attacked;
  constexpr int kParts = 6;
  for (int part = 1; part <= kParts; ++part) {
    for (const HostPort& address : Attack(stranger, pids, attack + AttackTime() * part / kParts)) {
      attacked.push_back(address);
    }
    // In the middle of it a member is let in as always, and so is a request with the token.
    const auto member = TcpStore::Connect({.addresses = {store},
                                           .secret = kSecret,
                                           .rank = 2,
                                           .world_size = kWorld,
                                           .timeout = kSoon});
    ASSERT_TRUE(member.ok()) << member.status();
    EXPECT_TRUE((*member)->Set("from a member", absl::StrCat(part)).ok());
    EXPECT_EQ((*member)->Get("from a member", kSoon).value_or(""), absl::StrCat(part));
    constexpr char kConnected[] = "\"state\":\"connected\"";
    std::string reply = status.Get();
    for (const absl::Time by = absl::Now() + kSoon; absl::Now() < by;) {
      if (absl::StrContains(reply, kConnected)) break;
      reply = status.Get();
    }
    EXPECT_THAT(reply, HasSubstr(kConnected));
  }
  const auto is_refused = [&](Trick trick) { return stranger.refusals().contains(trick); };
  for (const absl::Time by = absl::Now() + kSoon; absl::Now() < by;) {
    if (is_refused(Trick::kPlayBack) && is_refused(Trick::kWrongProof) &&
        stranger.tried().size() == std::size(kTricks))
      break;
    Attack(stranger, pids, absl::Now() + absl::Milliseconds(100));
  }
  const absl::Time end = absl::Now();
  const int64_t memory_after = ResidentBytesOf(job.pids()[0]);
  stranger.Hangup();
  const absl::Time given_back_by = absl::Now() + kSoon;
  std::vector<Holdings> held = HoldingsOf(job.pids());
  while (held != holdings && absl::Now() < given_back_by) {
    absl::SleepFor(absl::Milliseconds(20));
    held = HoldingsOf(job.pids());
  }
  EXPECT_EQ(held, holdings);
  job.Stop();
  const std::vector<Ended> ended = job.Wait();
  EXPECT_TRUE(job.RemovePlanted());

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

  // The same steps without strangers: the same weights and checkpoints.
  const std::map<int64_t, int64_t> progress = ProgressOf(ended[0].out);
  int64_t steps = 0;
  ASSERT_TRUE(absl::SimpleAtoi(StepsIn(ended[0].out), &steps)) << ended[0].out;
  Job alone(kWorld, {.steps = steps});
  const std::vector<Ended> reference = alone.Wait();
  for (const Ended& rank : reference) EXPECT_THAT(rank.out, HasSubstr("ends: OK")) << rank.err;
  const std::map<std::string, std::string> saved = job.Saved(), expected = alone.Saved();
  EXPECT_GE(saved.size(), size_t{kWorld + 1});
  EXPECT_EQ(Names(saved), Names(expected));
  for (const auto& [name, bytes] : expected)
    EXPECT_TRUE(saved.contains(name) && saved.at(name) == bytes) << name << " has other bytes";

  const std::map<int64_t, int64_t> progress_alone = ProgressOf(reference[0].out);
  const double quiet = StepsPerSecond(progress_alone, absl::InfinitePast(), absl::InfiniteFuture()),
               attacked_rate = StepsPerSecond(progress, attack, end);
  int connections = stranger.flooded();
  for (const auto& [trick, count] : stranger.tried()) connections += count;
  std::cout << "a step: " << 1e3 / quiet << " ms alone, " << 1e3 / attacked_rate
            << " ms under attack for " << absl::FormatDuration(end - attack) << " ("
            << quiet / attacked_rate << " times; " << connections << " connections, "
            << stranger.refused() << " refusals); " << steps << " steps, " << saved.size()
            << " equal files; memory of rank 0: " << (memory_after - memory_before) / 1024
            << " KiB more; lag behind the plan: " << absl::FormatDuration(end - attack_end) << "\n";
  EXPECT_GT(quiet, 0);
  EXPECT_GT(attacked_rate * kSlower, quiet);
}

// The first ranks wait for the last one, and so do their listeners; then it comes, under fire as
// they are. Another user listens at the first address where they look for their store.
TEST(HostileTest, AJobStartsUnderAttack) {
  Impostor impostor(kJob);
  const HostPort free =
      internal::LocalAddress(internal::ListenOn({"127.0.0.1", 0}).value()).value();
  Job job(kWorld - 1, {.candidates = impostor.address().ToString() + "," + free.ToString()});
  Stranger stranger(/*seed=*/7);
  const auto attack = [&](absl::Duration time) {
    size_t listeners = 0;
    for (const absl::Time end = absl::Now() + time; absl::Now() < end; impostor.Turn()) {
      const absl::Time turn_end = absl::Now() + absl::Milliseconds(50);
      listeners = Attack(stranger, job.pids(), turn_end, /*turns_per_look=*/1).size();
    }
    return listeners;
  };
  const absl::Time deadline = absl::Now() + kSoon;
  size_t listeners = 0;  // The store's, and one of each rank.
  while (listeners < kWorld && absl::Now() < deadline) listeners = attack(absl::Milliseconds(100));
  EXPECT_GE(listeners, size_t{kWorld}) << "there was nothing to attack";
  attack(absl::Milliseconds(500));
  job.StartUpTo(kWorld);
  attack(absl::Seconds(3));
  stranger.Hangup();
  job.Stop();
  for (const Ended& rank : job.Wait()) {
    EXPECT_EQ(rank.code, 0) << rank.out << rank.err;
    EXPECT_THAT(rank.out, HasSubstr("ends: OK"));
  }
  EXPECT_EQ(stranger.admitted(), 0);
  EXPECT_GE(impostor.victims(), kWorld);
}

// A limit of the user's or of the container's threads may be reached at any of them.
TEST(FewThreadsTest, AThreadThatCannotStartIsAnErrorOfAllRanks) {
  constexpr char kCannotStart[] = "cannot start a thread for";
  for (const std::string backend : {"tcp", "shm"}) {
    int threads = backend == "tcp" ? 0 : 3;  // Until it has joined the group, shm is as tcp.
    int late = 0;  // Starts that took longer than their patience, on a busy machine.
    for (bool is_enough = false; !is_enough; ++threads) {
      ASSERT_LT(threads, 30);
      Job job(kWorld, {.steps = 5,
                       .variables = {{"HOSTILE_BACKEND", backend}},
                       .of_rank_1 = {{"HOSTILE_THREADS", absl::StrCat(threads)}},
                       .patience_s = 3});
      const std::vector<Ended> ended = job.Wait();
      is_enough = ended[1].code == 0;
      const bool is_late = !is_enough && !absl::StrContains(ended[1].out, kCannotStart);
      if (is_late && ++late < 10) {
        --threads;
        continue;
      }
      for (int rank = 0; rank < kWorld && !is_enough; ++rank) {
        EXPECT_EQ(ended[rank].code, EXIT_FAILURE)
            << "rank " << rank << ", " << threads << " threads over " << backend << ": "
            << ended[rank].out << ended[rank].err;
      }
      if (!is_enough) {
        EXPECT_THAT(ended[1].out, HasSubstr(kCannotStart));
      }
    }
    EXPECT_GT(threads, 4) << backend;
    std::cout << backend << ": " << threads - 1 << " threads are enough\n";
  }
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
