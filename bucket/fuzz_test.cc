// No bytes that another rank sends as a plan's state do harm.

#include "evenkeel/comm/testing/fuzz.h"

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/plan/plan_state.h"
#include "evenkeel/bucket/plan/trainable_mask.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

TEST(BucketFuzzTest, TrainableMask) {
  std::vector<std::string> good;
  for (const int size : {0, 1, 7, 8, 64, 65, 1000}) {
    good.push_back(TrainableMask(size, true).Serialize());
    good.push_back(TrainableMask(size, false).Serialize());
  }
  Fuzz(good, Again<TrainableMask>);
}

TEST(BucketFuzzTest, PlanState) {
  for (const int params : {0, 1, 2, 9, 70}) {
    SCOPED_TRACE(absl::StrCat(params, " parameters"));
    PlanState first{.generation = 3, .mask = TrainableMask(params, true)};
    PlanState later = first;
    std::vector<int> order;
    for (int i = params - 1; i >= 0; i -= 2) order.push_back(i);
    AdoptOrder(later, order);
    Fuzz({first.Serialize(), later.Serialize()},
         [&](absl::string_view bytes) -> absl::StatusOr<std::string> {
           const absl::StatusOr<PlanState> state = PlanState::Parse(bytes, params);
           if (!state.ok()) return state.status();
           return state->Serialize();
         },
         {.rounds = 5000});
  }
}

}  // namespace
}  // namespace evenkeel
