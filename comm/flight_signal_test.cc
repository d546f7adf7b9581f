#include "evenkeel/comm/flight_signal.h"

#include <signal.h>
#include <sys/stat.h>

#include <fstream>
#include <iterator>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace evenkeel {
namespace {

// Returns the contents of the file once it exists, waiting at most half a minute.
std::string Await(const std::string& path) {
  for (const absl::Time latest = absl::Now() + absl::Seconds(30); absl::Now() < latest;) {
    std::ifstream file(path);
    if (file.good()) return std::string(std::istreambuf_iterator<char>(file), {});
    absl::SleepFor(absl::Milliseconds(1));
  }
  return "";
}

TEST(DumpFlightOnSignalTest, WritesTheRecordOfEachGroupAndGoesOn) {
  auto group = CreateLocalGroup(2);
  ASSERT_TRUE(group.ok()) << group.status();
  for (int round = 0; round < 3; ++round) {
    const std::string folder = absl::StrCat(testing::TempDir(), "/round", round);
    ASSERT_EQ(mkdir(folder.c_str(), 0755), 0);
    ASSERT_TRUE(DumpFlightOnSignal(SIGUSR1, folder).ok());
    kill(getpid(), SIGUSR1);
    for (int rank = 0; rank < 2; ++rank) {
      const auto json =
          nlohmann::json::parse(Await(absl::StrCat(folder, "/world.rank", rank, ".json")));
      EXPECT_EQ(json["rank"], rank);
      EXPECT_EQ(json["status"]["code"], "OK");
    }
  }
}

TEST(DumpFlightOnSignalTest, RefusesWhatCanNotBeCaught) {
  for (int signal : {SIGKILL, SIGSTOP, 0, 4000}) {
    EXPECT_TRUE(absl::IsInvalidArgument(DumpFlightOnSignal(signal, "/tmp"))) << signal;
  }
}

}  // namespace
}  // namespace evenkeel
