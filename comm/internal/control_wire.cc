#include "evenkeel/comm/internal/control_wire.h"

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

void WriteParts(ByteWriter& writer, const std::vector<EqualParts>& parts) {
  writer.U32(static_cast<uint32_t>(parts.size()));
  for (const EqualParts& run : parts) writer.I64(run.count).Bytes(run.part);
}

void ReadParts(ByteReader& reader, std::vector<EqualParts>& parts) {
  const uint32_t runs = reader.U32();
  for (uint32_t run = 0; run < runs && reader.ok(); ++run) {
    const int64_t count = reader.I64();
    parts.push_back({count, std::string(reader.Bytes())});
  }
}

}  // namespace

std::string Serialize(const ControlMessage& message) {
  ByteWriter writer;
  writer.U8(static_cast<uint8_t>(message.type)).I32(message.rank).I64(message.sequence).I64(message.request);
  writer.I32(static_cast<int>(message.code)).Bytes(message.topic).Bytes(message.payload);
  WriteParts(writer, message.parts);
  return writer.Take();
}

absl::StatusOr<ControlMessage> ParseControlMessage(absl::string_view bytes) {
  ByteReader reader(bytes);
  ControlMessage message;
  const uint8_t type = reader.U8();
  message.type = static_cast<ControlMessage::Type>(type);
  message.rank = reader.I32();
  message.sequence = reader.I64();
  message.request = reader.I64();
  const int code = reader.I32();
  message.code = static_cast<absl::StatusCode>(code);
  message.topic = std::string(reader.Bytes());
  message.payload = std::string(reader.Bytes());
  ReadParts(reader, message.parts);
  EK_RETURN_IF_ERROR(reader.Finish("control message"));
  if (type > static_cast<uint8_t>(ControlMessage::Type::kRegrouped)) {
    return absl::InvalidArgumentError("control message: unknown type");
  }
  if (code < 0 || code > static_cast<int>(absl::StatusCode::kUnauthenticated)) {
    return absl::InvalidArgumentError("control message: unknown code");
  }
  return message;
}

}  // namespace evenkeel::internal
