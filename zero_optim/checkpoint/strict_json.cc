#include "evenkeel/zero_optim/checkpoint/strict_json.h"

#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

// The text is parsed twice: first as a stream of events, which finds what a parsed document cannot
// show (names that come twice) or must not hold (deep nesting, which would cost many times the
// text's size), then as a document.

namespace evenkeel::internal {
namespace {

using Json = nlohmann::json;

class ShapeCheck : public nlohmann::json_sax<Json> {
 public:
  ShapeCheck(int max_depth, absl::string_view what) : max_depth_(max_depth), what_(what) {}
  const std::string& error() const { return error_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override {
    keys_.emplace_back();
    return Enter();
  }
  bool end_object() override {
    keys_.pop_back();
    --depth_;
    return true;
  }
  bool start_array(size_t) override { return Enter(); }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool key(string_t& name) override {
    if (keys_.back().insert(name).second) return true;
    error_ = absl::StrCat("\"", name, "\" appears twice in ", what_);
    return false;
  }
  bool parse_error(size_t position, const std::string&, const Json::exception&) override {
    error_ = absl::StrCat(what_, " is not JSON at its byte ", position);
    return false;
  }

 private:
  bool Enter() {
    if (++depth_ <= max_depth_) return true;
    error_ = absl::StrCat(what_, " is nested too deeply");
    return false;
  }

  const int max_depth_;
  const absl::string_view what_;
  int depth_ = 0;
  std::vector<std::set<std::string>> keys_;  // By open object.
  std::string error_;
};

}  // namespace

absl::StatusOr<nlohmann::json> ParseStrictJson(absl::string_view text, int max_depth,
                                               absl::string_view what) {
  // The parser takes a NUL for the end, and would not look at what follows. No JSON has one:
  // strings escape it.
  if (const size_t at = text.find('\0'); at != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " is not JSON at its byte ", at + 1, ", which is NUL"));
  }
  ShapeCheck check(max_depth, what);
  if (!Json::sax_parse(text.begin(), text.end(), &check))
    return absl::InvalidArgumentError(check.error());
  Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object())
    return absl::InvalidArgumentError(absl::StrCat(what, " is not a JSON object"));
  return json;
}

}  // namespace evenkeel::internal
