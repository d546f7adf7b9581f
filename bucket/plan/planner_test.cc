#include "evenkeel/bucket/plan/planner.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/types.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace evenkeel {
namespace {

using Buckets = std::vector<std::vector<int>>;
using GroupKey = std::tuple<DType, Device::Kind, int>;

std::vector<Bytes> Caps(const std::vector<int64_t>& bytes) {
  std::vector<Bytes> caps;
  for (int64_t value : bytes) caps.push_back({value});
  return caps;
}

int64_t BytesOf(const ParamSpec& param) { return param.count * SizeOf(param.dtype); }
GroupKey KeyOf(const ParamSpec& param) {
  return {param.dtype, param.device.kind, param.device.index};
}

// The examples of PyTorch's own tests.

TEST(PlanBucketsTest, OneGroupOneCap) {
  const std::vector<ParamSpec> params(4, {.count = 100});
  const auto plan = PlanBuckets(params, {.caps = Caps({400})});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->buckets, (Buckets{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(plan->limits, Caps({400, 400, 400, 400}));
}

std::vector<ParamSpec> Alternating(int size, int64_t bytes_each) {
  std::vector<ParamSpec> params;
  for (int i = 0; i < size; ++i) {
    const DType dtype = i % 2 == 0 ? DType::kFloat32 : DType::kFloat64;
    params.push_back({.count = bytes_each / SizeOf(dtype), .dtype = dtype});
  }
  return params;
}

TEST(PlanBucketsTest, TwoGroupsOneCap) {
  const auto plan = PlanBuckets(Alternating(6, 200), {.caps = Caps({400})});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->buckets, (Buckets{{0, 2}, {1, 3}, {4}, {5}}));
  EXPECT_EQ(plan->limits, Caps({400, 400, 400, 400}));
}

TEST(PlanBucketsTest, OneGroupWalksThroughTheCaps) {
  const std::vector<ParamSpec> params(4, {.count = 10});
  const auto plan = PlanBuckets(params, {.caps = Caps({40, 80})});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->buckets, (Buckets{{0}, {1, 2}, {3}}));
  EXPECT_EQ(plan->limits, Caps({40, 80, 80}));
}

TEST(PlanBucketsTest, EachGroupWalksThroughTheCapsOnItsOwn) {
  const auto plan = PlanBuckets(Alternating(6, 200), {.caps = Caps({200, 400})});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->buckets, (Buckets{{0}, {1}, {2, 4}, {3, 5}}));
  EXPECT_EQ(plan->limits, Caps({200, 200, 400, 400}));
}

// Edges.

TEST(PlanBucketsTest, ACapOfZeroGivesOneParameterPerBucket) {
  std::vector<ParamSpec> params(3, {.count = 5});
  params[1].count = 0;
  const auto plan = PlanBuckets(params, {.caps = Caps({0}), .order = {2, 1, 0}});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->buckets, (Buckets{{2}, {1}, {0}}));
  EXPECT_EQ(plan->limits, Caps({0, 0, 0}));
}

TEST(PlanBucketsTest, NoCapGivesOneBucketPerGroup) {
  const auto plan = PlanBuckets(Alternating(7, 1 << 30), {.caps = {kNoCap}});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->buckets, (Buckets{{0, 2, 4, 6}, {1, 3, 5}}));
  EXPECT_EQ(plan->limits, (std::vector<Bytes>{kNoCap, kNoCap}));
}

TEST(PlanBucketsTest, TheDefaultCapsAreASmallFirstBucketAndLargeOthers) {
  const std::vector<ParamSpec> params(60, {.count = 1 << 18});  // 1 MiB each.
  const auto plan = PlanBuckets(params, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->buckets.size(), 4u);
  EXPECT_EQ(plan->buckets[0].size(), 1u);
  EXPECT_EQ(plan->buckets[1].size(), 25u);
  EXPECT_EQ(plan->buckets[2].size(), 25u);
  EXPECT_EQ(plan->buckets[3].size(), 9u);
  EXPECT_EQ(plan->limits,
            (std::vector<Bytes>{kDefaultFirstCap, kDefaultCap, kDefaultCap, kDefaultCap}));
}

TEST(PlanBucketsTest, EmptyTensorsStayInTheOpenBucket) {
  const std::vector<ParamSpec> params = {{.count = 0}, {.count = 100}, {.count = 0}, {.count = 0}};
  const auto plan = PlanBuckets(params, {.caps = Caps({400})});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->buckets, (Buckets{{0, 1}, {2, 3}}));
}

TEST(PlanBucketsTest, DevicesAreGroupsOfTheirOwn) {
  std::vector<ParamSpec> params(5, {.count = 1});
  params[1].device = Device::Cuda(0);
  params[2].device = Device::Cuda(1);
  params[3].device = Device::Cuda(0);
  const auto plan = PlanBuckets(params, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->buckets, (Buckets{{0, 4}, {1, 3}, {2}}));
}

TEST(PlanBucketsTest, ASparseParameterIsABucketOfItsOwn) {
  std::vector<ParamSpec> params(5, {.count = 10});
  params[2].sparse = true;
  const auto plan = PlanBuckets(params, {.caps = Caps({1000})});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->buckets, (Buckets{{0, 1, 3, 4}, {2}}));
  EXPECT_EQ(plan->limits, Caps({1000, 0}));
}

TEST(PlanBucketsTest, WithAnOrderBucketsComeInThatOrderAndLeftOversByFirstIndex) {
  std::vector<ParamSpec> params = Alternating(8, 200);
  params[0].sparse = true;
  const auto plan = PlanBuckets(params, {.caps = Caps({400}), .order = {7, 6, 5, 4, 3, 0, 2, 1}});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->buckets, (Buckets{{7, 5}, {6, 4}, {0}, {3, 1}, {2}}));

  const auto left_over = PlanBuckets(params, {.caps = Caps({1000}), .order = {7, 6, 5, 4, 3}});
  ASSERT_TRUE(left_over.ok()) << left_over.status();
  EXPECT_EQ(left_over->buckets, (Buckets{{6, 4}, {7, 5, 3}}));
}

TEST(PlanBucketsTest, WhatTheOrderLeavesOutGetsNoBucket) {
  const std::vector<ParamSpec> params(5, {.count = 10});
  const auto plan = PlanBuckets(params, {.order = {4, 1}});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->buckets, (Buckets{{4, 1}}));
}

TEST(PlanBucketsTest, FilledFromTheLastTheBucketThatIsReadyLastIsTheSmallOne) {
  const std::vector<ParamSpec> params(6, {.count = 10});
  const PlanOptions options{
      .caps = Caps({40, 80}), .order = {5, 4, 3, 2, 1, 0}, .cap_order = CapOrder::kFromLastReady};
  const auto plan = PlanBuckets(params, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->buckets, (Buckets{{5}, {4, 3}, {2, 1}, {0}}));
  EXPECT_EQ(plan->limits, Caps({80, 80, 80, 40}));

  const auto without_order =
      PlanBuckets(params, {.caps = Caps({40, 80}), .cap_order = CapOrder::kFromLastReady});
  ASSERT_TRUE(without_order.ok()) << without_order.status();
  EXPECT_EQ(without_order->buckets, (Buckets{{0}, {1, 2}, {3, 4}, {5}}));
}

TEST(PlanBucketsTest, FilledFromTheLastBucketsComeAsTheyAreComplete) {
  const auto plan = PlanBuckets(Alternating(7, 200), {.caps = Caps({200, 400, 1000}),
                                                      .order = {6, 5, 4, 3, 2, 1, 0},
                                                      .cap_order = CapOrder::kFromLastReady});
  ASSERT_TRUE(plan.ok()) << plan.status();
  // {5, 3} is complete before {4, 2}, and {6} before both, although it was filled last.
  EXPECT_EQ(plan->buckets, (Buckets{{6}, {5, 3}, {4, 2}, {1}, {0}}));
  EXPECT_EQ(plan->limits, Caps({1000, 400, 400, 200, 200}));
}

TEST(PlanBucketsTest, BadInputIsRefusedWithItsValues) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const std::vector<ParamSpec> two(2, {.count = 10});
  struct Case {
    std::vector<ParamSpec> params;
    PlanOptions options;
    std::string message;
  };
  const Case cases[] = {
      {{}, {}, "no parameters to plan"},
      {two, {.caps = {}}, "no bucket caps"},
      {two, {.caps = Caps({100, -5})}, "the bucket cap 1 is -5 bytes, but must be at least 0"},
      {{{.count = 3}, {.count = -7}}, {}, "parameter 1 has -7 elements"},
      {{{.count = kMax}}, {}, "more bytes than 63 bits can count"},
      {{{.count = kMax / 8}, {.count = kMax / 8}}, {.caps = {kNoCap}}, ""},
      {{{.count = kMax / 4}, {.count = 1}}, {}, "elements of parameter 1"},
      {two, {.order = {0, 2}}, "the order names parameter 2, but there are 2 parameters"},
      {two, {.order = {-1}}, "the order names parameter -1"},
      {two, {.order = {1, 0, 1}}, "the order names parameter 1 twice"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.message);
    const absl::Status status = PlanBuckets(c.params, c.options).status();
    if (c.message.empty()) {
      EXPECT_TRUE(status.ok()) << status;
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr(c.message));
    }
  }
}

TEST(PlanFirstStepTest, OneBucketPerGroupLastRegisteredFirst) {
  std::vector<ParamSpec> params = Alternating(7, 1 << 20);
  params[3].sparse = true;
  const std::vector<int> trained = {0, 1, 2, 3, 5};
  const auto plan = PlanFirstStep(params, trained);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->buckets, (Buckets{{5, 1}, {3}, {2, 0}}));
  EXPECT_EQ(plan->limits, (std::vector<Bytes>{kNoCap, Bytes{0}, kNoCap}));
}

TEST(PlanFirstStepTest, NothingTrainedGivesNoBuckets) {
  const auto plan = PlanFirstStep(Alternating(3, 8), {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(*plan, BucketPlan{});
}

TEST(PlanFirstStepTest, BadInputIsRefusedWithItsValues) {
  const std::vector<ParamSpec> params(3, {.count = 1});
  struct Case {
    std::vector<int> trained;
    std::string message;
  };
  const Case cases[] = {
      {{1, 1}, "must ascend, but 1 follows 1"},
      {{2, 0}, "must ascend, but 0 follows 2"},
      {{0, 3}, "parameter 3, but there are 3"},
      {{-1, 0}, "parameter -1"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.message);
    const absl::Status status = PlanFirstStep(params, c.trained).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(c.message));
  }
  EXPECT_EQ(PlanFirstStep(std::vector<ParamSpec>{{.count = -1}}, {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Properties, on random parameters of several groups.

struct RandomCase {
  std::vector<ParamSpec> params;
  PlanOptions options;
};

RandomCase MakeRandomCase(uint32_t seed) {
  std::mt19937 random(seed);
  auto below = [&random](int n) { return static_cast<int>(random() % static_cast<uint32_t>(n)); };
  const DType dtypes[] = {DType::kFloat32, DType::kFloat16, DType::kFloat64};
  const Device devices[] = {Device::Cpu(), Device::Cuda(0), Device::Cuda(1)};
  RandomCase result;
  const int size = 1 + below(60);
  for (int i = 0; i < size; ++i) {
    result.params.push_back({.count = below(4) == 0 ? below(3) : below(1000),
                             .dtype = dtypes[below(3)],
                             .device = devices[below(3)],
                             .sparse = below(10) == 0});
  }
  result.options.caps.clear();
  for (int i = 1 + below(3); i > 0; --i)
    result.options.caps.push_back({below(5) == 0 ? 0 : below(4000)});
  if (below(2) == 0) {
    result.options.order.resize(size);
    std::iota(result.options.order.begin(), result.options.order.end(), 0);
    std::shuffle(result.options.order.begin(), result.options.order.end(), random);
    result.options.order.resize(1 + below(size));
  }
  return result;
}

std::vector<int> Planned(const RandomCase& c) {
  if (!c.options.order.empty()) return c.options.order;
  std::vector<int> all(c.params.size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

class PlanPropertyTest : public testing::TestWithParam<uint32_t> {
 protected:
  void SetUp() override {
    const auto plan = PlanBuckets(case_.params, case_.options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    plan_ = *plan;
    ASSERT_EQ(plan_.buckets.size(), plan_.limits.size());
  }

  const RandomCase case_ = MakeRandomCase(GetParam());
  BucketPlan plan_;
};

TEST_P(PlanPropertyTest, PlansEveryParameterOnce) {
  std::vector<int> seen;
  for (const std::vector<int>& bucket : plan_.buckets) {
    EXPECT_FALSE(bucket.empty());
    seen.insert(seen.end(), bucket.begin(), bucket.end());
  }
  EXPECT_THAT(seen, testing::UnorderedElementsAreArray(Planned(case_)));
}

TEST_P(PlanPropertyTest, ABucketHasOneGroupAndItsMembersInOrder) {
  const std::vector<int> planned = Planned(case_);
  std::map<int, int> position;
  for (size_t i = 0; i < planned.size(); ++i) position[planned[i]] = static_cast<int>(i);
  for (const std::vector<int>& bucket : plan_.buckets) {
    for (size_t i = 0; i < bucket.size(); ++i) {
      EXPECT_EQ(KeyOf(case_.params[bucket[i]]), KeyOf(case_.params[bucket[0]]));
      EXPECT_TRUE(bucket.size() == 1 || !case_.params[bucket[i]].sparse);
      if (i > 0) {
        EXPECT_LT(position[bucket[i - 1]], position[bucket[i]]);
      }
    }
  }
}

// Within a group, in the order of their first members: each bucket but the last reaches its cap,
// none reaches it before its last member, and the caps are those of the list, one after the other.
TEST_P(PlanPropertyTest, EachGroupKeepsToTheCaps) {
  const std::vector<int> planned = Planned(case_);
  std::map<int, size_t> bucket_of_first;
  for (size_t b = 0; b < plan_.buckets.size(); ++b) bucket_of_first[plan_.buckets[b].front()] = b;
  std::map<GroupKey, std::vector<size_t>> buckets_of_group;
  for (int index : planned) {
    if (!bucket_of_first.contains(index)) continue;
    const size_t b = bucket_of_first[index];
    if (case_.params[index].sparse) {
      EXPECT_EQ(plan_.limits[b], Bytes{0});
    } else {
      buckets_of_group[KeyOf(case_.params[index])].push_back(b);
    }
  }
  for (const auto& [key, buckets] : buckets_of_group) {
    for (size_t i = 0; i < buckets.size(); ++i) {
      const std::vector<int>& members = plan_.buckets[buckets[i]];
      const Bytes cap = case_.options.caps[std::min(i, case_.options.caps.size() - 1)];
      EXPECT_EQ(plan_.limits[buckets[i]], cap);
      int64_t bytes = 0;
      for (size_t m = 0; m < members.size(); ++m) {
        if (m > 0) {
          EXPECT_LT(bytes, cap.value);
        }
        bytes += BytesOf(case_.params[members[m]]);
      }
      if (i + 1 < buckets.size()) {
        EXPECT_GE(bytes, cap.value);
      }
    }
  }
}

TEST_P(PlanPropertyTest, FullBucketsComeAsTheyFillAndLeftOversByFirstIndex) {
  if (case_.options.order.empty()) {
    for (size_t b = 1; b < plan_.buckets.size(); ++b)
      EXPECT_LT(plan_.buckets[b - 1][0], plan_.buckets[b][0]);
    return;
  }
  std::map<int, int> position;
  for (size_t i = 0; i < case_.options.order.size(); ++i)
    position[case_.options.order[i]] = static_cast<int>(i);
  auto is_full = [this](size_t b) {
    int64_t bytes = 0;
    for (int index : plan_.buckets[b]) bytes += BytesOf(case_.params[index]);
    return bytes >= plan_.limits[b].value;
  };
  for (size_t b = 1; b < plan_.buckets.size(); ++b) {
    const std::vector<int>& before = plan_.buckets[b - 1];
    const std::vector<int>& after = plan_.buckets[b];
    if (is_full(b)) {
      EXPECT_TRUE(is_full(b - 1));
      EXPECT_LT(position[before.back()], position[after.back()]);
    } else if (!is_full(b - 1)) {
      EXPECT_LT(before.front(), after.front());
    }
  }
}

TEST_P(PlanPropertyTest, AGroupsBucketsDoNotDependOnTheOtherGroups) {
  std::set<GroupKey> keys;
  for (const ParamSpec& param : case_.params) keys.insert(KeyOf(param));
  for (const GroupKey& key : keys) {
    PlanOptions options = case_.options;
    options.order.clear();
    for (int index : Planned(case_)) {
      if (KeyOf(case_.params[index]) == key) options.order.push_back(index);
    }
    if (options.order.empty()) continue;
    const auto alone = PlanBuckets(case_.params, options);
    ASSERT_TRUE(alone.ok()) << alone.status();
    for (const std::vector<int>& bucket : alone->buckets)
      EXPECT_THAT(plan_.buckets, testing::Contains(bucket));
  }
}

TEST_P(PlanPropertyTest, FilledFromTheLastIsTheMirrorImageAndComesAsItIsComplete) {
  PlanOptions mirrored = case_.options;
  mirrored.order = Planned(case_);
  std::reverse(mirrored.order.begin(), mirrored.order.end());
  const auto from_first = PlanBuckets(case_.params, mirrored);
  ASSERT_TRUE(from_first.ok()) << from_first.status();
  std::set<std::pair<std::vector<int>, Bytes>> expected;
  for (size_t b = 0; b < from_first->buckets.size(); ++b) {
    std::vector<int> members = from_first->buckets[b];
    std::reverse(members.begin(), members.end());
    expected.insert({members, from_first->limits[b]});
  }

  PlanOptions options = case_.options;
  options.cap_order = CapOrder::kFromLastReady;
  const auto from_last = PlanBuckets(case_.params, options);
  ASSERT_TRUE(from_last.ok()) << from_last.status();
  std::set<std::pair<std::vector<int>, Bytes>> actual;
  for (size_t b = 0; b < from_last->buckets.size(); ++b)
    actual.insert({from_last->buckets[b], from_last->limits[b]});
  EXPECT_EQ(actual, expected);

  const std::vector<int> planned = Planned(case_);
  auto complete = [&](const std::vector<int>& bucket) {
    return std::find(planned.begin(), planned.end(), bucket.back());
  };
  for (size_t b = 1; b < from_last->buckets.size(); ++b) {
    EXPECT_LT(complete(from_last->buckets[b - 1]), complete(from_last->buckets[b]));
  }
}

TEST_P(PlanPropertyTest, TheSameInputGivesTheSamePlan) {
  const auto again = PlanBuckets(case_.params, case_.options);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*again, plan_);
}

INSTANTIATE_TEST_SUITE_P(Seeds, PlanPropertyTest,
                         testing::Range(0u, 300u));  // The parameter is the seed.

// PyTorch's results.

nlohmann::json Recorded() {
  std::ifstream file("tests/testdata/plans/bucket_assignment.json");
  nlohmann::json recorded = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  EXPECT_FALSE(recorded.is_discarded());
  return recorded;
}

// Case i of the file in our terms: parameters by index, walked in the order of `tensor_indices`.
std::pair<std::vector<ParamSpec>, PlanOptions> ReadCase(const nlohmann::json& c) {
  const auto indices = c["tensor_indices"].get<std::vector<int>>();
  const auto is_sparse = c["expect_sparse"].get<std::vector<bool>>();
  std::vector<ParamSpec> params(c["numel"].size());
  for (size_t i = 0; i < params.size(); ++i) {
    const size_t index = indices.empty() ? i : static_cast<size_t>(indices[i]);
    params.at(index) = {.count = c["numel"][i].get<int64_t>(),
                        .dtype = DTypeFromString(c["dtype"][i].get<std::string>()).value(),
                        .device = c["device"][i] == "cpu" ? Device::Cpu() : Device::Cuda(0),
                        .sparse = index < is_sparse.size() && is_sparse[index]};
  }
  return {params, {.caps = Caps(c["limits"].get<std::vector<int64_t>>()), .order = indices}};
}

// The buckets that were still open at the end: neither sparse nor at their limit. They lie at the
// end.
std::set<std::pair<std::vector<int>, Bytes>> TakeLeftOvers(const std::vector<ParamSpec>& params,
                                                           BucketPlan* plan) {
  std::set<std::pair<std::vector<int>, Bytes>> left_overs;
  while (!plan->buckets.empty()) {
    const std::vector<int>& last = plan->buckets.back();
    int64_t bytes = 0;
    for (int index : last) bytes += BytesOf(params[index]);
    if (bytes >= plan->limits.back().value) break;  // Sparse ones, too.
    left_overs.insert({last, plan->limits.back()});
    plan->buckets.pop_back();
    plan->limits.pop_back();
  }
  return left_overs;
}

TEST(RecordedPlansTest, EveryCaseIsReproduced) {
  const nlohmann::json recorded = Recorded();
  ASSERT_EQ(recorded["cases"].size(), 130u);
  for (size_t i = 0; i < recorded["cases"].size(); ++i) {
    const nlohmann::json& c = recorded["cases"][i];
    SCOPED_TRACE(absl::StrCat("case ", i, ": ", c.dump()));
    const auto [params, options] = ReadCase(c);
    const auto plan = PlanBuckets(params, options);
    ASSERT_TRUE(plan.ok()) << plan.status();

    BucketPlan expected = {c["buckets"].get<Buckets>(),
                           Caps(c["per_bucket_limits"].get<std::vector<int64_t>>())};
    BucketPlan actual = *plan;
    if (!options.order.empty()) {
      EXPECT_EQ(TakeLeftOvers(params, &actual), TakeLeftOvers(params, &expected));
    }
    ASSERT_EQ(actual.buckets, expected.buckets);
    ASSERT_EQ(actual.limits, expected.limits);
  }
}

std::vector<int64_t> Numbers(absl::string_view text, absl::string_view separators) {
  std::vector<int64_t> numbers;
  for (absl::string_view word :
       absl::StrSplit(text, absl::ByAnyChar(separators), absl::SkipEmpty())) {
    EXPECT_TRUE(absl::SimpleAtoi(word, &numbers.emplace_back())) << word;
  }
  return numbers;
}

std::vector<int64_t> BytesPerBucket(const std::vector<ParamSpec>& params, const BucketPlan& plan) {
  std::vector<int64_t> bytes;
  for (const std::vector<int>& bucket : plan.buckets) {
    bytes.push_back(0);
    for (int index : bucket) bytes.back() += BytesOf(params[index]);
  }
  return bytes;
}

TEST(RecordedPlansTest, DistributedDataParallelsPlansAreReproduced) {
  const nlohmann::json recorded = Recorded();
  ASSERT_FALSE(recorded["ddp"].empty());
  for (const nlohmann::json& c : recorded["ddp"]) {
    SCOPED_TRACE(c.dump());
    const nlohmann::json& log = c["log"];
    std::vector<ParamSpec> params;
    for (const nlohmann::json& numel : c["numel"])
      params.push_back({.count = numel.get<int64_t>()});
    std::vector<int> all(params.size());
    std::iota(all.begin(), all.end(), 0);

    const auto first = PlanFirstStep(params, all);
    ASSERT_TRUE(first.ok()) << first.status();
    EXPECT_EQ(BytesPerBucket(params, *first),
              Numbers(log["bucket_sizes"].get<std::string>(), ", "));

    PlanOptions options{.caps = {kDefaultFirstCap, Bytes{c["bucket_cap_mb"].get<int64_t>() << 20}}};
    for (int64_t index :
         Numbers(log["prev_iteration_grad_ready_order_indices"].get<std::string>(), ", ")) {
      options.order.push_back(static_cast<int>(index));
    }
    const auto rebuilt = PlanBuckets(params, options);
    ASSERT_TRUE(rebuilt.ok()) << rebuilt.status();
    EXPECT_EQ(BytesPerBucket(params, *rebuilt),
              Numbers(log["rebuilt_bucket_sizes"].get<std::string>(), ", "));
    Buckets expected;
    for (absl::string_view bucket :
         absl::StrSplit(log["rebuilt_per_bucket_param_indices"].get<std::string>(), ", ")) {
      expected.emplace_back();
      for (int64_t index : Numbers(bucket, " ")) expected.back().push_back(static_cast<int>(index));
    }
    EXPECT_EQ(rebuilt->buckets, expected);
  }
}

TEST(PlanBucketsTest, DelayedParametersComeLastInABucketPerTypeWhateverTheCaps) {
  const std::vector<ParamSpec> params = {{.count = 4, .delayed = true},
                                         {.count = 4},
                                         {.count = 4, .dtype = DType::kFloat64, .delayed = true},
                                         {.count = 4},
                                         {.count = 4, .delayed = true}};
  for (CapOrder cap_order : {CapOrder::kFromFirstReady, CapOrder::kFromLastReady}) {
    const auto plan =
        PlanBuckets(params, {.caps = {Bytes{1}}, .order = {4, 3, 2, 1, 0}, .cap_order = cap_order});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_THAT(plan->buckets,
                testing::ElementsAre(testing::ElementsAre(3), testing::ElementsAre(1),
                                     testing::ElementsAre(4, 0), testing::ElementsAre(2)));
    EXPECT_EQ(plan->limits.back(), kNoCap);
  }
  const auto first = PlanFirstStep(params, std::vector<int>{0, 1, 2, 3, 4});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_THAT(first->buckets,
              testing::ElementsAre(testing::ElementsAre(3, 1), testing::ElementsAre(4, 0),
                                   testing::ElementsAre(2)));
  const auto all = PlanFirstStep(params, std::vector<int>{0, 2, 4});
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_THAT(all->buckets,
              testing::ElementsAre(testing::ElementsAre(4, 0), testing::ElementsAre(2)));
}

}  // namespace
}  // namespace evenkeel
