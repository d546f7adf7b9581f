// Cuts a byte stream into frames: four bytes of length, then so many bytes.
//
//   FrameParser parser(kMaxFrame);
//   parser.Append(received);
//   while (true) {
//     EK_ASSIGN_OR_RETURN(std::optional<std::string> frame, parser.Next());
//     if (!frame) break;                      // more bytes are needed
//     ...
//   }
//
// A stream that announces a frame larger than the limit is broken for good: Next() answers InvalidArgument from then
// on. Memory is taken for bytes that have arrived, never for bytes that were announced.

#ifndef EVENKEEL_COMM_INTERNAL_FRAME_H_
#define EVENKEEL_COMM_INTERNAL_FRAME_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

inline constexpr size_t kFrameHeader = 4;
// For peers that have proved who they are.
inline constexpr size_t kMaxFrame = size_t{256} << 20;
// For everybody else.
inline constexpr size_t kMaxGreetingFrame = 2048;

// `payload` with its length in front. It must not be larger than what the receiver takes.
std::string Frame(absl::string_view payload);

class FrameParser {
 public:
  explicit FrameParser(size_t max_payload) : max_payload_(max_payload) {}

  // For the frames that Next() has not given yet.
  void set_max_payload(size_t max_payload) { max_payload_ = max_payload; }
  void Append(absl::string_view bytes);
  absl::StatusOr<std::optional<std::string>> Next();

 private:
  size_t max_payload_;
  std::string buffer_;
  size_t begin_ = 0;  // Of what is not consumed in `buffer_`.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_FRAME_H_
