#include "evenkeel/comm/flight_dump.h"

#include <sys/stat.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/flight_recorder.h"
#include "evenkeel/comm/types.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace evenkeel {
namespace {

FlightHeader Header() {
  return {.group = "world",
          .rank = 3,
          .world_size = 4,
          .backend = "tcp",
          .time = absl::FromUnixMicros(1795183506123456),
          .status = absl::UnavailableError("rank 1 is lost"),
          .waits = {"#412 barrier (user)"},
          .channels = {{.id = 0xab, .name = "user", .position = 413}}};
}

FlightEntry Bucket() {
  return {.number = 812,
          .channel = 0xab,
          .sequence = 412,
          .what = {.kind = CollectiveKind::kAllReduce,
                   .count = 1048576,
                   .role = Role::kBucket,
                   .index = 2,
                   .index_count = 5},
          .issued = absl::FromUnixMicros(1795183506000001)};
}

TEST(FlightJsonTest, SaysWhatTheHeaderAndTheEntriesSay) {
  FlightEntry ended = Bucket(), failed = Bucket();
  ended.ended = absl::FromUnixMicros(1795183506000009);
  failed.ended = ended.ended;
  failed.code = absl::StatusCode::kUnavailable;
  const auto json = nlohmann::json::parse(FlightJson(Header(), {Bucket(), ended, failed}));
  EXPECT_EQ(json["version"], 1);
  EXPECT_EQ(json["group"], "world");
  EXPECT_EQ(json["rank"], 3);
  EXPECT_EQ(json["world_size"], 4);
  EXPECT_EQ(json["backend"], "tcp");
  EXPECT_EQ(json["time"], "2026-11-20T14:05:06.123456Z");
  EXPECT_EQ(json["status"]["code"], "UNAVAILABLE");
  EXPECT_EQ(json["status"]["message"], "rank 1 is lost");
  EXPECT_EQ(json["waits"], nlohmann::json({"#412 barrier (user)"}));
  EXPECT_EQ(json["channels"][0]["id"], "00000000000000ab");
  EXPECT_EQ(json["channels"][0]["name"], "user");
  EXPECT_EQ(json["channels"][0]["position"], 413);
  ASSERT_EQ(json["entries"].size(), 3u);
  const auto& entry = json["entries"][0];
  EXPECT_EQ(entry["number"], 812);
  EXPECT_EQ(entry["channel"], "00000000000000ab");
  EXPECT_EQ(entry["sequence"], 412);
  EXPECT_EQ(entry["kind"], "all_reduce");
  EXPECT_EQ(entry["dtype"], "float32");
  EXPECT_EQ(entry["count"], 1048576);
  EXPECT_EQ(entry["op"], "sum");
  EXPECT_EQ(entry["root"], -1);
  EXPECT_EQ(entry["role"], "bucket");
  EXPECT_EQ(entry["index"], 2);
  EXPECT_EQ(entry["index_count"], 5);
  EXPECT_EQ(entry["text"], "all_reduce bucket 2/5 float32[1048576] sum");
  EXPECT_EQ(entry["hash"].get<std::string>().size(), 16u);
  EXPECT_EQ(entry["issued_us"], 1795183506000001);
  EXPECT_TRUE(entry["ended_us"].is_null());
  EXPECT_EQ(entry["state"], "open");
  EXPECT_EQ(entry["code"], "OK");
  EXPECT_EQ(json["entries"][1]["state"], "done");
  EXPECT_EQ(json["entries"][1]["ended_us"], 1795183506000009);
  EXPECT_EQ(json["entries"][2]["state"], "failed");
  EXPECT_EQ(json["entries"][2]["code"], "UNAVAILABLE");
}

TEST(FlightJsonTest, IsJsonWithNothingInIt) {
  const auto json = nlohmann::json::parse(FlightJson({}, {}));
  EXPECT_TRUE(json["waits"].empty());
  EXPECT_TRUE(json["channels"].empty());
  EXPECT_TRUE(json["entries"].empty());
  EXPECT_EQ(json["status"]["code"], "OK");
}

TEST(FlightJsonTest, CarriesAnyTextAndMakesUtf8OfAnyBytes) {
  for (const std::string& good :
       {std::string("a \"quoted\" \\ word\n\t\x01\x7f"), std::string("\0", 1),
        std::string("\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80"), std::string()}) {
    FlightHeader header;
    header.group = good;
    EXPECT_EQ(nlohmann::json::parse(FlightJson(header, {}))["group"], good);
  }
  struct Case {
    std::string bytes, text;
  };
  const std::string mark = "\xef\xbf\xbd";
  for (const Case& bad : {Case{"a\xff"
                               "b",
                               "a" + mark + "b"},
                          Case{"\xc3", mark}, Case{"\xe2\x82", mark + mark},
                          Case{"\xc0\x80", mark + mark}, Case{"\xed\xa0\x80", mark + mark + mark},
                          Case{"\xf4\x90\x80\x80", mark + mark + mark + mark},
                          Case{"\xe0\x80\x80", mark + mark + mark},
                          Case{"\xf0\x80\x80\x80", mark + mark + mark + mark}}) {
    FlightHeader header;
    header.status = absl::InternalError(bad.bytes);
    EXPECT_EQ(nlohmann::json::parse(FlightJson(header, {}))["status"]["message"], bad.text);
  }
}

TEST(WriteFlightTest, ReplacesTheFileAsAWhole) {
  const std::string path = absl::StrCat(testing::TempDir(), "/flight.json");
  ASSERT_TRUE(WriteFlight(path, "first, and longer").ok());
  ASSERT_TRUE(WriteFlight(path, "second").ok());
  std::ifstream file(path);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), "second");
}

TEST(WriteFlightTest, NamesThePathItCanNotWrite) {
  const std::string path = absl::StrCat(testing::TempDir(), "/no such folder/flight.json");
  const absl::Status status = WriteFlight(path, "x");
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr(path));

  const std::string folder = absl::StrCat(testing::TempDir(), "/a folder");
  ASSERT_EQ(mkdir(folder.c_str(), 0755), 0);
  EXPECT_FALSE(WriteFlight(folder, "x").ok());
}

}  // namespace
}  // namespace evenkeel
