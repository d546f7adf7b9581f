// Ranks that share memory and are processes: stopped, killed, or out of descriptors, in the middle
// of a collective.

#include <signal.h>

#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/tests/child_processes.h"
#include "evenkeel/tests/shm_faults/rank.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr char kSecret[] = "between these ranks";

// Ranks, and what each has said. The store is here, so that any of them may die.
class Ranks {
 public:
  Ranks(int world_size, const std::vector<std::string>& arguments) : said_(world_size) {
    auto server =
        TcpStoreServer::Create({.secret = kSecret, .world_size = world_size, .host = "the test"});
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    std::vector<std::string> command = {ThisProgram(), "--rank"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    for (int rank = 0; rank < world_size; ++rank) {
      const absl::Status started =
          children_.Start(command, RankVariables(rank, world_size, server_->address(), kSecret));
      EXPECT_TRUE(started.ok()) << started;
    }
  }

  ChildProcesses& children() { return children_; }
  // Returns the rest of the rank's line that begins so; waits for it. Fails if the rank ends first.
  std::string Await(int rank, absl::string_view begin) {
    std::string found;
    const auto has_said = [&] {
      for (absl::string_view line : said_[rank]) {
        if (!absl::ConsumePrefix(&line, begin)) continue;
        found = absl::StrCat("!", line);
        return true;
      }
      return !children_.is_running(rank);
    };
    EXPECT_TRUE(children_.Listen(absl::Now() + kPatience, on_line_, has_said))
        << "rank " << rank << ": " << begin;
    EXPECT_FALSE(found.empty()) << "rank " << rank << " has not said \"" << begin
                                << "\": " << children_.complaints(rank);
    return found;
  }
  void AwaitAll(absl::string_view begin) {
    for (int rank = 0; rank < children_.count(); ++rank) Await(rank, begin);
  }
  void TellAll() {
    for (int rank = 0; rank < children_.count(); ++rank) children_.Tell(rank, "x");
  }
  void ExpectGoodEnd(int but = -1) {
    EXPECT_TRUE(children_.Listen(absl::Now() + kPatience, on_line_));
    for (int rank = 0; rank < children_.count(); ++rank) {
      if (rank == but) continue;
      EXPECT_EQ(children_.exit_code(rank), 0)
          << "rank " << rank << ": " << children_.complaints(rank);
    }
  }

 private:
  const std::function<void(int, absl::string_view)> on_line_ =
      [this](int rank, absl::string_view line) { said_[rank].emplace_back(line); };
  std::vector<std::vector<std::string>> said_;
  std::unique_ptr<TcpStoreServer> server_;
  ChildProcesses children_;  // Last: they end before what they use.
};

struct Stop {
  const char* kind;
  int tries;
};

class StoppedRankTest : public testing::TestWithParam<Stop> {};

// It writes to, or reads from, the others' memory when it goes on. They have that for themselves by
// then.
TEST_P(StoppedRankTest, ChangesNothingOnceTheOthersHaveGivenUpAndEndsNothingWell) {
  std::mt19937 random(20251122);
  for (int attempt = 0; attempt < GetParam().tries; ++attempt) {
    const int stopped = attempt % 2;
    const int micros = std::uniform_int_distribution<int>(0, 100000)(random);
    SCOPED_TRACE(absl::StrCat("rank ", stopped, " is stopped after ", micros, " us"));
    Ranks ranks(2, {"stopped", GetParam().kind, absl::StrCat(24 << 20)});  // 96 MiB.
    ranks.AwaitAll("running");
    absl::SleepFor(absl::Microseconds(micros));
    ranks.children().Signal(stopped, SIGSTOP);
    const absl::Time stop = absl::Now();
    EXPECT_THAT(ranks.Await(1 - stopped, "failed"), HasSubstr(absl::StrCat("rank ", stopped)));
    EXPECT_LT(absl::Now() - stop, absl::Seconds(10));
    ranks.children().Signal(stopped, SIGCONT);
    ranks.Await(stopped, "failed");
    absl::SleepFor(absl::Milliseconds(300));  // For what may still be written by mistake.
    ranks.TellAll();
    ranks.AwaitAll("intact");
    ranks.ExpectGoodEnd();
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(, StoppedRankTest,
                         testing::Values(Stop{"all_reduce", 6}, Stop{"all_gather", 4}),
                         [](const auto& info) { return std::string(info.param.kind); });

int FilesIn(const std::string& folder) {
  int files = 0;
  for (auto at = std::filesystem::recursive_directory_iterator(folder); at != end(at); ++at)
    ++files;
  return files;
}

TEST(KilledRankTest, IsNamedAndTheOthersGoOnWithTheirMemoryAndNothingIsLeft) {
  std::mt19937 random(7);
  const int files = FilesIn(testing::TempDir());
  for (int attempt = 0; attempt < 8; ++attempt) {
    const int world = 2 + attempt % 3, victim = attempt % world;
    const int micros = std::uniform_int_distribution<int>(0, 300000)(random);
    SCOPED_TRACE(absl::StrCat("rank ", victim, " of ", world, " is killed after ", micros, " us"));
    Ranks ranks(world, {"killed", absl::StrCat(attempt)});
    ranks.AwaitAll("running");
    absl::SleepFor(absl::Microseconds(micros));
    ranks.children().Kill(victim);
    const absl::Time death = absl::Now();
    for (int rank = 0; rank < world; ++rank) {
      if (rank == victim) continue;
      EXPECT_THAT(ranks.Await(rank, "failed"), HasSubstr(absl::StrCat("rank ", victim)));
    }
    EXPECT_LT(absl::Now() - death, absl::Seconds(5));
    for (int rank = 0; rank < world; ++rank) {
      if (rank != victim) ranks.Await(rank, "ended");
    }
    ranks.ExpectGoodEnd(victim);
    if (HasFailure()) return;
  }
  EXPECT_EQ(FilesIn(testing::TempDir()), files);
}

// A missing resource is an error status; if the group ends, all ranks learn which rank lacked it.
TEST(WithoutFilesTest, AllocateFailsAndTheGroupGoesOn) {
  // A rank needs no descriptor for its channels.
  for (const char* what : {"allocate", "channels"}) {
    SCOPED_TRACE(what);
    Ranks ranks(2, {"no_files", what});
    for (const int rank : {0, 1}) EXPECT_THAT(ranks.Await(rank, "status"), HasSubstr("OK"));
    ranks.TellAll();
    ranks.ExpectGoodEnd();
  }
}

TEST(WithoutFilesTest, ACollectiveFailsOnAllRanksAndTheirMemoryIsTheirs) {
  Ranks ranks(2, {"no_files", "give"});
  EXPECT_THAT(ranks.Await(1, "status"), HasSubstr("RESOURCE_EXHAUSTED"));
  EXPECT_THAT(ranks.Await(0, "status"), HasSubstr("rank 1"));
  absl::SleepFor(absl::Milliseconds(100));
  ranks.TellAll();
  ranks.ExpectGoodEnd();
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  if (argc > 1 && absl::string_view(argv[1]) == "--rank") {
    const absl::Status status =
        evenkeel::RunShmRank(std::vector<std::string>(argv + 2, argv + argc));
    if (!status.ok()) std::cerr << status << "\n";
    return status.ok() ? 0 : 1;
  }
  signal(SIGPIPE, SIG_IGN);  // A rank that is told something may be dead.
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
