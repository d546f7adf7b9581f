#include "evenkeel/tests/rank_report.h"

#include <time.h>

#include <cctype>
#include <cstring>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "evenkeel/comm/base/hex.h"

namespace evenkeel {
namespace {

// Bit for bit.
std::string ToHex(const std::vector<float>& values) {
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(values.data()),
                                                  values.size() * sizeof(float)));
}

std::vector<float> FloatsFromHex(absl::string_view hex) {
  const std::string bytes = internal::BytesFromHex(hex);
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

bool TakeNumber(absl::string_view& text, int& number) {
  size_t digits = 0;
  while (digits < text.size() && std::isdigit(static_cast<unsigned char>(text[digits]))) ++digits;
  if (!absl::SimpleAtoi(text.substr(0, digits), &number)) return false;
  text.remove_prefix(digits);
  return true;
}

}  // namespace

int64_t MonotonicNanos() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

std::string ToLine(const RankReport& report) {
  const ToyResult& result = report.result;
  return absl::StrCat(report.rank, "\t", report.diverged, "\t", report.ended, "\t",
                      report.has_wrong_data, "\t", static_cast<int>(result.status.code()), "\t",
                      result.steps, "\t", ToHex(result.last.weights), "\t",
                      ToHex(result.ended.weights), "\t", ToHex(result.ended.momentum), "\t",
                      absl::CEscape(result.status.message()), "\n");
}

absl::StatusOr<RankReport> ReportFromLine(absl::string_view line) {
  const std::vector<absl::string_view> fields = absl::StrSplit(absl::StripSuffix(line, "\n"), '\t');
  RankReport report;
  int code = 0;
  std::string message;
  if (fields.size() != 10 || !absl::SimpleAtoi(fields[0], &report.rank) ||
      !absl::SimpleAtoi(fields[1], &report.diverged) ||
      !absl::SimpleAtoi(fields[2], &report.ended) ||
      !absl::SimpleAtob(fields[3], &report.has_wrong_data) || !absl::SimpleAtoi(fields[4], &code) ||
      !absl::SimpleAtoi(fields[5], &report.result.steps) || !absl::CUnescape(fields[9], &message)) {
    return absl::InvalidArgumentError(absl::StrCat("not a report: ", line));
  }
  report.result.last.weights = FloatsFromHex(fields[6]);
  report.result.ended = {FloatsFromHex(fields[7]), FloatsFromHex(fields[8])};
  report.result.status = absl::Status(static_cast<absl::StatusCode>(code), message);
  return report;
}

std::set<int> NamedRanks(absl::string_view message) {
  std::set<int> named;
  for (size_t at = message.find("rank"); at != absl::string_view::npos;
       at = message.find("rank", at + 1)) {
    absl::string_view rest = message.substr(at + 4);
    const bool is_list = absl::ConsumePrefix(&rest, "s");
    int rank = 0;
    if (!absl::ConsumePrefix(&rest, " ") || !TakeNumber(rest, rank)) continue;
    named.insert(rank);
    while (is_list &&
           (absl::ConsumePrefix(&rest, ", ") || absl::ConsumePrefix(&rest, ",") ||
            absl::ConsumePrefix(&rest, " and ")) &&
           TakeNumber(rest, rank)) {
      named.insert(rank);
    }
  }
  return named;
}

}  // namespace evenkeel
