#include "evenkeel/trainer/report/tensorboard.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cstdint>
#include <filesystem>
#include <span>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/report/crc32c.h"
#include "evenkeel/trainer/report/gather_records.h"

namespace evenkeel {
namespace {

using internal::ByteWriter;

// Numbers of fields. Event:
constexpr uint32_t kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;
// Summary, and its Value:
constexpr uint32_t kValue = 1, kTag = 1, kSimpleValue = 2, kTensor = 8, kMetadata = 9;
// SummaryMetadata, its PluginData, and TensorProto with its type of strings:
constexpr uint32_t kPlugin = 1, kPluginName = 1, kType = 1, kStringValue = 8;
constexpr int64_t kStrings = 7;
// SessionLog, and the status that makes readers discard the steps from the event's on:
constexpr uint32_t kStatus = 1;
constexpr int64_t kStart = 1;

// The types of fields on the wire.
constexpr uint32_t kVarint = 0, kFixed64 = 1, kLength = 2, kFixed32 = 5;

// Each returns a field of a message in the wire format of Protocol Buffers. A message is its
// fields, one after the other; a nested message is the text of a field.
std::string IntField(uint32_t field, int64_t value) {
  return ByteWriter().Varint(field << 3 | kVarint).Varint(static_cast<uint64_t>(value)).Take();
}
std::string FloatField(uint32_t field, float value) {
  return ByteWriter().Varint(field << 3 | kFixed32).U32(std::bit_cast<uint32_t>(value)).Take();
}
std::string DoubleField(uint32_t field, double value) {
  return ByteWriter().Varint(field << 3 | kFixed64).F64(value).Take();
}
std::string TextField(uint32_t field, absl::string_view value) {
  return absl::StrCat(ByteWriter().Varint(field << 3 | kLength).Varint(value.size()).Take(), value);
}

// Length, its checksum, payload, its checksum.
std::string Record(absl::string_view payload) {
  const std::string length = ByteWriter().U64(payload.size()).Take();
  return absl::StrCat(length, ByteWriter().U32(MaskedCrc32c(length)).Take(), payload,
                      ByteWriter().U32(MaskedCrc32c(payload)).Take());
}

std::string WallTime(absl::Time time) {
  return DoubleField(kWallTime, static_cast<double>(absl::ToUnixMicros(time)) / 1e6);
}

class EventFile : public MetricsSink {
 public:
  EventFile(std::string path, int file) : path_(std::move(path)), file_(file) {}
  ~EventFile() override { close(file_); }

  absl::Status Begin(absl::Time time) {
    return Append(WallTime(time) + TextField(kFileVersion, "brain.Event:2"));
  }

  absl::Status Write(int64_t step, absl::Time time, std::span<const Scalar> scalars) override {
    std::string summary;
    for (const Scalar& scalar : scalars) {
      const float value = static_cast<float>(scalar.value);
      summary += TextField(kValue, TextField(kTag, scalar.name) + FloatField(kSimpleValue, value));
    }
    return AppendSummary(step, time, summary);
  }

  absl::Status WriteText(int64_t step, absl::Time time, absl::string_view name,
                         absl::string_view text) override {
    // TensorBoard renders Markdown; an indent of four spaces shows the line verbatim.
    const std::string verbatim =
        absl::StrCat("    ", absl::StrReplaceAll(text, {{"\n", "\n    "}}));
    const std::string tensor = IntField(kType, kStrings) + TextField(kStringValue, verbatim);
    const std::string metadata = TextField(kPlugin, TextField(kPluginName, "text"));
    const std::string value =
        TextField(kTag, name) + TextField(kTensor, tensor) + TextField(kMetadata, metadata);
    return AppendSummary(step, time, TextField(kValue, value));
  }

  absl::Status GoBackTo(int64_t step, absl::Time time) override {
    return Append(WallTime(time) + IntField(kStep, step) +
                  TextField(kSessionLog, IntField(kStatus, kStart)));
  }

 private:
  absl::Status AppendSummary(int64_t step, absl::Time time, absl::string_view summary) {
    return Append(WallTime(time) + IntField(kStep, step) + TextField(kSummary, summary));
  }

  // One call for the whole record, which the system appends as one.
  absl::Status Append(absl::string_view event) {
    const std::string record = Record(event);
    for (absl::string_view left = record; !left.empty();) {
      const ssize_t written = write(file_, left.data(), left.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0)
        return Undo(absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path_)));
      left.remove_prefix(static_cast<size_t>(written));
    }
    size_ += static_cast<int64_t>(record.size());
    return absl::OkStatus();
  }

  // Readers stop at an incomplete record.
  absl::Status Undo(const absl::Status& status) const {
    if (ftruncate(file_, size_) == 0) return status;
    return absl::ErrnoToStatus(errno, absl::StrCat(status.message(), "; cannot shorten it"));
  }

  const std::string path_;
  const int file_;
  int64_t size_ = 0;  // Bytes of complete records.
};

// TensorBoard reads the files of a folder in the order of their names.
std::string FileName(absl::Time now) {
  static std::atomic<int> number = 0;
  const std::string host = HostName();
  return absl::StrFormat("events.out.tfevents.%010d.%s.%d.%d", absl::ToUnixSeconds(now),
                         host.empty() ? "localhost" : host, getpid(), number++);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsSink>> OpenTensorboard(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error)
    return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot make the folder ", folder));
  const absl::Time now = absl::Now();
  const std::string path = absl::StrCat(folder, "/", FileName(now));
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
  if (file < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", path));
  auto events = std::make_unique<EventFile>(path, file);
  EK_RETURN_IF_ERROR(events->Begin(now));
  return events;
}

}  // namespace evenkeel
