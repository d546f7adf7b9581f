#include "evenkeel/comm/net/frame.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/bytes.h"

namespace evenkeel::internal {
namespace {

std::string After(uint32_t number, absl::string_view bytes) {
  char header[kFrameHeader];
  PutInteger(number, kFrameHeader, header);
  return absl::StrCat(absl::string_view(header, kFrameHeader), bytes);
}

}  // namespace

std::string Frame(absl::string_view payload) {
  return After(static_cast<uint32_t>(payload.size()), payload);
}

std::string OnLink(uint32_t link, absl::string_view payload) { return After(link, payload); }

std::optional<uint32_t> TakeLink(absl::string_view* payload) {
  if (payload->size() < kFrameHeader) return std::nullopt;
  const auto link = static_cast<uint32_t>(GetInteger(payload->data(), kFrameHeader));
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
  const size_t length = GetInteger(buffer_.data() + begin_, kFrameHeader);
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
