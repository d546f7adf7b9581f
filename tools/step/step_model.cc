#include "evenkeel/tools/step/step_model.h"

#include <cstdint>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/models/mlp.h"

namespace evenkeel {

namespace {

absl::StatusOr<StepModel> WithImages(const std::vector<int>& hidden, int count) {
  StepModel step;
  EK_ASSIGN_OR_RETURN(step.model, MakeMlp({.hidden = hidden}));
  std::minstd_rand random(17);
  for (int i = 0; i < count * 784; ++i)
    step.memory.images.push_back(static_cast<float>(random() % 1001) * 1e-3f);
  for (int i = 0; i < count; ++i) step.memory.labels.push_back(static_cast<uint8_t>(i % 10));
  return step;
}

absl::StatusOr<StepModel> WithTokens(absl::string_view preset, int sequences) {
  EK_ASSIGN_OR_RETURN(const GptOptions options, GptPreset(preset));
  StepModel step{.context = options.context};
  EK_ASSIGN_OR_RETURN(step.model, MakeGpt(options));
  std::minstd_rand random(17);
  for (std::vector<int32_t>* tokens : {&step.memory.inputs, &step.memory.targets}) {
    for (int64_t i = 0; i < sequences * options.context; ++i)
      tokens->push_back(static_cast<int32_t>(random() % options.vocabulary));
  }
  return step;
}

}  // namespace

absl::StatusOr<StepModel> MakeStepModel(absl::string_view name) {
  if (name == "mlp") return WithImages({1024, 1024}, 64);
  if (name == "tiny") return WithImages({32}, 4);
  if (name == "gpt") return WithTokens("mini", 8);
  return absl::InvalidArgumentError(
      absl::StrCat("\"", name, "\" is not a model; choose mlp, gpt or tiny"));
}

}  // namespace evenkeel
