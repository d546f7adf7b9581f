#include "evenkeel/trainer/gpt/gpt_options.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace evenkeel {

absl::StatusOr<GptOptions> GptPreset(absl::string_view name) {
  if (name == "tiny") return GptOptions{.context = 64, .layers = 2, .width = 64, .heads = 2};
  if (name == "mini") return GptOptions{};
  if (name == "gpt2") {
    return GptOptions{.vocabulary = 50257,
                      .context = 1024,
                      .layers = 12,
                      .width = 768,
                      .heads = 12,
                      .dropout = 0.1};
  }
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is not a preset; choose tiny, mini, gpt2"));
}

}  // namespace evenkeel
