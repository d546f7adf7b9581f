#include "evenkeel/trainer/gpt/gpt.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/gpt/gpt_model.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/if_memory_allows.h"

namespace evenkeel {
namespace {

// So that no product of sizes overflows, and a typing error does not ask for terabytes.
constexpr int64_t kMaxVocabulary = 1'000'000, kMaxContext = 65536, kMaxLayers = 1024, kMaxWidth = 65536,
                  kMaxHeads = 1024;
constexpr int64_t kMaxParameters = int64_t{1} << 34;

absl::Status CheckRange(absl::string_view name, int64_t value, int64_t lowest, int64_t highest) {
  if (value >= lowest && value <= highest) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("gpt: ", name, " may be ", lowest, " to ", highest, ", not ", value));
}

int64_t ParametersOf(const GptOptions& options) {
  const int64_t width = options.width;
  return (options.vocabulary + options.context + 2) * width + options.layers * (12 * width + 13) * width;
}

absl::Status Check(const GptOptions& options) {
  EK_RETURN_IF_ERROR(CheckRange("vocabulary", options.vocabulary, 2, kMaxVocabulary));
  EK_RETURN_IF_ERROR(CheckRange("context", options.context, 1, kMaxContext));
  EK_RETURN_IF_ERROR(CheckRange("layers", options.layers, 1, kMaxLayers));
  EK_RETURN_IF_ERROR(CheckRange("width", options.width, 1, kMaxWidth));
  EK_RETURN_IF_ERROR(CheckRange("heads", options.heads, 1, kMaxHeads));
  if (options.width % options.heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("gpt: ", options.heads, " heads can't share a width of ", options.width, " evenly"));
  }
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    return absl::InvalidArgumentError(absl::StrCat("gpt: dropout may be 0 to below 1, not ", options.dropout));
  }
  if (const int64_t parameters = ParametersOf(options); parameters > kMaxParameters) {
    return absl::InvalidArgumentError(
        absl::StrCat("gpt: these sizes make ", parameters, " parameters, there may be ", kMaxParameters));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Gpt>> Make(const GptOptions& options) {
  switch (options.compute) {
    case GptCompute::kFloat32:
      return std::make_unique<GptModel<float, float>>(options);
    case GptCompute::kBFloat16:
      return std::make_unique<GptModel<float, BFloat16>>(options);
    case GptCompute::kFloat64:
      return std::make_unique<GptModel<double, double>>(options);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("gpt: there is no precision number ", static_cast<int>(options.compute)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Gpt>> MakeGpt(const GptOptions& options) {
  EK_RETURN_IF_ERROR(Check(options));
  return IfMemoryAllows(
      absl::StrCat("gpt: not enough memory for ", ParametersOf(options), " parameters and their gradients"),
      [&] { return Make(options); });
}

}  // namespace evenkeel
