#include "evenkeel/files/strict_json.h"

#include <algorithm>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"

// The text is parsed twice: first as a stream of events, which finds what a parsed document cannot
// show (names that come twice) or must not hold (deep nesting, which would cost many times the
// text's size), then as a document.

namespace evenkeel::internal {
namespace {

using Json = nlohmann::json;

constexpr int kTooLarge = 406;     // The parser's error for a number that no double holds.
constexpr size_t kMostShown = 60;  // Bytes of the text in a message.

std::string Shown(absl::string_view text) {
  return absl::StrCat("\"", absl::CHexEscape(text.substr(0, kMostShown)),
                      text.size() > kMostShown ? "...\"" : "\"");
}

// "line 3, column 7" of a position in the text.
std::string PlaceOf(absl::string_view text, size_t position) {
  const absl::string_view before = text.substr(0, position);
  const size_t line_begin = before.rfind('\n') + 1;  // npos + 1 is 0.
  return absl::StrCat("line ", 1 + std::ranges::count(before, '\n'), ", column ",
                      before.size() - line_begin + 1);
}

class ShapeCheck : public nlohmann::json_sax<Json> {
 public:
  ShapeCheck(absl::string_view text, int max_depth, absl::string_view what)
      : text_(text), max_depth_(max_depth), what_(what) {}
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
    error_ = absl::StrCat(Shown(name), " appears twice in ", what_);
    return false;
  }
  bool parse_error(size_t position, const std::string& token,
                   const Json::exception& error) override {
    if (error.id == kTooLarge) {
      error_ = absl::StrCat(what_, ": the number ", Shown(token), " is too large");
    } else if (position > text_.size()) {
      error_ = absl::StrCat(what_, " ends before its JSON is complete");
    } else {
      error_ = absl::StrCat(what_, " is not JSON at ", PlaceOf(text_, position - 1));
    }
    return false;
  }

 private:
  bool Enter() {
    if (++depth_ <= max_depth_) return true;
    error_ =
        absl::StrCat(what_, " is nested too deeply; at most ", max_depth_, " levels are expected");
    return false;
  }

  const absl::string_view text_;
  const int max_depth_;
  const absl::string_view what_;
  int depth_ = 0;
  std::vector<std::set<std::string>> keys_;  // By open object.
  std::string error_;
};

}  // namespace

absl::StatusOr<nlohmann::json> ParseStrictJson(absl::string_view text, int max_depth,
                                               absl::string_view what, JsonRoot root) {
  const auto refuse = [&](const auto&... parts) {
    return absl::InvalidArgumentError(absl::StrCat(what, parts...));
  };
  if (text.size() > kMaxJsonBytes)
    return refuse(" has ", text.size(), " bytes; at most ", kMaxJsonBytes, " are read");
  if (absl::StripAsciiWhitespace(text).empty()) return refuse(" is empty");
  if (absl::StartsWith(text, kLfsPointer))
    return refuse(" is a Git LFS pointer; fetch the file itself with `git lfs pull`");
  // The parser takes a NUL for the end, and would not look at what follows. No JSON has one:
  // strings escape it.
  if (const size_t at = text.find('\0'); at != absl::string_view::npos)
    return refuse(" is not JSON at ", PlaceOf(text, at), ", a NUL byte");
  ShapeCheck check(text, max_depth, what);
  if (!Json::sax_parse(text.begin(), text.end(), &check))
    return absl::InvalidArgumentError(check.error());
  Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (root == JsonRoot::kObject && !json.is_object()) return refuse(" is not a JSON object");
  return json;
}

absl::StatusOr<nlohmann::json> ReadStrictJson(const std::string& path, int max_depth) {
  EK_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, {.max_bytes = kMaxJsonBytes}));
  return ParseStrictJson(text, max_depth, path);
}

}  // namespace evenkeel::internal
