// Short campaigns of one backend, EVENKEEL_TEST_BACKEND: default tcp.

#include "evenkeel/tests/campaign/campaign.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/comm/testing/tested_group.h"

namespace evenkeel {
namespace {

CampaignOptions Short(const std::string& model) {
  return {.train = "trainer/train",
          .network = "tests/hosts/network.sh",
          .folder = testing::TempDir(),
          .model = model,
          .backend = std::string(BackendOfProcesses()),
          .runs = 1,
          .seed = static_cast<uint64_t>(testing::UnitTest::GetInstance()->random_seed()),
          .is_short = true};
}

void ExpectRight(const CampaignOptions& options, int kills) {
  const absl::StatusOr<CampaignResult> result = RunCampaign(options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->wrong, 0);
  EXPECT_EQ(result->hangs, 0);
  EXPECT_GE(result->kills, kills) << TableRow(options, *result);
}

class CampaignTest : public testing::TestWithParam<std::string> {};

TEST_P(CampaignTest, ReplacedRanksLeaveNoTrace) { ExpectRight(Short(GetParam()), /*kills=*/10); }

TEST_P(CampaignTest, RemainingRanksEndAsUndisturbedRunsOfTheSameRanks) {
  CampaignOptions options = Short(GetParam());
  options.play = CampaignOptions::Play::kContinue;
  ExpectRight(options, /*kills=*/1);
}

INSTANTIATE_TEST_SUITE_P(Models, CampaignTest, testing::Values("mlp", "cnn", "gpt"));

}  // namespace
}  // namespace evenkeel
