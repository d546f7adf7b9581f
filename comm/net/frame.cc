#include "evenkeel/comm/net/frame.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace evenkeel::internal {
namespace {

uint32_t NumberAt(const char* bytes) {
  uint32_t number = 0;
  for (size_t i = 0; i < kFrameHeader; ++i)
    number |= uint32_t{static_cast<uint8_t>(bytes[i])} << (8 * i);
  return number;
}

std::string After(uint32_t number, absl::string_view bytes) {
  std::string result;
  result.reserve(kFrameHeader + bytes.size());
  for (size_t i = 0; i < kFrameHeader; ++i) result.push_back(static_cast<char>(number >> (8 * i)));
  result.append(bytes.data(), bytes.size());
  return result;
}

}  // namespace

std::string Frame(absl::string_view payload) {
  return After(static_cast<uint32_t>(payload.size()), payload);
}

std::string OnLink(uint32_t link, absl::string_view payload) { return After(link, payload); }

std::optional<uint32_t> TakeLink(absl::string_view* payload) {
  if (payload->size() < kFrameHeader) return std::nullopt;
  const uint32_t link = NumberAt(payload->data());
  payload->remove_prefix(kFrameHeader);
  return link;
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
  const size_t length = NumberAt(buffer_.data() + begin_);
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
