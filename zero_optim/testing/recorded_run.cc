#include "evenkeel/zero_optim/testing/recorded_run.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace evenkeel::internal {
namespace {

// Returns the text after `key` in `text`; empty if `key` is not there.
absl::string_view After(absl::string_view text, absl::string_view key) {
  const size_t found = text.find(key);
  return found == absl::string_view::npos ? absl::string_view() : text.substr(found + key.size());
}

}  // namespace

absl::StatusOr<RecordedRun> RecordedRun::Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  const std::string bytes = content.str();
  uint64_t header_size = 0;
  if (!file.is_open() || bytes.size() < sizeof(header_size))
    return absl::NotFoundError(absl::StrCat("no ", path));
  std::memcpy(&header_size, bytes.data(), sizeof(header_size));
  RecordedRun run;
  run.header_ = bytes.substr(sizeof(header_size), header_size);
  run.data_ = bytes.substr(sizeof(header_size) + header_size);
  return run;
}

template <typename T>
std::vector<T> RecordedRun::Get(absl::string_view tensor) const {
  const std::string offsets(
      After(After(After(header_, absl::StrCat("\"", tensor, "\":")), "\"data_offsets\":"), "[")
          .substr(0, 64));
  char* rest = nullptr;
  const size_t begin = std::strtoull(offsets.c_str(), &rest, 10);
  const size_t end = *rest == ',' ? std::strtoull(rest + 1, nullptr, 10) : 0;
  if (end <= begin || end > data_.size()) return {};
  std::vector<T> values((end - begin) / sizeof(T));
  std::memcpy(values.data(), data_.data() + begin, values.size() * sizeof(T));
  return values;
}

template std::vector<float> RecordedRun::Get(absl::string_view) const;
template std::vector<int64_t> RecordedRun::Get(absl::string_view) const;

double RecordedRun::MaxDiffVsFloat64(absl::string_view param) const {
  const absl::string_view all = After(header_, "\"max_abs_diff_vs_float64\"");
  return std::atof(
      std::string(After(all, absl::StrCat("\\\"", param, "\\\":")).substr(0, 32)).c_str());
}

}  // namespace evenkeel::internal
