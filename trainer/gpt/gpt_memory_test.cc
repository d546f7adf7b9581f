// Steps of equal size take no memory: counted.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/testing/heap_counter.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {
namespace {

std::unique_ptr<Gpt> Make(GptCompute compute) {
  GptOptions options = *GptPreset("tiny");
  options.dropout = 0.1;
  options.compute = compute;
  absl::StatusOr<std::unique_ptr<Gpt>> model = MakeGpt(options);
  EXPECT_TRUE(model.ok()) << model.status();
  return *std::move(model);
}

void Step(Gpt& model, int64_t sequences) {
  static const std::vector<int32_t> tokens(4 * 64, 7);
  const std::span<const int32_t> own = std::span(tokens).first(sequences * 64);
  EXPECT_TRUE(model.Forward(TokenBatch{own, own, 64}, Mode::kTraining).ok());
  EXPECT_TRUE(model.Backward([](int) { return absl::OkStatus(); }).ok());
}

TEST(GptMemoryTest, OwnCodeAllocatesNothingInASteadyStep) {
  if (!HeapIsCounted()) GTEST_SKIP() << "sanitizers have a heap of their own";
  const std::unique_ptr<Gpt> model =
      Make(GptCompute::kFloat64);  // Without oneDNN, which has memory of its own.
  Step(*model, 1);
  const HeapCounts before = HeapCountsOfThread();
  Step(*model, 1);
  EXPECT_EQ(HeapCountsOfThread().allocations - before.allocations, 0);
}

TEST(GptMemoryTest, NothingGrowsWhateverComputes) {
  if (!HeapIsCounted()) GTEST_SKIP() << "sanitizers have a heap of their own";
  for (GptCompute compute : {GptCompute::kFloat32, GptCompute::kBFloat16}) {
    const std::unique_ptr<Gpt> model = Make(compute);
    Step(*model, 4), Step(*model, 3), Step(*model, 4);
    const int64_t held = LiveBytes();
    ResetPeakBytes();
    Step(*model, 4);
    EXPECT_EQ(LiveBytes(), held);
    // oneDNN's memory during a product is small beside the activations.
    EXPECT_LT(PeakBytes() - held, model->ActivationBytes() / 4);
  }
}

TEST(GptMemoryTest, ActivationBytesAreWhatTheFirstStepTakes) {
  if (!HeapIsCounted()) GTEST_SKIP() << "sanitizers have a heap of their own";
  const std::unique_ptr<Gpt> model = Make(GptCompute::kFloat64);
  const int64_t before = LiveBytes();
  Step(*model, 2);
  const int64_t taken = LiveBytes() - before;
  EXPECT_NEAR(static_cast<double>(model->ActivationBytes()), taken,
              taken * 0.02);  // The allocator rounds up.
}

}  // namespace
}  // namespace evenkeel
