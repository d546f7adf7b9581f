// Ranks on several hosts, which are network namespaces: they find out who shares memory with whom,
// and a rank or a host that is lost is named by all others.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/tests/training/program.h"

namespace evenkeel {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

constexpr char kHosts[] = "tests/hosts/hosts.sh";
constexpr char kRank[] = "tests/hosts/rank";
constexpr int kNoNamespaces = 77;
constexpr int kAtOnceMillis = 5000;
constexpr int kSilenceMillis = 3000;  // Until a rank that does not beat counts as lost: rank.cc.

struct Said {
  int64_t unix_millis = 0;
  std::string text;
};

// By rank, what it has said.
std::map<int, std::vector<Said>> Words(const std::string& out) {
  std::map<int, std::vector<Said>> words;
  for (const std::string& line : Lines(out)) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(' ', 3));
    int rank = 0;
    Said said;
    if (parts.size() != 4 || !absl::SimpleAtoi(parts[0], &said.unix_millis) ||
        !absl::SimpleAtoi(parts[2], &rank)) {
      ADD_FAILURE() << "not from a rank: " << line;
      continue;
    }
    said.text = parts[3];
    words[rank].push_back(said);
  }
  return words;
}

struct Case {
  const char* name;
  int hosts, per_host;
  std::vector<int> victims;
  const char* how;
  const char* backend;
};

class HostsTest : public testing::TestWithParam<Case> {};

TEST_P(HostsTest, EndsAsItShould) {
  const Case& one = GetParam();
  std::string victims;
  for (int victim : one.victims) absl::StrAppend(&victims, victims.empty() ? "" : ",", victim);
  const Ended ended =
      evenkeel::Run({kHosts, absl::StrCat(one.hosts), absl::StrCat(one.per_host), "none", kRank,
                     "lose", victims.empty() ? "-" : victims, one.how});
  if (ended.code == kNoNamespaces) GTEST_SKIP() << ended.out;
  ASSERT_FALSE(ended.timed_out) << ended.out << ended.err;
  const int ranks = one.hosts * one.per_host;
  const auto words = Words(ended.out);
  ASSERT_EQ(words.size(), ranks) << ended.out << ended.err;
  int64_t lost = 0;
  for (int victim : one.victims) {
    ASSERT_EQ(words.at(victim).size(), 2) << ended.out;
    lost = std::max(lost, words.at(victim).back().unix_millis);
  }
  for (const auto& [rank, said] : words) {
    EXPECT_EQ(said.front().text, absl::StrCat("is on ", one.backend)) << ended.out;
    if (std::count(one.victims.begin(), one.victims.end(), rank) > 0) continue;
    if (one.victims.empty()) {
      EXPECT_EQ(said.back().text, "ends: OK") << ended.out;
      continue;
    }
    testing::Matcher<std::string> names = HasSubstr(absl::StrCat("rank ", one.victims.front()));
    for (int victim : one.victims) names = AnyOf(names, HasSubstr(absl::StrCat("rank ", victim)));
    EXPECT_THAT(said.back().text, HasSubstr("ends: UNAVAILABLE")) << ended.out;
    EXPECT_THAT(said.back().text, names) << ended.out;
    const int limit =
        std::string(one.how) == "stop" ? kSilenceMillis + kAtOnceMillis : kAtOnceMillis;
    EXPECT_LT(said.back().unix_millis - lost, limit) << ended.out;
  }
}

INSTANTIATE_TEST_SUITE_P(
    , HostsTest,
    testing::Values(Case{"AllIsWell", 2, 2, {}, "kill", "hierarchical"},
                    Case{"ARankOfAHost", 2, 2, {3}, "kill", "hierarchical"},
                    Case{"TheLeaderOfAHost", 2, 2, {2}, "kill", "hierarchical"},
                    Case{"AWholeHost", 2, 2, {2, 3}, "kill", "hierarchical"},
                    Case{"ARankThatStops", 2, 2, {3}, "stop", "hierarchical"},
                    Case{"ALeaderThatStops", 2, 2, {2}, "stop", "hierarchical"},
                    Case{"OneRankPerHost", 3, 1, {2}, "kill", "tcp"},
                    Case{"OneHost", 1, 3, {1}, "kill", "shm"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace evenkeel
