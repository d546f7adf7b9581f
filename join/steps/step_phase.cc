#include "evenkeel/join/steps/step_phase.h"

#include "evenkeel/comm/base/bytes.h"

namespace evenkeel {
namespace {

// Sums over many steps remain far from overflow.
int64_t ReadMicroseconds(internal::ByteReader& reader) {
  const uint64_t value = reader.Varint();
  if (value > uint64_t{1} << 50) reader.Refuse();
  return static_cast<int64_t>(value);
}

}  // namespace

absl::string_view NameOf(StepPhase phase) {
  static constexpr absl::string_view kNames[kStepPhases] = {
      "outside of the step", "input", "forward", "backward", "optimizer", "saving"};
  return kNames[static_cast<size_t>(phase)];
}

void PhaseTimes::Write(internal::ByteWriter& writer) const {
  for (const int64_t busy : busy_us) writer.Varint(static_cast<uint64_t>(busy));
  writer.Varint(static_cast<uint64_t>(waited_us));
}

PhaseTimes PhaseTimes::Read(internal::ByteReader& reader) {
  PhaseTimes times;
  for (int64_t& busy : times.busy_us) busy = ReadMicroseconds(reader);
  times.waited_us = ReadMicroseconds(reader);
  return times;
}

void BucketsReady::Write(internal::ByteWriter& writer) const {
  writer.Varint(static_cast<uint64_t>(first_us));
  writer.Varint(static_cast<uint64_t>(last_us));
}

BucketsReady BucketsReady::Read(internal::ByteReader& reader) {
  BucketsReady ready;
  ready.first_us = ReadMicroseconds(reader);
  ready.last_us = ReadMicroseconds(reader);
  return ready;
}

}  // namespace evenkeel
