// JSON text, written in the order of the calls: for records that must come out the same each time, and without a
// library in the core.
//
//   std::string out;
//   {
//     JsonJoined members(&out, '{', '}');
//     members.Add("\"rank\":", 3);
//     members.Add("\"name\":", JsonQuoted(name));
//   }                                            // {"rank":3,"name":"..."}
//
// Threads: thread-compatible.

#ifndef EVENKEEL_COMM_INTERNAL_JSON_H_
#define EVENKEEL_COMM_INTERNAL_JSON_H_

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

// A string with its quotes. What is no UTF-8 becomes U+FFFD, a byte each.
std::string JsonQuoted(absl::string_view text);

// Members or elements, with what stands between and, from its making to its end, around them.
class JsonJoined {
 public:
  JsonJoined(std::string* out, char open, char close) : out_(out), close_(close) { out_->push_back(open); }
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

#endif  // EVENKEEL_COMM_INTERNAL_JSON_H_
