// Runs the program as people run it.

#include <sys/wait.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace evenkeel {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;
using testing::StartsWith;

std::string TempPath(absl::string_view name) { return absl::StrCat(testing::TempDir(), "/", name); }

void WriteFile(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string ReadFile(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

struct Result {
  int exit_code = -1;
  std::string out;
  std::string error;
};

Result RunPlan(const std::string& args, const std::string& input,
               const std::string& out = TempPath("out")) {
  WriteFile(TempPath("input"), input);
  const std::string command = absl::StrCat("tools/plan ", args, " <'", TempPath("input"), "' >'",
                                           out, "' 2>'", TempPath("error"), "'");
  const int status = std::system(command.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, ReadFile(out), ReadFile(TempPath("error"))};
}

// One sentence on standard error and nothing else.
void ExpectRefused(const Result& result, const std::string& message) {
  EXPECT_GT(result.exit_code, 0);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.error, StartsWith("plan: "));
  EXPECT_THAT(result.error, HasSubstr(message));
  EXPECT_EQ(result.error.find('\n'), result.error.size() - 1) << result.error;
  EXPECT_LT(result.error.size(), 300u);
}

constexpr char kTwoParams[] =
    R"({"params":[{"numel":100,"dtype":"float32"},{"numel":50,"dtype":"float32"}],)";

TEST(PlanToolTest, PlansWhatStandardInputHolds) {
  const Result result = RunPlan("", absl::StrCat(kTwoParams, R"("caps":[400]})"));
  EXPECT_EQ(result.out, "{\"buckets\":[[0],[1]],\"limits\":[400,400]}\n");
  EXPECT_EQ(result.error, "");
  EXPECT_EQ(result.exit_code, 0);
}

TEST(PlanToolTest, PlansWhatAFileHolds) {
  WriteFile(TempPath("model.json"), absl::StrCat(kTwoParams, R"("caps":[1000]})"));
  const std::string expected = "{\"buckets\":[[0,1]],\"limits\":[1000]}\n";
  EXPECT_EQ(RunPlan(TempPath("model.json"), "").out, expected);
  EXPECT_EQ(RunPlan("-", ReadFile(TempPath("model.json"))).out, expected);

  // As under `bazel run`.
  setenv("BUILD_WORKING_DIRECTORY", testing::TempDir().c_str(), 1);
  EXPECT_EQ(RunPlan("model.json", "").out, expected);
  unsetenv("BUILD_WORKING_DIRECTORY");
}

TEST(PlanToolTest, TheWholeFormIsRead) {
  const std::string params = R"({"params":[
      {"name":"embedding","numel":10,"dtype":"float32","device":"cpu","sparse":true},
      {"name":"w","numel":100,"dtype":"bfloat16","device":"cuda:0","sparse":false},
      {"name":"x","numel":100,"dtype":"bfloat16","device":"cuda:1"},
      {"name":"b","numel":100,"dtype":"bfloat16","device":"cuda:0"}],
      "caps":[300,0], "order":)";
  EXPECT_EQ(RunPlan("", params + "[]}").out,
            "{\"buckets\":[[0],[1,3],[2]],\"limits\":[0,300,300]}\n");
  EXPECT_EQ(RunPlan("", params + "[3,2,1,0]}").out,
            "{\"buckets\":[[3,1],[0],[2]],\"limits\":[300,0,300]}\n");
  EXPECT_EQ(RunPlan("", params + "[\"b\",\"x\",1,\"embedding\"]}").out,
            "{\"buckets\":[[3,1],[0],[2]],\"limits\":[300,0,300]}\n");
  EXPECT_EQ(RunPlan("", params + "[2]}").out, "{\"buckets\":[[2]],\"limits\":[300]}\n");
}

TEST(PlanToolTest, HelpExplainsTheInput) {
  const Result result = RunPlan("--help", "");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, HasSubstr("\"params\""));
  EXPECT_EQ(result.error, "");
}

Json ToInput(const Json& recorded) {
  const auto indices = recorded["tensor_indices"].get<std::vector<size_t>>();
  Json params = Json::array();
  for (size_t i = 0; i < recorded["numel"].size(); ++i) {
    const size_t index = indices.empty() ? i : indices[i];
    params[index] = {{"name", absl::StrCat("p", index)},
                     {"numel", recorded["numel"][i]},
                     {"dtype", recorded["dtype"][i]},
                     {"device", recorded["device"][i]}};
    if (index < recorded["expect_sparse"].size())
      params[index]["sparse"] = recorded["expect_sparse"][index];
  }
  Json input = {{"params", params}, {"caps", recorded["limits"]}};
  if (!indices.empty()) input["order"] = indices;
  return input;
}

// Buckets with their limits, without their order: PyTorch leaves the last ones in any.
std::set<std::pair<Json, Json>> AsSet(const Json& plan) {
  std::set<std::pair<Json, Json>> buckets;
  for (size_t i = 0; i < plan["buckets"].size(); ++i)
    buckets.emplace(plan["buckets"][i], plan["limits"][i]);
  return buckets;
}

TEST(PlanToolTest, PrintsTheRecordedPlans) {
  const Json recorded =
      Json::parse(ReadFile("tests/testdata/plans/bucket_assignment.json"), nullptr, false);
  ASSERT_EQ(recorded["cases"].size(), 130u);
  for (const Json& c : recorded["cases"]) {
    SCOPED_TRACE(c.dump());
    const Result result = RunPlan("", ToInput(c).dump());
    ASSERT_EQ(result.exit_code, 0) << result.error;
    const Json expected = {{"buckets", c["buckets"]}, {"limits", c["per_bucket_limits"]}};
    if (c["tensor_indices"].empty()) {
      ASSERT_EQ(result.out, expected.dump() + "\n");
    } else {
      const Json plan = Json::parse(result.out, nullptr, false);
      ASSERT_FALSE(plan.is_discarded()) << result.out;
      ASSERT_EQ(AsSet(plan), AsSet(expected));
    }
  }
}

// An input with one parameter that has `fields`.
std::string WithParam(const std::string& fields) {
  return absl::StrCat(R"({"params":[{)", fields, R"(}],"caps":[400]})");
}

TEST(PlanToolTest, BadInputIsRefusedWithOneSentence) {
  const std::string two = kTwoParams;
  const std::string named =
      R"({"params":[{"name":"w","numel":1,"dtype":"int8"},{"name":"w","numel":1,"dtype":"int8"}],"caps":[4],"order":)";
  struct Case {
    std::string input;
    std::string message;
  };
  const Case cases[] = {
      {"", "the input is empty"},
      {" \n", "the input is empty"},
      {R"({"params":[)", "ends before its JSON is complete"},
      {"{\n  \"params\": [,]}", "line 2, column 14"},
      {two + R"("caps":[400]} trailing)", "is not JSON at "},
      {"\xff\xfe binary \x01", "is not JSON at "},
      {two + R"("caps":[400]})" + std::string(1, '\0'), "NUL byte"},
      {"{\"caps\":[4],\"caps\":[4]}", "\"caps\" appears twice"},
      {WithParam(R"("numel":1,"numel":2,"dtype":"int8")"), "\"numel\" appears twice"},
      {"[]", "the input is a list of 0, not an object"},
      {"17", "the input is 17"},
      {"{}", "has no \"params\""},
      {R"({"params":[]})", "has no \"caps\""},
      {R"({"params":[],"caps":[1]})", "a list of 0, not a list of one or more parameters"},
      {R"({"params":{"numel":1},"caps":[1]})", "\"params\" is an object"},
      {R"({"params":[7],"caps":[1]})", "params[0] is 7"},
      {two + R"("caps":[]})", "\"caps\" is a list of 0"},
      {two + R"("caps":400})", "\"caps\" is 400"},
      {two + R"("caps":[400,-1]})", "caps[1] is -1, not a whole number"},
      {two + R"("caps":["1M"]})", "caps[0] is \"1M\""},
      {two + R"("caps":[9223372036854775808]})", "caps[0] is 9223372036854775808"},
      {two + R"("caps":[400],"limits":[1]})", "unknown key \"limits\""},
      {two + R"("caps":[400],"a\nb":[1]})", "unknown key \"a\\nb\""},
      {WithParam(R"("dtype":"float32")"), "params[0] has no \"numel\""},
      {WithParam(R"("numel":1)"), "params[0] has no \"dtype\""},
      {WithParam(R"("numel":1,"dtype":"float32","shape":[1])"),
       "params[0] has an unknown key \"shape\""},
      {WithParam(R"("numel":-1,"dtype":"float32")"), "params[0].numel is -1"},
      {WithParam(R"("numel":1.5,"dtype":"float32")"), "params[0].numel is 1.5"},
      {WithParam(R"("numel":"1","dtype":"float32")"), "params[0].numel is \"1\""},
      {WithParam(R"("numel":true,"dtype":"float32")"), "params[0].numel is true"},
      {WithParam(R"("numel":null,"dtype":"float32")"), "params[0].numel is null"},
      {WithParam(R"("numel":100000000000000000000,"dtype":"float32")"), "params[0].numel is 1e+20"},
      {WithParam(R"("numel":1e999,"dtype":"float32")"), "the number \"1e999\" is too large"},
      {WithParam(R"("numel":9223372036854775807,"dtype":"float32")"),
       "more bytes than 63 bits can count"},
      {WithParam(R"("numel":1,"dtype":"flaot32")"),
       "params[0].dtype is \"flaot32\", not one of float32"},
      {WithParam(R"("numel":1,"dtype":32)"), "params[0].dtype is 32"},
      {WithParam(R"("numel":1,"dtype":")" + std::string(100000, 'x') + "\""),
       "params[0].dtype is \"xxx"},
      {WithParam(R"("numel":1,"dtype":"int8","device":7)"), "params[0].device is 7"},
      {WithParam(R"("numel":1,"dtype":"int8","device":"")"), "params[0].device is \"\""},
      {WithParam(R"("numel":1,"dtype":"int8","device":"cuda:")"), "params[0].device is \"cuda:\""},
      {WithParam(R"("numel":1,"dtype":"int8","sparse":1)"), "params[0].sparse is 1"},
      {WithParam(R"("numel":1,"dtype":"int8","name":1)"), "params[0].name is 1"},
      {two + R"("caps":[400],"order":[0,0]})", "names parameter 0 twice"},
      {two + R"("caps":[400],"order":[0,2]})",
       "order[1] is 2, not a parameter's index from 0 to 1"},
      {two + R"("caps":[400],"order":[-1]})", "order[0] is -1"},
      {two + R"("caps":[400],"order":[4294967296]})", "order[0] is 4294967296"},
      {two + R"("caps":[400],"order":[0.0]})", "order[0] is 0.0"},
      {two + R"("caps":[400],"order":0})", "\"order\" is 0"},
      {two + R"("caps":[400],"order":["w"]})", "order[0] is \"w\", not the name"},
      {named + R"(["w"]})", "the name of parameters 0 and 1"},
      {std::string(100000, '['), "nested too deeply"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.input.substr(0, 200));
    ExpectRefused(RunPlan("", c.input), c.message);
  }
}

TEST(PlanToolTest, BadArgumentsAndFilesAreRefusedWithOneSentence) {
  ExpectRefused(RunPlan("/no/such/file", ""), "/no/such/file: cannot be opened: No such file");
  ExpectRefused(RunPlan(testing::TempDir(), ""), "cannot be read: Is a directory");
  ExpectRefused(RunPlan("--caps=3", ""), "no flag except --help");
  ExpectRefused(RunPlan("one two", ""), "expects at most one file");
}

TEST(PlanToolTest, AnOutputThatCannotBeWrittenIsAnError) {
  const std::string command =
      absl::StrCat("tools/plan --help >/dev/full 2>'", TempPath("error"), "'");
  const int status = std::system(command.c_str());
  EXPECT_NE(status, 0);
  EXPECT_THAT(ReadFile(TempPath("error")),
              HasSubstr("cannot write the output: No space left on device"));
}

}  // namespace
}  // namespace evenkeel
