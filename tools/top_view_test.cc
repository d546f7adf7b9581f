#include "evenkeel/tools/top_view.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;
using testing::StartsWith;

Json Rank(const char* phase = "forward") {
  return {{"state", "connected"},
          {"doing", "runs"},
          {"waited_ms", 0},
          {"waits_for", Json::array()},
          {"silent_ms", 100},
          {"steps",
           {{"step", 417},
            {"phase", phase},
            {"exhausted", false},
            {"waited_ms", 0},
            {"step_ms", 16.25},
            {"cost", 0.001},
            {"straggler", false},
            {"cost_phase", "input"},
            {"ms", {{"forward", 3.5}, {"waiting", 1.25}}},
            {"ready_ms", {{"first", 0.75}, {"last", 6.5}}}}}};
}

Json Waiting(std::vector<int> waits_for) {
  Json rank = Rank("backward");
  rank["waited_ms"] = 3210;
  rank["doing"] = "waits in step 417";
  rank["waits_for"] = waits_for;
  return rank;
}

Json Group(std::vector<Json> ranks) {
  return {{"group", "world"}, {"error", ""}, {"ranks", std::move(ranks)}};
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

TEST(FindingsTest, AGroupThatTrainsHasNone) {
  EXPECT_THAT(Findings(Group({Rank(), Rank("backward")})), IsEmpty());
}

TEST(FindingsTest, NamesTheRankThatTheOthersWaitFor) {
  EXPECT_THAT(Findings(Group({Waiting({1}), Rank("input"), Waiting({0, 1})})),
              ElementsAre("ranks 0,2 have waited for 3.2 s for rank 1, which runs (input)"));
}

TEST(FindingsTest, RanksThatWaitForEachOtherAreAllNamed) {
  EXPECT_THAT(Findings(Group({Waiting({1}), Waiting({0})})),
              ElementsAre("ranks 0,1 have waited for 3.2 s for each other: waits in step 417"));
}

TEST(FindingsTest, PartiesThatWaitForEachOtherHaveALineEach) {
  Json joined = Waiting({0, 2});
  joined["doing"] = "waits in a join without more input";
  EXPECT_THAT(
      Findings(Group({Waiting({1}), joined, Waiting({1})})),
      ElementsAre("ranks 0,1,2 have waited for 3.2 s for each other",
                  "rank 1: waits in a join without more input", "ranks 0,2: waits in step 417"));
}

TEST(FindingsTest, WithoutAKnownCollectiveThoseThatDoNotWaitAreNamed) {
  Json waits = Rank("backward");
  waits["steps"]["waited_ms"] = 2000;
  EXPECT_THAT(Findings(Group({waits, Rank("input"), waits})),
              ElementsAre("ranks 0,2 have waited for 2.0 s for rank 1, which runs (input)"));
}

TEST(FindingsTest, AShortWaitIsNone) {
  Json waits = Waiting({1});
  waits["waited_ms"] = 400;
  EXPECT_THAT(Findings(Group({waits, Rank()})), IsEmpty());
}

TEST(FindingsTest, SilenceAnErrorAndAMissingRankComeFirst) {
  Json silent = Rank();
  silent["silent_ms"] = 4100;
  EXPECT_THAT(Findings(Group({Waiting({1}), silent})),
              ElementsAre("rank 1 has sent nothing for 4.1 s"));
  Json absent = {
      {"state", "not connected"}, {"doing", ""}, {"waited_ms", 0}, {"waits_for", Json::array()}};
  EXPECT_THAT(Findings(Group({Rank(), absent})), ElementsAre("rank 1 has not connected yet"));
  Json ended = Group({Rank(), Rank()});
  ended["error"] = "rank 1 was lost";
  EXPECT_THAT(Findings(ended), ElementsAre("the group has ended: rank 1 was lost"));
}

TEST(FindingsTest, StragglersAndExhaustedRanks) {
  Json slow = Rank();
  slow["steps"]["straggler"] = true;
  slow["steps"]["cost"] = 0.18;
  Json exhausted = Rank();
  exhausted["steps"]["exhausted"] = true;
  EXPECT_THAT(Findings(Group({slow, exhausted, exhausted})),
              ElementsAre("rank 0 costs the group 18 % of its time: input",
                          "ranks 1,2 have no more input"));
}

TEST(RenderStatusTest, HasALinePerRank) {
  const std::string text =
      RenderStatus(Json::array({Group({Rank(), Waiting({0})})}), "the store at 127.0.0.1:1", {});
  EXPECT_THAT(text, HasSubstr("world: 2 ranks, step 417, 16.25 ms a step\n"));
  EXPECT_THAT(text, HasSubstr("    0  runs          417 forward        1.25   0.1 %  runs\n"));
  EXPECT_THAT(text,
              HasSubstr("    1  waits         417 backward       1.25   0.1 %  waits in step"));
  EXPECT_THAT(RenderStatus(Json::array(), "the store", {}), HasSubstr("no rank is connected"));
}

TEST(RenderStatusTest, AWideScreenHasThePhasesAndTheBuckets) {
  const std::string text =
      RenderStatus(Json::array({Group({Rank()})}), "the store", {.columns = 200});
  EXPECT_THAT(text, HasSubstr("     input   forward  backward optimizer    saving 1st ready "
                              "all ready   waiting    cost  last report\n"));
  EXPECT_THAT(text, HasSubstr("         -      3.50         -         -         -      0.75      "
                              "6.50      1.25   0.1 %  runs\n"));
  const auto has = [](int columns, const char* column) {
    const std::string lines =
        RenderStatus(Json::array({Group({Rank()})}), "the store", {.columns = columns});
    return lines.find(column) != std::string::npos;
  };
  EXPECT_FALSE(has(129, "optimizer"));
  EXPECT_TRUE(has(130, "optimizer"));
  EXPECT_FALSE(has(149, "ready"));
  EXPECT_TRUE(has(150, "ready"));
  Json watched = Rank();  // PyTorch's buckets are not known.
  watched["steps"].erase("ready_ms");
  EXPECT_THAT(RenderStatus(Json::array({Group({watched})}), "the store", {.columns = 200}),
              Not(HasSubstr("ready")));
}

TEST(RenderStatusTest, RanksThatDifferInSamplesHaveAColumnOfThem) {
  Json slow = Rank(), fast = Rank();
  slow["steps"]["samples"] = 80;
  fast["steps"]["samples"] = 176.25;
  const auto text = [](std::vector<Json> ranks) {
    return RenderStatus(Json::array({Group(std::move(ranks))}), "the store", {});
  };
  EXPECT_THAT(text({fast, slow}), AllOf(HasSubstr("phase      samples   waiting    cost"),
                                        HasSubstr("forward      176.2      1.25   0.1 %"),
                                        HasSubstr("forward         80      1.25   0.1 %")));
  EXPECT_THAT(text({slow, slow}), Not(HasSubstr("samples")));
}

TEST(RenderStatusTest, GroupsShareTheScreen) {
  const Json groups = Json::array({Group(std::vector<Json>(64, Rank())), Group({Rank(), Rank()}),
                                   Group(std::vector<Json>(8, Rank()))});
  const std::vector<std::string> lines = Lines(RenderStatus(groups, "the store", {}));
  EXPECT_THAT(lines,
              testing::IsSupersetOf({StartsWith("world: 64 ranks"), StartsWith("world: 2 ranks"),
                                     StartsWith("world: 8 ranks")}));
  EXPECT_THAT(lines, SizeIs(23));
  EXPECT_THAT(lines, testing::Contains("and 58 other ranks"));
}

TEST(RenderStatusTest, AnySmallScreenIsEnough) {
  std::vector<Json> ranks;
  for (int rank = 0; rank < 64; ++rank) {
    ranks.push_back(Waiting({63 - rank}));
    ranks.back()["doing"] = absl::StrCat("waits in #", rank % 9);
  }
  for (const size_t groups : {1, 3, 12}) {
    const Json status = std::vector<Json>(groups, Group(ranks));
    for (const int rows : {1, 2, 4, 8, 13, 24}) {
      const std::vector<std::string> lines =
          Lines(RenderStatus(status, "the store", {.rows = rows}));
      // The server, and a line for each group.
      EXPECT_LE(lines.size(), std::max<size_t>(rows - 1, 1 + groups)) << groups << " " << rows;
      EXPECT_GE(lines.size(), 1 + groups);
    }
  }
}

TEST(RenderStatusTest, FitsTheScreenAndShowsTheCulpritFirst) {
  std::vector<Json> ranks(64, Waiting({50}));
  ranks[50] = Rank("saving");
  for (const int columns : {40, 80, 200}) {
    const std::vector<std::string> lines =
        Lines(RenderStatus(Json::array({Group(ranks)}), "the store", {.columns = columns}));
    EXPECT_THAT(lines, SizeIs(23));  // The cursor is in the last one.
    for (const std::string& line : lines)
      EXPECT_LE(line.size(), columns + (line.find("…") == std::string::npos ? 0 : 2)) << line;
    EXPECT_THAT(lines[4], HasSubstr("   50  runs          417 saving"));
    EXPECT_EQ(lines.back(), "and 46 other ranks");
  }
}

TEST(RenderStatusTest, ARanksTextDoesNotControlTheTerminal) {
  Json hostile = Rank();
  hostile["doing"] = "runs\033[2J\n\r\xc2\x9b";
  EXPECT_THAT(Lines(RenderStatus(Json::array({Group({hostile})}), "the store", {})),
              Each(AllOf(Not(HasSubstr("\033")), Not(HasSubstr("\xc2\x9b")))));
}

}  // namespace
}  // namespace evenkeel
