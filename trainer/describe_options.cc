#include "evenkeel/trainer/describe_options.h"

#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/join/step_divisor.h"

namespace evenkeel {

absl::string_view DescribeSharding(Sharding sharding) {
  switch (sharding) {
    case Sharding::kNone:
      return "state on every rank";
    case Sharding::kTensors:
      return "state sharded by tensors";
    case Sharding::kSlices:
      return "state sharded in equal slices";
  }
  return "";
}

absl::string_view DescribeDecay(Decay decay) {
  switch (decay) {
    case Decay::kNone:
      return "";
    case Decay::kLinear:
      return " with linear decay";
    case Decay::kCosine:
      return " with cosine decay";
  }
  return "";
}

int64_t CountElements(const Model& model) {
  int64_t count = 0;
  for (int i = 0; i < model.parameters().size(); ++i) count += model.parameters()[i].value.count;
  return count;
}

std::string DescribeJoin(const TrainOptions& options, const StepPlan& plan) {
  if (!plan.is_uneven()) return "even";
  if (options.stops_early) return "uneven, all stop with the first that runs dry";
  if (!options.joins) return "cut to the same number";
  switch (options.divide_by) {
    case DivideBy::kSamples:
      return "uneven, joined, every sample weighs the same";
    case DivideBy::kInitialWorldSize:
      return "uneven, joined, gradients divided by the initial number of ranks";
    case DivideBy::kActiveRanks:
      return "uneven, joined, gradients divided by the effective number of ranks";
  }
  return "";
}

}  // namespace evenkeel
