#include "evenkeel/zero_optim/internal/gradients.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

// Parameters in the states that the letters say: n(one), l(ocal), r(educed); an upper case letter
// is a frozen one.
class Parameters {
 public:
  explicit Parameters(const std::string& states) : memory_(2 * states.size()) {
    for (size_t i = 0; i < states.size(); ++i) {
      const absl::Span<float> all = absl::MakeSpan(memory_);
      params_.Add(absl::StrCat("p", i), all.subspan(2 * i, 1), all.subspan(2 * i + 1, 1));
    }
    Set(states);
  }

  void Set(const std::string& states) {
    for (size_t i = 0; i < states.size(); ++i) {
      const char state = static_cast<char>(states[i] | 0x20);
      const int index = static_cast<int>(i);
      params_.SetGradState(index, state == 'n'   ? GradState::kNone
                                  : state == 'l' ? GradState::kLocal
                                                 : GradState::kReduced);
      params_.SetTrainable(index, states[i] == state);
    }
  }
  ParameterSet& set() { return params_; }
  // All of them in one group.
  ParameterGroups groups() const {
    ParameterGroups groups(params_.size());
    EXPECT_TRUE(groups.Add(AllInOneGroup(params_, Sgd{})[0]).ok());
    return groups;
  }

 private:
  std::vector<float> memory_;
  ParameterSet params_;
};

// "-" none, "h" here, "r" to reduce.
std::string Letters(const std::vector<GradientSource>& sources) {
  std::string letters;
  for (GradientSource source : sources) letters += "-hr"[static_cast<int>(source)];
  return letters;
}

TEST(ChooseSourcesTest, DecidesByStateAndByWhoReduces) {
  const struct {
    const char* states;
    LocalGradients local;
    const char* sources;
  } cases[] = {
      {"rnrR", LocalGradients::kRefused,
       "h-h-"},  // Nothing to do about what a DataParallel left out.
      {"llnL", LocalGradients::kComplete, "hh--"},  // The only rank.
      {"rlnr", LocalGradients::kComplete, "hh-h"},
      {"rnrN", LocalGradients::kReduced, "h-h-"},  // Reduced elsewhere; nobody has the other one.
      {"llLl", LocalGradients::kReduced, "rr-r"},
      {"lnlN", LocalGradients::kReduced, "rrr-"},  // Another rank may have what this one lacks.
      {"nnnN", LocalGradients::kReduced, "rrr-"},  // Like here, where this rank has none at all.
      {"rlnR", LocalGradients::kReduced, "hrr-"},
      {"", LocalGradients::kReduced, ""},
  };
  for (const auto& test : cases) {
    SCOPED_TRACE(test.states);
    Parameters params(test.states);
    const auto sources =
        ChooseSources(params.set(), params.groups(), params.set().mask(), test.local, 0);
    ASSERT_TRUE(sources.ok()) << sources.status();
    EXPECT_EQ(Letters(*sources), test.sources);
  }
}

TEST(ChooseSourcesTest, LeavesOutWhatIsFrozenInThePlanOrNow) {
  Parameters params("lllL");
  TrainableMask mask(4);
  mask.Set(0, false);
  const auto sources =
      ChooseSources(params.set(), params.groups(), mask, LocalGradients::kReduced, 0);
  ASSERT_TRUE(sources.ok()) << sources.status();
  EXPECT_EQ(Letters(*sources), "-rr-");
}

TEST(ChooseSourcesTest, LeavesOutWhatIsInNoGroup) {
  Parameters params("llnr");
  ParameterGroups groups(4);
  ASSERT_TRUE(groups.Add({.params = {0, 2}}).ok());
  const auto sources =
      ChooseSources(params.set(), groups, params.set().mask(), LocalGradients::kReduced, 0);
  ASSERT_TRUE(sources.ok()) << sources.status();
  EXPECT_EQ(Letters(*sources), "r-r-");
}

TEST(ChooseSourcesTest, NamesWhatItRefuses) {
  Parameters params("nlL");
  const absl::Status local =
      ChooseSources(params.set(), params.groups(), params.set().mask(), LocalGradients::kRefused, 3)
          .status();
  EXPECT_TRUE(absl::IsFailedPrecondition(local)) << local;
  EXPECT_TRUE(
      absl::StrContains(local.message(), "rank 3: parameter 1 \"p1\" holds this rank's own"))
      << local;

  params.set().SetGradMemory(1, TensorView(nullptr, 1, DType::kFloat32));
  const absl::Status memory =
      ChooseSources(params.set(), params.groups(), params.set().mask(), LocalGradients::kReduced, 3)
          .status();
  EXPECT_TRUE(absl::IsFailedPrecondition(memory)) << memory;
  EXPECT_TRUE(absl::StrContains(memory.message(), "\"p1\" has a gradient without memory"))
      << memory;
}

TEST(CheckArrivedTest, WantsTheGroupsGradientWhereTheStepUsesIt) {
  const std::vector<GradientSource> sources = {GradientSource::kHere, GradientSource::kToReduce,
                                               GradientSource::kNone};
  Parameters params("rln");
  EXPECT_TRUE(CheckArrived(params.set(), sources, 1).ok());
  for (const char* missing : {"lln", "nln"}) {
    params.Set(missing);
    const absl::Status status = CheckArrived(params.set(), sources, 1);
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "parameter 0 \"p0\" has no reduced gradient"))
        << status;
  }
}

}  // namespace
}  // namespace evenkeel::internal
