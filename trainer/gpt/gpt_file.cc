#include "evenkeel/trainer/gpt/gpt_file.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/hf_files.h"
#include "evenkeel/trainer/models/model_file.h"

namespace evenkeel {
namespace {

using Tensor = SafetensorsFile::Tensor;

constexpr int64_t kWidthPerHead = 64;  // In all of OpenAI's GPT-2s.

absl::Status Wrong(absl::string_view name, absl::string_view how) {
  return absl::InvalidArgumentError(absl::StrCat("tensor ", name, " ", how));
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ","), "]");
}

// ---- From a file's names to the model's ----

bool IsMask(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, "h.")) return false;
  const size_t digits = std::min(name.find_first_not_of("0123456789"), name.size());
  name.remove_prefix(digits);
  return digits > 0 && (name == ".attn.bias" || name == ".attn.masked_bias");
}

// Without prefix, and without what is not needed.
absl::StatusOr<std::vector<Tensor>> NeededTensors(const SafetensorsFile& file) {
  std::vector<Tensor> tensors;
  absl::flat_hash_set<std::string> names;
  for (Tensor tensor : file.tensors()) {
    tensor.name = std::string(absl::StripPrefix(tensor.name, "transformer."));
    if (IsMask(tensor.name)) continue;
    if (!names.insert(tensor.name).second)
      return Wrong(tensor.name, "occurs both with and without the prefix \"transformer.\"");
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

// The same tensor scores and embeds tokens, under either name.
absl::Status MergeTied(std::vector<Tensor>& tensors) {
  const auto head = std::ranges::find(tensors, "lm_head.weight", &Tensor::name);
  const auto embedding = std::ranges::find(tensors, "wte.weight", &Tensor::name);
  if (head == tensors.end()) return absl::OkStatus();
  if (embedding == tensors.end()) {
    head->name = "wte.weight";
    return absl::OkStatus();
  }
  if (head->dtype != embedding->dtype || head->shape != embedding->shape ||
      head->bytes != embedding->bytes) {
    return Wrong("lm_head.weight", "differs from wte.weight, but GPT-2 uses one tensor for both");
  }
  tensors.erase(head);
  return absl::OkStatus();
}

// ---- Sizes ----

using ByName = absl::flat_hash_map<absl::string_view, const Tensor*>;

absl::StatusOr<const Tensor*> Find(const ByName& tensors, absl::string_view name) {
  const auto found = tensors.find(name);
  if (found == tensors.end())
    return absl::InvalidArgumentError(absl::StrCat("has no tensor ", name));
  return found->second;
}

// A table of [rows, width]; neither is zero.
absl::StatusOr<const Tensor*> FindTable(const ByName& tensors, absl::string_view name) {
  EK_ASSIGN_OR_RETURN(const Tensor* table, Find(tensors, name));
  if (table->shape.size() == 2 && table->shape[0] > 0 && table->shape[1] > 0) return table;
  return Wrong(name, absl::StrCat("has the shape ", ShapeText(table->shape),
                                  "; expected are 2 dimensions, rows and width"));
}

// Returns the number that was written with the weights, or beside them.
absl::StatusOr<std::optional<int64_t>> NotedHeads(const SafetensorsFile& file,
                                                  const std::optional<HfConfig>& config) {
  const auto noted = file.metadata().find("heads");
  if (noted == file.metadata().end())
    return config.has_value() ? std::optional(config->heads) : std::nullopt;
  int64_t heads;
  if (!absl::SimpleAtoi(noted->second, &heads)) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata has heads=", noted->second, ", which is not a number"));
  }
  if (!config.has_value() || config->heads == heads) return heads;
  return absl::InvalidArgumentError(absl::StrCat(
      "metadata has heads=", heads, ", but n_head in config.json beside it is ", config->heads));
}

absl::Status CheckConfig(const HfConfig& config, const GptOptions& options) {
  const struct {
    absl::string_view name;
    int64_t stated, found;
  } sizes[] = {{"vocab_size", config.vocabulary, options.vocabulary},
               {"n_positions", config.context, options.context},
               {"n_embd", config.width, options.width},
               {"n_layer", config.layers, options.layers}};
  for (const auto& [name, stated, found] : sizes) {
    if (stated == found) continue;
    return absl::InvalidArgumentError(absl::StrCat(name, " in config.json beside it is ", stated,
                                                   ", stated or by default, but the tensors have ",
                                                   found));
  }
  return absl::OkStatus();
}

absl::StatusOr<GptOptions> SizesOf(const ByName& tensors, std::optional<int64_t> heads) {
  EK_ASSIGN_OR_RETURN(const Tensor* embedding, FindTable(tensors, "wte.weight"));
  EK_ASSIGN_OR_RETURN(const Tensor* positions, FindTable(tensors, "wpe.weight"));
  GptOptions options{
      .vocabulary = embedding->shape[0], .context = positions->shape[0], .layers = 0};
  options.width = embedding->shape[1];
  while (tensors.contains(absl::StrCat("h.", options.layers, ".ln_1.weight"))) ++options.layers;
  options.layers = std::max<int64_t>(1, options.layers);  // Missing tensors are reported later.
  options.heads = heads.value_or(std::max<int64_t>(1, options.width / kWidthPerHead));
  if (!heads.has_value() || (*heads > 0 && options.width % *heads == 0)) return options;
  return absl::InvalidArgumentError(
      absl::StrCat("has ", options.heads, " heads by its metadata or config.json; the number of ",
                   "heads must divide the width, ", options.width));
}

// Each tensor of a GPT-2 of these sizes, and no others.
absl::Status CheckShapes(ByName tensors, GptOptions options) {
  options.heads = 1;  // Not visible in the shapes.
  options.is_plan = true;
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Gpt> plan, MakeGpt(options));
  for (int i = 0; i < plan->parameters().size(); ++i) {
    const std::string& name = plan->parameters()[i].name;
    const std::vector<int64_t> shape(plan->shape(i).begin(), plan->shape(i).end());
    EK_ASSIGN_OR_RETURN(const Tensor* tensor, Find(tensors, name));
    if (tensor->shape != shape) {
      return Wrong(name, absl::StrCat("has the shape ", ShapeText(tensor->shape),
                                      ", but the other tensors require ", ShapeText(shape)));
    }
    if (!IsFloat(tensor->dtype))
      return Wrong(name,
                   absl::StrCat("is ", ToString(tensor->dtype), ", not a floating-point type"));
    tensors.erase(name);
  }
  if (tensors.empty()) return absl::OkStatus();
  const auto first =
      std::ranges::min_element(tensors, {}, [](const auto& entry) { return entry.first; });
  return Wrong(first->first,
               absl::StrCat("is not part of a GPT-2 with ", options.layers, " layers"));
}

}  // namespace

absl::StatusOr<GptFile> GptFile::Read(const std::string& path) {
  EK_ASSIGN_OR_RETURN(SafetensorsFile contents, SafetensorsFile::Read(path));
  GptFile file(path, std::move(contents));
  EK_RETURN_IF_ERROR(Annotate(file.Init(), path));
  return file;
}

absl::Status GptFile::Init() {
  EK_ASSIGN_OR_RETURN(tensors_, NeededTensors(file_));
  EK_RETURN_IF_ERROR(MergeTied(tensors_));
  ByName by_name;
  for (const Tensor& tensor : tensors_) by_name[tensor.name] = &tensor;
  const std::string folder = std::filesystem::path(path_).parent_path().string();
  EK_ASSIGN_OR_RETURN(const std::optional<HfConfig> config,
                      ReadHfConfig(folder.empty() ? "." : folder));
  EK_ASSIGN_OR_RETURN(const std::optional<int64_t> heads, NotedHeads(file_, config));
  has_heads_ = heads.has_value();
  EK_ASSIGN_OR_RETURN(options_, SizesOf(by_name, heads));
  if (config.has_value()) {
    EK_RETURN_IF_ERROR(CheckConfig(*config, options_));
    options_.text_tokens = config->text_tokens;
  }
  return CheckShapes(std::move(by_name), options_);
}

absl::Status GptFile::LoadInto(Model& model) const {
  return Annotate(LoadModel(tensors_, model), path_);
}

}  // namespace evenkeel
