#include "evenkeel/bucket/parameter_facts.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace evenkeel {
namespace {

// "float32[640]", or "float32[64, 10]" if the shape is known; on whatever device: each rank has its
// own.
std::string KindOf(const TensorView& view, std::span<const int64_t> shape = {}) {
  if (shape.size() < 2) return ToString(TensorView(nullptr, view.count, view.dtype));
  return absl::StrCat(ToString(view.dtype), "[", absl::StrJoin(shape, ", "), "]");
}

}  // namespace

std::vector<Fact> FactsOf(const ParameterSet& params, absl::Span<const TensorView> buffers) {
  std::vector<Fact> facts = {{"the number of parameters", absl::StrCat(params.size())},
                             {"the number of buffers", absl::StrCat(buffers.size())}};
  std::vector<std::string> names;
  for (int i = 0; i < params.size(); ++i) names.push_back(absl::StrCat("\"", params[i].name, "\""));
  for (const ParameterSet::SharedName& shared : params.shared_names()) {
    absl::StrAppend(&names[shared.index], " = \"", shared.name, "\"");
  }
  for (int i = 0; i < params.size(); ++i) {
    std::string kind =
        params.is_ignored(i) ? "(ignored)" : KindOf(params[i].value, params.shape(i));
    if (!params.is_ignored(i) && params.row_size(i) > 0)
      absl::StrAppend(&kind, " in rows of ", params.row_size(i));
    facts.push_back({absl::StrCat("parameter ", i), absl::StrCat(names[i], " ", kind)});
  }
  for (size_t b = 0; b < buffers.size(); ++b)
    facts.push_back({absl::StrCat("buffer ", b), KindOf(buffers[b])});
  return facts;
}

std::string internal::Listed(absl::Span<const std::string> names, size_t most) {
  const std::string first = absl::StrJoin(names.subspan(0, most), ", ");
  return names.size() <= most ? first : absl::StrCat(first, " and ", names.size() - most, " more");
}

std::string FrozenNote(const ParameterSet& params, const TrainableMask& mask) {
  std::vector<std::string> frozen;
  for (int i = 0; i < mask.size(); ++i)
    if (!mask[i] && !params.is_ignored(i)) frozen.push_back(params[i].name);
  return frozen.empty() ? "" : absl::StrCat("frozen: ", internal::Listed(frozen, 4));
}

}  // namespace evenkeel
