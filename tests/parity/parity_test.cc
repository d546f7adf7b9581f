// Combinations of what training can be made of (combination.h), at world sizes 2, 3 and 6, against
// one process on the joined batches: weights after each step, and the optimizer's state at the end,
// on all ranks. Of the full product, some 80,000, a sample in which each pair of choices meets.

#include <algorithm>
#include <bitset>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/tests/parity/combination.h"
#include "evenkeel/tests/parity/rank_training.h"
#include "evenkeel/tests/parity/reference.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

template <typename T>
double LargestDifference(const TinyWeights<T>& a, const TinyWeights<T>& b) {
  double largest = 0;
  for (int p = 0; p < kTinyParams; ++p) {
    for (int j = 0; j < kTinySizes[p]; ++j) {
      const double difference = std::abs(double{a[p][j]} - double{b[p][j]});
      if (!(difference <= largest)) largest = difference;  // Not a number is the largest.
    }
  }
  return largest;
}

// Returns the first error in a rank's training; empty: none.
template <typename T>
std::string Compare(const Combination& combination, int rank, const Trained<T>& actual,
                    const Trained<T>& expected) {
  const auto near = [&](const TinyWeights<T>& a, const TinyWeights<T>& b,
                        const TinyWeights<T>& start) {
    return LargestDifference(a, b) <= combination.Bound() * LargestDifference(b, start);
  };
  const int own_steps = combination.StepsOf(rank);
  for (int step = 1; step <= own_steps; ++step) {
    if (!near(actual.weights[step], expected.weights[step], expected.weights[0])) {
      return absl::StrCat("rank ", rank, " is off by ",
                          LargestDifference(actual.weights[step], expected.weights[step]),
                          " after step ", step);
    }
  }
  if (!near(actual.weights.back(), expected.weights.back(), expected.weights[0])) {
    return absl::StrCat("rank ", rank, " is off by ",
                        LargestDifference(actual.weights.back(), expected.weights.back()),
                        " at the end");
  }
  const TinyWeights<T> zero = ZeroWeights<T>();
  if (!near(actual.first, expected.first, zero) ||
      (combination.adamw && !near(actual.second, expected.second, zero))) {
    return absl::StrCat("the optimizer of rank ", rank, " has another state");
  }
  if (actual.updates != expected.updates)
    return absl::StrCat("the optimizer of rank ", rank, " counts other updates");
  return "";
}

// Empty: as in one process.
template <typename T>
std::string Check(const Combination& combination) {
  const Trained<T> expected = TrainAlone<T>(combination);
  std::vector<std::string> wrong(combination.world);
  const absl::Status status =
      RunTestRanks(combination.world,
                   [&](Communicator& comm) -> absl::Status {
                     EK_ASSIGN_OR_RETURN(const Trained<T> actual, TrainRank<T>(combination, comm));
                     wrong[comm.rank()] = Compare(combination, comm.rank(), actual, expected);
                     return absl::OkStatus();
                   },
                   {.timeout = absl::Seconds(60)});
  if (!status.ok()) return status.ToString();
  const auto first =
      std::ranges::find_if(wrong, [](const std::string& text) { return !text.empty(); });
  return first == wrong.end() ? "" : *first;
}

// For each world size, optimizer and kind of inputs. 115 are too few for all pairs of choices.
constexpr int kFullSample = 130;
int SampleSize() { return TheTestBackend().is_in_full ? kFullSample : 4; }

class ParityTest : public testing::TestWithParam<std::tuple<int, OptimizerKind, InputsKind>> {};

TEST_P(ParityTest, EachIsOneProcessOnTheJoinedBatches) {
  const auto [world, optimizer, inputs] = GetParam();
  int failed = 0;
  for (const Combination& combination : SomeCombinations(world, optimizer, inputs, SampleSize())) {
    const std::string wrong =
        combination.float32 ? Check<float>(combination) : Check<double>(combination);
    if (wrong.empty()) continue;
    ADD_FAILURE() << combination.Name() << ": " << wrong;
    if (++failed == 20) FAIL() << "and maybe more";
  }
}

std::string NameOf(const testing::TestParamInfo<ParityTest::ParamType>& info) {
  const auto& [world, optimizer, inputs] = info.param;
  return AllCombinations(world, optimizer, inputs).front().Name();
}

// Returns all pairs of choices that occur together in a combination. The sample must have the same
// pairs as the full product.
std::set<std::pair<std::string, std::string>> Pairs(const std::vector<Combination>& combinations) {
  using Choices = std::bitset<64>;
  std::map<std::string, size_t> numbers;
  std::vector<Choices> partners;
  for (const Combination& combination : combinations) {
    Choices choices;
    for (const std::string& name : combination.names)
      choices.set(numbers.try_emplace(name, numbers.size()).first->second);
    partners.resize(numbers.size());
    for (size_t i = 0; i < partners.size(); ++i) {
      if (choices[i]) partners[i] |= choices;
    }
  }
  std::set<std::pair<std::string, std::string>> pairs;
  for (const auto& [a, i] : numbers) {
    for (const auto& [b, j] : numbers) {
      if (partners[i][j]) pairs.emplace(a, b);
    }
  }
  return pairs;
}

TEST_P(ParityTest, TheFullSampleHasEachPairOfChoices) {
  const auto [world, optimizer, inputs] = GetParam();
  EXPECT_EQ(Pairs(SomeCombinations(world, optimizer, inputs, kFullSample)),
            Pairs(AllCombinations(world, optimizer, inputs)));
}

INSTANTIATE_TEST_SUITE_P(All, ParityTest,
                         testing::Combine(testing::Values(2, 3, 6),
                                          testing::ValuesIn(kOptimizerKinds),
                                          testing::ValuesIn(kInputsKinds)),
                         NameOf);

}  // namespace
}  // namespace evenkeel
