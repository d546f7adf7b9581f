#include "evenkeel/trainer/report/testing/page_check.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace evenkeel {
namespace {

constexpr absl::string_view kVoid[] = {"meta", "input"};
// Texts that would fetch something, or run text of the record.
constexpr absl::string_view kForbidden[] = {
    "http:", "https:", "src=", "href=", "url(", "@import", "fetch(", "<link"};

bool IsVoid(absl::string_view name) {
  return std::find(std::begin(kVoid), std::end(kVoid), name) != std::end(kVoid);
}

class Page {
 public:
  explicit Page(absl::string_view html) : html_(html), rest_(html) {}

  std::string Check() {
    for (const absl::string_view text : kForbidden) {
      if (absl::StrContains(html_, text)) return absl::StrCat("contains ", text);
    }
    if (!absl::ConsumePrefix(&rest_, "<!doctype html>\n")) return "has no doctype";
    while (!rest_.empty() && error_.empty()) {
      rest_[0] == '<' ? Tag() : Text();
    }
    if (error_.empty() && !open_.empty()) Fail(absl::StrCat(open_.back(), " is never closed"));
    return error_;
  }

 private:
  void Fail(absl::string_view what) {
    if (error_.empty()) error_ = absl::StrCat(what, " before: ", rest_.substr(0, 80));
  }

  void Text() {
    const size_t end = std::min(rest_.find('<'), rest_.size());
    const absl::string_view text = rest_.substr(0, end);
    CheckText(text);
    if (open_.empty() && !absl::StripAsciiWhitespace(text).empty())
      Fail("text outside of all elements");
    rest_.remove_prefix(end);
  }

  void CheckText(absl::string_view text) {
    for (const char bad : {'"', '>'}) {
      if (absl::StrContains(text, bad))
        Fail(absl::StrCat("a bare ", std::string(1, bad), " in \"", text, "\""));
    }
    CheckReferences(text);
  }

  void CheckReferences(absl::string_view text) {
    for (size_t at = text.find('&'); at != absl::string_view::npos; at = text.find('&', at + 1)) {
      const absl::string_view here = text.substr(at);
      const bool is_known = absl::StartsWith(here, "&lt;") || absl::StartsWith(here, "&gt;") ||
                            absl::StartsWith(here, "&amp;") || absl::StartsWith(here, "&quot;") ||
                            absl::StartsWith(here, "&#39;");
      if (!is_known) Fail(absl::StrCat("a bare & in \"", here.substr(0, 20), "\""));
    }
    if (std::any_of(text.begin(), text.end(),
                    [](char c) { return absl::ascii_iscntrl(c) && c != '\n'; })) {
      Fail("a control character");
    }
  }

  absl::string_view Name() {
    size_t size = 0;
    while (size < rest_.size() && (absl::ascii_isalnum(rest_[size]) || rest_[size] == '-')) ++size;
    const absl::string_view name = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return name;
  }

  void Tag() {
    rest_.remove_prefix(1);
    if (absl::ConsumePrefix(&rest_, "/")) {
      const absl::string_view name = Name();
      if (open_.empty() || open_.back() != name)
        return Fail(absl::StrCat("</", name, "> closes nothing"));
      open_.pop_back();
      if (!absl::ConsumePrefix(&rest_, ">")) Fail("an end tag with more than a name");
      return;
    }
    const absl::string_view name = Name();
    if (name.empty()) return Fail("a bare <");
    const bool is_data = Attributes();
    if (absl::ConsumePrefix(&rest_, "/>")) return;
    if (!absl::ConsumePrefix(&rest_, ">")) return Fail(absl::StrCat("<", name, " does not end"));
    if (IsVoid(name)) return;
    open_.push_back(name);
    if (name == "script" || name == "style") Raw(name, is_data);
  }

  // Whether there is a type: a script with one is data.
  bool Attributes() {
    bool has_type = false;
    std::vector<absl::string_view> names;
    while (absl::ConsumePrefix(&rest_, " ")) {
      const absl::string_view name = Name();
      if (name.empty()) Fail("an attribute without a name");
      if (absl::StartsWith(name, "on")) Fail("an event handler in an attribute");
      if (std::find(names.begin(), names.end(), name) != names.end()) Fail("an attribute twice");
      names.push_back(name);
      has_type = has_type || name == "type";
      if (!absl::ConsumePrefix(&rest_, "=")) continue;
      const size_t end = rest_.find('"', 1);
      if (rest_[0] != '"' || end == absl::string_view::npos) return Fail("a bare attribute"), false;
      CheckReferences(rest_.substr(1, end - 1));
      rest_.remove_prefix(end + 1);
    }
    return has_type;
  }

  void Raw(absl::string_view name, bool is_data) {
    const size_t end = rest_.find(absl::StrCat("</", name));
    if (end == absl::string_view::npos) return Fail("a script without an end");
    const std::string text(rest_.substr(0, end));
    if (is_data && name == "script" && !nlohmann::json::accept(text))
      Fail("data that does not parse");
    rest_.remove_prefix(end);
  }

  const absl::string_view html_;
  absl::string_view rest_;
  std::vector<absl::string_view> open_;
  std::string error_;
};

}  // namespace

std::string CheckPage(absl::string_view html) { return Page(html).Check(); }

}  // namespace evenkeel
