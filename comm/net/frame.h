// Splits a byte stream into frames: a length of four bytes, then that many bytes.
//
//   FrameParser parser(kMaxFrame);
//   parser.Append(received);
//   while (true) {
//     EK_ASSIGN_OR_RETURN(std::optional<std::string> frame, parser.Next());
//     if (!frame) break;                      // more bytes are needed
//     ...
//   }
//
// A stream that announces a frame above the limit is broken for good: Next() returns
// InvalidArgument from then on. Memory is taken for bytes that have arrived, never for bytes that
// were announced.

#ifndef EVENKEEL_COMM_NET_FRAME_H_
#define EVENKEEL_COMM_NET_FRAME_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

inline constexpr size_t kFrameHeader = 4;
// For authenticated peers.
inline constexpr size_t kMaxFrame = size_t{256} << 20;
// The same for a payload that begins with a link's number.
inline constexpr size_t kMaxLinkFrame = kMaxFrame + kFrameHeader;
// For all others.
inline constexpr size_t kMaxGreetingFrame = 2048;

// Returns `payload` after its length. It must not be above the receiver's limit.
std::string Frame(absl::string_view payload);

// Returns `payload` behind the number of its link, as a connection with many links sends it
// (Hello::Kind::kLinks).
std::string OnLink(uint32_t link, absl::string_view payload);
// Removes the link's number from the beginning of `payload` and returns it; nullopt if `payload` is
// too short.
std::optional<uint32_t> TakeLink(absl::string_view* payload);

class FrameParser {
 public:
  explicit FrameParser(size_t max_payload) : max_payload_(max_payload) {}

  // Applies to the frames that Next() has not returned yet.
  void set_max_payload(size_t max_payload) { max_payload_ = max_payload; }
  void Append(absl::string_view bytes);
  absl::StatusOr<std::optional<std::string>> Next();

 private:
  size_t max_payload_;
  std::string buffer_;
  size_t begin_ = 0;  // Start of the unread bytes in `buffer_`.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NET_FRAME_H_
