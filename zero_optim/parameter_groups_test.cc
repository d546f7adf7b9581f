#include "evenkeel/zero_optim/parameter_groups.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(ParameterGroupsTest, SayWhichRuleIsWhose) {
  const auto groups = ParameterGroups::Create(5, {{.name = "a", .params = {3, 0}, .rule = Sgd{}},
                                                  {.params = {1}, .rule = AdamW{}},
                                                  {.name = "nobody"}});
  ASSERT_TRUE(groups.ok()) << groups.status();
  EXPECT_EQ(groups->size(), 3);
  EXPECT_EQ((*groups)[1].name, "group1");
  EXPECT_EQ(groups->group_of(0), 0);
  EXPECT_EQ(groups->group_of(1), 1);
  EXPECT_EQ(groups->group_of(2), kNoGroup);
  EXPECT_FALSE(groups->contains(4));
  EXPECT_EQ(groups->rule_of(3), UpdateRule(Sgd{}));
  EXPECT_EQ(groups->rule_of(1), UpdateRule(AdamW{}));
  EXPECT_EQ(groups->Find("nobody"), 2);
  EXPECT_EQ(groups->Find("b"), -1);
}

TEST(ParameterGroupsTest, RefuseWhatIsWrongAndSayWhatItIs) {
  const struct {
    std::vector<ParameterGroup> groups;
    const char* says;
  } cases[] = {
      {{}, "without parameters"},
      {{{.name = "a"}, {.name = "b"}}, "without parameters"},
      {{{.name = "a", .params = {0}}, {.name = "a", .params = {1}}}, "two groups are named \"a\""},
      {{{.name = "a", .params = {0, 5}}}, "group \"a\": parameter 5 is not one of the 5"},
      {{{.name = "a", .params = {-1}}}, "group \"a\": parameter -1 is not one of the 5"},
      {{{.name = "a", .params = {2, 2}}}, "group \"a\": parameter 2 is named twice"},
      {{{.name = "a", .params = {0, 2}}, {.params = {2}}},
       "group \"group1\": parameter 2 is in group \"a\", too"},
      {{{.name = "a", .params = {0}, .rule = AdamW{.beta1 = 2}}}, "group \"a\": AdamW: beta1 is 2"},
  };
  for (const auto& wrong : cases) {
    const absl::Status status = ParameterGroups::Create(5, wrong.groups).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(wrong.says));
  }
}

TEST(ParameterGroupsTest, AGroupThatIsRefusedChangesNothing) {
  ParameterGroups groups(3);
  ASSERT_TRUE(groups.Add({.name = "a", .params = {0}}).ok());
  EXPECT_FALSE(groups.Add({.name = "b", .params = {1, 0}}).ok());
  EXPECT_EQ(groups.size(), 1);
  EXPECT_FALSE(groups.contains(1));
  EXPECT_TRUE(groups.Add({.name = "b", .params = {1}}).ok());
}

TEST(ParameterGroupsTest, TakeALearningRateForOneOrForAll) {
  auto groups = ParameterGroups::Create(2, {{.name = "a", .params = {0}, .rule = Sgd{}},
                                            {.name = "b", .params = {1}, .rule = AdamW{}}});
  ASSERT_TRUE(groups.ok());
  EXPECT_TRUE(groups->SetLearningRate(0.5).ok());
  EXPECT_TRUE(groups->SetLearningRate("b", 0.25).ok());
  EXPECT_EQ(LearningRate(groups->rule_of(0)), 0.5);
  EXPECT_EQ(LearningRate(groups->rule_of(1)), 0.25);

  EXPECT_TRUE(absl::IsInvalidArgument(groups->SetLearningRate(-1)));
  const absl::Status unknown = groups->SetLearningRate("c", 1);
  EXPECT_TRUE(absl::IsInvalidArgument(unknown));
  EXPECT_THAT(std::string(unknown.message()),
              HasSubstr("there is no group \"c\"; there are: a, b"));
  EXPECT_EQ(LearningRate(groups->rule_of(0)), 0.5);
}

TEST(ParameterGroupsTest, AdoptOnlyTheSameKindsOfRules) {
  auto groups = ParameterGroups::Create(2, {{.name = "a", .params = {0}, .rule = Sgd{}},
                                            {.name = "b", .params = {1}, .rule = AdamW{}}});
  ASSERT_TRUE(groups.ok());
  EXPECT_TRUE(groups->Adopt({Sgd{.learning_rate = 3}, AdamW{.beta1 = 0}}).ok());
  EXPECT_EQ(groups->rule_of(1), UpdateRule(AdamW{.beta1 = 0}));
  for (const std::vector<UpdateRule>& wrong : std::vector<std::vector<UpdateRule>>{
           {}, {Sgd{}}, {Sgd{.learning_rate = 7}, Adam{}}, {Sgd{.momentum = 0.9}, AdamW{}}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(groups->Adopt(wrong)));
    EXPECT_EQ(groups->rule_of(0), UpdateRule(Sgd{.learning_rate = 3}));
  }
}

TEST(SelectParamsTest, ChoosesByWhateverAParameterIs) {
  std::vector<float> memory(9);
  ParameterSet params;
  params.Add("fc.weight", TensorView(absl::MakeSpan(memory).first(6)));
  params.Add("fc.bias", TensorView(absl::MakeSpan(memory).last(3)));
  const auto is_bias = [](const Parameter& param) { return absl::EndsWith(param.name, ".bias"); };
  EXPECT_THAT(SelectParams(params, is_bias), ElementsAre(1));
  EXPECT_THAT(AllInOneGroup(params, Sgd{})[0].params, ElementsAre(0, 1));
}

}  // namespace
}  // namespace evenkeel
