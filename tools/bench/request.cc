#include "evenkeel/tools/bench/request.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::bench {
namespace {

constexpr int64_t kMostBytes = int64_t{64} << 30;
constexpr const char* kBackends[] = {"tcp", "shm", "raw_gloo", "mpi", "openmpi", "mpich"};

std::vector<absl::string_view> Words(absl::string_view text) {
  std::vector<absl::string_view> words;
  for (absl::string_view word : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    words.push_back(absl::StripAsciiWhitespace(word));
  }
  return words;
}

absl::Status Unknown(absl::string_view flag, absl::string_view word, absl::string_view choice) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": \"", word, "\" is not known; choose ", choice));
}

template <typename T>
void AddOnce(std::vector<T>& to, T one) {
  if (std::find(to.begin(), to.end(), one) == to.end()) to.push_back(std::move(one));
}

absl::StatusOr<int64_t> ParseSize(absl::string_view flag, absl::string_view word) {
  constexpr absl::string_view kUnits = "KMG";
  absl::string_view digits = word;
  int64_t unit = 1, count = 0;
  if (!digits.empty()) {
    const size_t at = kUnits.find(absl::ascii_toupper(static_cast<unsigned char>(digits.back())));
    if (at != absl::string_view::npos) {
      unit = int64_t{1} << (10 * (at + 1));
      digits.remove_suffix(1);
    }
  }
  if (absl::SimpleAtoi(digits, &count) && count >= 1 && count <= kMostBytes / unit)
    return count * unit;
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": \"", word,
                   "\" is not a size; pass bytes from 1 to 64G, such as 1024, 4K or 256M"));
}

}  // namespace

absl::StatusOr<std::vector<int64_t>> ParseSizes(absl::string_view flag, absl::string_view text) {
  std::vector<int64_t> sizes;
  for (const absl::string_view word : Words(text)) {
    EK_ASSIGN_OR_RETURN(const int64_t size, ParseSize(flag, word));
    AddOnce(sizes, size);
  }
  return sizes;
}

absl::StatusOr<std::vector<Op>> ParseOps(absl::string_view text) {
  std::vector<Op> ops;
  for (const absl::string_view word : Words(text)) {
    if (word == "all") {
      for (const Op op : kAllOps) AddOnce(ops, op);
      continue;
    }
    const Op* const found = std::find_if(std::begin(kAllOps), std::end(kAllOps),
                                         [&](Op op) { return word == NameOf(op); });
    if (found == std::end(kAllOps)) {
      const auto add_name = [](std::string* out, Op op) { out->append(NameOf(op)); };
      return Unknown("ops", word, absl::StrCat("all, ", absl::StrJoin(kAllOps, ", ", add_name)));
    }
    AddOnce(ops, *found);
  }
  if (ops.empty()) return absl::InvalidArgumentError("--ops must name at least one operation");
  return ops;
}

absl::StatusOr<std::vector<std::string>> ParseBackends(
    absl::string_view flag, absl::string_view text, const std::vector<std::string>& what_is_there) {
  std::vector<std::string> backends;
  for (const absl::string_view word : Words(text)) {
    if (word == "auto") {
      for (const std::string& backend : what_is_there) AddOnce(backends, backend);
      continue;
    }
    if (std::find(std::begin(kBackends), std::end(kBackends), word) == std::end(kBackends)) {
      return Unknown(flag, word, absl::StrCat("auto, ", absl::StrJoin(kBackends, ", ")));
    }
    AddOnce(backends, std::string(word));
  }
  return backends;
}

}  // namespace evenkeel::bench
