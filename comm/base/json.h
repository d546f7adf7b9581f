// JSON text, written in the order of the calls: for records that must be equal each time, and
// without a JSON library in the core.
//
//   std::string out;
//   {
//     JsonJoined members(&out, '{', '}');
//     members.Add("\"rank\":", 3);
//     members.Add("\"name\":", JsonQuoted(name));
//   }                                            // {"rank":3,"name":"..."}
//
// Threads: thread-compatible.

#ifndef EVENKEEL_COMM_BASE_JSON_H_
#define EVENKEEL_COMM_BASE_JSON_H_

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

// Returns the size of the UTF-8 character at the beginning of `text`, which is not empty; 0 if it
// is invalid.
size_t Utf8Size(absl::string_view text);

// Returns a string with its quotes. Each byte that is not part of valid UTF-8 becomes U+FFFD.
std::string JsonQuoted(absl::string_view text);

// Writes members or elements with commas between them; its constructor and destructor write the
// brackets.
class JsonJoined {
 public:
  JsonJoined(std::string* out, char open, char close) : out_(out), close_(close) {
    out_->push_back(open);
  }
  ~JsonJoined() { out_->push_back(close_); }
  JsonJoined(const JsonJoined&) = delete;
  JsonJoined& operator=(const JsonJoined&) = delete;

  template <typename... Parts>
  void Add(const Parts&... parts) {
    if (!is_first_) out_->push_back(',');
    is_first_ = false;
    absl::StrAppend(out_, parts...);
  }

 private:
  std::string* const out_;
  const char close_;
  bool is_first_ = true;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_JSON_H_
