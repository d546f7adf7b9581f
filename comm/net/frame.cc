#include "evenkeel/comm/net/frame.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace evenkeel::internal {
namespace {

uint32_t LengthAt(const char* bytes) {
  uint32_t length = 0;
  for (size_t i = 0; i < kFrameHeader; ++i)
    length |= uint32_t{static_cast<uint8_t>(bytes[i])} << (8 * i);
  return length;
}

}  // namespace

std::string Frame(absl::string_view payload) {
  std::string frame;
  frame.reserve(kFrameHeader + payload.size());
  for (size_t i = 0; i < kFrameHeader; ++i)
    frame.push_back(static_cast<char>(payload.size() >> (8 * i)));
  frame.append(payload.data(), payload.size());
  return frame;
}

void FrameParser::Append(absl::string_view bytes) {
  if (begin_ > 0 && begin_ >= buffer_.size() / 2) {  // Moves each byte once on average.
    buffer_.erase(0, begin_);
    begin_ = 0;
  }
  buffer_.append(bytes.data(), bytes.size());
}

absl::StatusOr<std::optional<std::string>> FrameParser::Next() {
  const size_t available = buffer_.size() - begin_;
  if (available < kFrameHeader) return std::nullopt;
  const size_t length = LengthAt(buffer_.data() + begin_);
  if (length > max_payload_) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a frame of ", length, " bytes was announced, at most ", max_payload_, " are allowed"));
  }
  if (available < kFrameHeader + length) return std::nullopt;
  std::string payload = buffer_.substr(begin_ + kFrameHeader, length);
  begin_ += kFrameHeader + length;
  if (begin_ == buffer_.size()) {
    buffer_.clear();
    begin_ = 0;
  }
  return payload;
}

}  // namespace evenkeel::internal
