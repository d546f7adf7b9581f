#include "evenkeel/tools/flight_account.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/flight_dump.h"
#include "evenkeel/comm/flight_recorder.h"
#include "evenkeel/comm/testing/fuzz.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace evenkeel {
namespace {

using Json = nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

constexpr int64_t kNow = 1'795'000'000'000'000;  // Microseconds since 1970.
constexpr char kNowText[] = "2026-11-18T11:06:40.000000Z";

// A collective of the channel "user" that was issued `before_us` before the record.
Json EntryOf(int64_t sequence, const std::string& text, int64_t before_us = 1'000'000,
             const std::string& state = "done") {
  const std::string kind = text.substr(0, text.find(' '));
  return {{"number", sequence},
          {"channel", "c1"},
          {"sequence", sequence},
          {"kind", kind},
          {"dtype", "float32"},
          {"count", 4},
          {"op", "sum"},
          {"root", -1},
          {"role", "user"},
          {"index", -1},
          {"index_count", 0},
          {"text", text},
          {"hash", absl::StrCat("h-", text)},
          {"issued_us", kNow - before_us},
          {"ended_us", state == "open" ? Json() : Json(kNow - before_us + 1000)},
          {"state", state},
          {"code", state == "failed" ? "UNAVAILABLE" : "OK"}};
}

Json DumpOf(int rank, int world_size, const std::vector<Json>& entries, int64_t position) {
  return {{"version", 1},
          {"group", "world"},
          {"rank", rank},
          {"world_size", world_size},
          {"backend", "tcp"},
          {"time", kNowText},
          {"status", {{"code", "OK"}, {"message", ""}}},
          {"waits", Json::array()},
          {"channels", {{{"id", "c1"}, {"name", "user"}, {"position", position}}}},
          {"entries", entries}};
}

FlightDump Read(const Json& json) {
  absl::StatusOr<FlightDump> dump = ReadFlightDump(json.dump());
  EXPECT_TRUE(dump.ok()) << dump.status();
  return dump.ok() ? *std::move(dump) : FlightDump();
}

// The one group that they make.
GroupAccount AccountOf(const std::vector<Json>& dumps) {
  std::vector<FlightDump> read;
  for (const Json& dump : dumps) read.push_back(Read(dump));
  std::vector<GroupAccount> accounts = AccountFor(std::move(read));
  EXPECT_THAT(accounts, SizeIs(1));
  return accounts.at(0);
}

const char kSum[] = "all_reduce bucket 2/5 float32[4] sum";
const char kBarrier[] = "barrier (user)";

TEST(FlightAccountTest, RanksThatAgreeHaveNoDifference) {
  const std::vector<Json> entries = {EntryOf(0, kSum, 3'000'000), EntryOf(1, kBarrier, 2'000'000)};
  const GroupAccount account = AccountOf({DumpOf(1, 2, entries, 2), DumpOf(0, 2, entries, 2)});
  EXPECT_EQ(account.world_size, 2);
  EXPECT_THAT(account.missing, IsEmpty());
  ASSERT_THAT(account.channels, SizeIs(1));
  EXPECT_EQ(account.channels[0].name, "user");
  EXPECT_EQ(account.channels[0].differs_at, -1);
  EXPECT_EQ(account.channels[0].places.at(1).position, 2);
  EXPECT_EQ(account.channels[0].places.at(1).last_finished->sequence, 1);
  EXPECT_THAT(ToText(account),
              AllOf(HasSubstr("records of 2 of 2 ranks"), HasSubstr("no difference"),
                    HasSubstr("ranks 0,1: 2 issued; last ended #1 barrier (user), 2 s before"),
                    Not(HasSubstr("MISSING")), Not(HasSubstr("failed"))));
}

TEST(FlightAccountTest, ARankThatIsBehindIsNamed) {
  const Json before = EntryOf(411, kSum, 9'000'000),
             here = EntryOf(412, kBarrier, 5'000'000, "open");
  const GroupAccount account =
      AccountOf({DumpOf(0, 3, {before, here}, 413), DumpOf(1, 3, {before}, 412),
                 DumpOf(2, 3, {before, EntryOf(412, kBarrier, 4'500'000, "open")}, 413)});
  const ChannelAccount& channel = account.channels.at(0);
  EXPECT_EQ(channel.differs_at, 412);
  EXPECT_FALSE(channel.is_contradiction);
  ASSERT_THAT(channel.sides, SizeIs(2));
  EXPECT_THAT(channel.sides[0].ranks, ElementsAre(0, 2));
  EXPECT_EQ(channel.sides[0].text, kBarrier);
  EXPECT_NEAR(channel.sides[0].issued_after, 0.5, 1e-9);
  EXPECT_THAT(channel.sides[1].ranks, ElementsAre(1));
  EXPECT_EQ(channel.sides[1].text, "");
  EXPECT_THAT(
      ToText(account),
      AllOf(HasSubstr("channel user: rank 1 has not reached #412"),
            HasSubstr("> ranks 0,2: barrier (user), open for 5 s, issued 0.5 s after the first"),
            HasSubstr("rank 0: 413 issued; last ended #411"),
            HasSubstr("open #412 barrier (user) for 5 s")));
}

TEST(FlightAccountTest, DifferentCollectivesAtOnePlaceAreADisagreement) {
  const Json same = EntryOf(7, kSum);
  const GroupAccount account = AccountOf(
      {DumpOf(0, 4, {same, EntryOf(8, kSum, 2'000'000, "open")}, 9),
       DumpOf(1, 4, {same, EntryOf(8, kBarrier, 1'000'000, "open")}, 9),
       DumpOf(2, 4, {same, EntryOf(8, kSum, 2'000'000, "open")}, 9), DumpOf(3, 4, {same}, 8)});
  const ChannelAccount& channel = account.channels.at(0);
  EXPECT_EQ(channel.differs_at, 8);
  EXPECT_TRUE(channel.is_contradiction);
  ASSERT_THAT(channel.sides, SizeIs(3));
  EXPECT_THAT(channel.sides[0].ranks, ElementsAre(0, 2));
  EXPECT_THAT(channel.sides[1].ranks, ElementsAre(1));
  EXPECT_THAT(channel.sides[2].ranks, ElementsAre(3));
  EXPECT_THAT(
      ToText(account),
      AllOf(HasSubstr("THE RANKS DISAGREE at #8"), HasSubstr("> ranks 0,2: all_reduce bucket 2/5"),
            HasSubstr("> rank 1: barrier (user)"), HasSubstr("> rank 3 has not reached it")));
}

// Entries that one rank's ring no longer holds are no difference; nor are those that only a missing
// rank could have.
TEST(FlightAccountTest, ForgottenPlacesAreNoDifference) {
  const GroupAccount account = AccountOf(
      {DumpOf(0, 2, {EntryOf(3, kSum), EntryOf(4, kSum)}, 5), DumpOf(1, 2, {EntryOf(4, kSum)}, 5)});
  EXPECT_EQ(account.channels.at(0).differs_at, -1);
}

TEST(FlightAccountTest, MissingRanksAreNamed) {
  std::vector<Json> dumps;
  for (const int rank : {0, 1, 4, 9}) dumps.push_back(DumpOf(rank, 12, {EntryOf(0, kSum)}, 1));
  const GroupAccount account = AccountOf(dumps);
  EXPECT_THAT(account.missing, ElementsAre(2, 3, 5, 6, 7, 8, 10, 11));
  EXPECT_THAT(ToText(account), HasSubstr("records of 4 of 12 ranks; MISSING: ranks 2,3,5-8,10,11"));
  EXPECT_EQ(account.channels.at(0).differs_at, -1);
}

TEST(FlightAccountTest, FailuresAndStatesAreSaid) {
  Json dump = DumpOf(
      1, 2, {EntryOf(5, kSum, 6'000'000, "failed"), EntryOf(6, kBarrier, 1'000'000, "open")}, 7);
  dump["status"] = {{"code", "UNAVAILABLE"}, {"message", "rank 0 of 2 is lost"}};
  dump["waits"] = {"#6 barrier (user)"};
  EXPECT_THAT(
      ToText(AccountOf({dump})),
      AllOf(HasSubstr("rank 1: UNAVAILABLE: rank 0 of 2 is lost"),
            HasSubstr("waits for #6 barrier (user)"),
            HasSubstr(
                "rank 1 user #5 all_reduce bucket 2/5 float32[4] sum: UNAVAILABLE after 0.001 s")));
}

// Places of messages count within a pair of ranks, so they can't be compared.
TEST(FlightAccountTest, MessagesAreShownAndNotCompared) {
  const GroupAccount account =
      AccountOf({DumpOf(0, 2, {EntryOf(0, "send float32[4] root 1", 2'000'000, "open")}, 0),
                 DumpOf(1, 2, {}, 0)});
  EXPECT_EQ(account.channels.at(0).differs_at, -1);
  EXPECT_THAT(ToText(account), HasSubstr("open #0 send float32[4] root 1 for 2 s"));
}

TEST(FlightAccountTest, TheLatestRecordOfARankCounts) {
  Json older = DumpOf(0, 2, {}, 3), newer = DumpOf(0, 2, {}, 4);
  older["time"] = "2026-11-18T11:06:39Z";
  for (const auto& [first, second] : {std::pair(older, newer), std::pair(newer, older)}) {
    const GroupAccount account = AccountOf({first, second});
    EXPECT_EQ(account.channels.at(0).places.at(0).position, 4);
    EXPECT_THAT(account.notes, ElementsAre(HasSubstr("two records of rank 0")));
  }
}

TEST(FlightAccountTest, GroupsAreKeptApart) {
  Json other = DumpOf(0, 1, {}, 0);
  other["group"] = "second";
  const std::vector<GroupAccount> accounts = AccountFor({Read(other), Read(DumpOf(0, 2, {}, 0))});
  ASSERT_THAT(accounts, SizeIs(2));
  EXPECT_EQ(accounts[0].group, "second");
  EXPECT_THAT(accounts[0].missing, IsEmpty());
  EXPECT_THAT(accounts[1].missing, ElementsAre(1));
}

TEST(FlightAccountTest, SaysTheSameAsData) {
  const Json same = EntryOf(7, kSum);
  const GroupAccount account =
      AccountOf({DumpOf(0, 3, {same, EntryOf(8, kSum, 2'000'000, "open")}, 9),
                 DumpOf(1, 3, {same, EntryOf(8, kBarrier, 1'000'000, "failed")}, 9)});
  const Json json = Json::parse(ToJson({account}, {{"x.json", "why"}}));
  const Json& group = json.at("groups").at(0);
  EXPECT_EQ(group.at("missing"), Json({2}));
  EXPECT_EQ(group.at("channels").at(0).at("difference").at("sequence"), 8);
  EXPECT_EQ(group.at("channels").at(0).at("difference").at("kind"), "different");
  EXPECT_EQ(group.at("channels").at(0).at("difference").at("sides").at(1).at("ranks"), Json({1}));
  EXPECT_EQ(group.at("channels").at(0).at("ranks").at(0).at("open").at(0).at("seconds"), 2.0);
  EXPECT_EQ(group.at("channels").at(0).at("ranks").at(0).at("last_finished").at("sequence"), 7);
  EXPECT_EQ(group.at("failed").at(0).at("rank"), 1);
  EXPECT_EQ(json.at("refused").at(0).at("file"), "x.json");
}

TEST(ReadFlightDumpTest, RefusesWhatIsNoRecord) {
  const auto why = [](absl::string_view text) {
    const absl::Status status = ReadFlightDump(text).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << text << ": " << status;
    EXPECT_LT(status.message().size(), 200u);
    return std::string(status.message());
  };
  EXPECT_THAT(why(""), HasSubstr("the input is empty"));
  EXPECT_THAT(why("{\"version\":1,"), HasSubstr("the input ends before its JSON is complete"));
  EXPECT_THAT(why("\xff\xfe garbage"), HasSubstr("the input is not JSON at line 1, column 1"));
  EXPECT_THAT(why(std::string("{}\0", 3)), HasSubstr("NUL byte"));
  // To copy the parsed value would exhaust the stack.
  EXPECT_THAT(why(std::string(200'000, '[') + std::string(200'000, ']')),
              HasSubstr("the input is nested too deeply; at most 16 levels"));
  EXPECT_THAT(why("[1]"), HasSubstr("is a list of 1, not an object"));
  EXPECT_THAT(why("{}"), HasSubstr("the field \"version\" is missing"));
  const auto changed = [&](const char* path, const Json& value) {
    Json dump = DumpOf(0, 2, {EntryOf(0, kSum)}, 1);
    dump[Json::json_pointer(path)] = value;
    return why(dump.dump());
  };
  EXPECT_THAT(changed("/version", 2), HasSubstr("version 2"));
  EXPECT_THAT(changed("/rank", 2), HasSubstr("rank 2 is out of range for a group of 2"));
  EXPECT_THAT(changed("/rank", -1), HasSubstr("rank is -1"));
  EXPECT_THAT(changed("/world_size", 1.5), HasSubstr("world_size is 1.5"));
  EXPECT_THAT(changed("/group", 7), HasSubstr("group is 7"));
  EXPECT_THAT(changed("/time", "yesterday"), HasSubstr("time is \"yesterday\""));
  EXPECT_THAT(changed("/status", "OK"), HasSubstr("status is \"OK\", not an object"));
  EXPECT_THAT(changed("/waits", Json{1}), HasSubstr("waits is 1"));
  EXPECT_THAT(changed("/channels/0/position", "x"), HasSubstr("channels[0].position is \"x\""));
  EXPECT_THAT(changed("/entries/0/sequence", 18446744073709551615u),
              HasSubstr("entries[0].sequence is 1844"));
  EXPECT_THAT(changed("/entries/0/state", "gone"), HasSubstr("entries[0].state is \"gone\""));
  EXPECT_THAT(changed("/entries/0/ended_us", nullptr), HasSubstr("entries[0].ended_us"));
  Json dump = DumpOf(0, 2, {EntryOf(0, kSum)}, 1);
  dump["entries"][0].erase("hash");
  EXPECT_THAT(why(dump.dump()), HasSubstr("the field \"entries[0].hash\" is missing"));
  dump = DumpOf(0, 2, {}, 1);
  dump["from_the_future"] = true;
  EXPECT_TRUE(ReadFlightDump(dump.dump()).ok());
}

// The reader accepts the ranks' output.
TEST(ReadFlightDumpTest, ReadsWhatRanksWrite) {
  const FlightHeader header{.group = "world",
                            .rank = 3,
                            .world_size = 4,
                            .backend = "tcp",
                            .time = absl::FromUnixMicros(kNow),
                            .status = absl::UnavailableError("rank 1 of 4 is lost"),
                            .waits = {"#413 barrier (user)"},
                            .channels = {{.id = 0xc5, .name = "user \"1\"", .position = 414}}};
  const Collective sum{
      .kind = CollectiveKind::kAllReduce, .count = 4, .role = Role::kBucket, .index = 2};
  const absl::Time issued = absl::FromUnixMicros(kNow - 2'000'000);
  const std::vector<FlightEntry> entries = {
      {.number = 811,
       .channel = 0xc5,
       .sequence = 412,
       .what = sum,
       .issued = issued,
       .ended = issued + absl::Seconds(1)},
      {.number = 812, .channel = 0xc5, .sequence = 413, .what = {}, .issued = issued}};
  const absl::StatusOr<FlightDump> dump = ReadFlightDump(FlightJson(header, entries));
  ASSERT_TRUE(dump.ok()) << dump.status();
  EXPECT_EQ(dump->rank, 3);
  EXPECT_EQ(dump->time, header.time);
  EXPECT_EQ(dump->code, "UNAVAILABLE");
  const std::string text = ToText(AccountFor({*dump}).at(0));
  EXPECT_THAT(
      text, AllOf(HasSubstr("MISSING: ranks 0,1,2"), HasSubstr("UNAVAILABLE: rank 1 of 4 is lost"),
                  HasSubstr("waits for #413 barrier (user)"), HasSubstr("channel user \"1\": ")));
  EXPECT_THAT(text,
              AllOf(HasSubstr("414 issued"),
                    HasSubstr(absl::StrCat("last ended #412 ", ToString(sum), ", 1 s")),
                    HasSubstr(absl::StrCat("open #413 ", ToString(Collective()), " for 2 s"))));
}

// Whatever is in a file, it is refused or can be told about.
TEST(ReadFlightDumpTest, NoBytesDoHarm) {
  const Json open = EntryOf(1, kBarrier, 5, "open"), failed = EntryOf(1, kSum, 5, "failed");
  const auto tell = [](absl::string_view bytes) -> absl::StatusOr<std::string> {
    absl::StatusOr<FlightDump> dump = ReadFlightDump(bytes);
    if (!dump.ok()) return dump.status();
    if (dump->world_size > 100) return absl::InvalidArgumentError("too long to tell");
    const std::vector<GroupAccount> accounts = AccountFor({*dump});
    EXPECT_FALSE(ToText(accounts.at(0)).empty());
    EXPECT_FALSE(ToJson(accounts, {}).empty());
    return std::string(bytes);
  };
  Fuzz({DumpOf(0, 2, {EntryOf(0, kSum), open}, 2).dump(),
        DumpOf(1, 2, {EntryOf(0, kSum), failed}, 2).dump()},
       tell, {.rounds = 5000, .memory_per_byte = 400});
}

}  // namespace
}  // namespace evenkeel
