#include "evenkeel/comm/flight_dump.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {
namespace {

// Bytes of the UTF-8 character that `text` begins with; 0: it begins with none.
size_t CharacterAt(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  const size_t size = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  if (size == 0 || size > text.size()) return 0;
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Longer than needed, half of a UTF-16 pair, or past the last character there is.
  if (first == 0xe0 && byte(1) < 0xa0) return 0;
  if (first == 0xed && byte(1) >= 0xa0) return 0;
  if (first == 0xf0 && byte(1) < 0x90) return 0;
  if (first == 0xf4 && byte(1) >= 0x90) return 0;
  return size;
}

std::string Quoted(absl::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const size_t size = CharacterAt(text);
    const char c = text[0];
    if (size == 0) {
      absl::StrAppend(&out, "\\ufffd");
    } else if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<uint8_t>(c) < 0x20 || c == 0x7f) {
      absl::StrAppend(&out, "\\u", absl::Hex(static_cast<uint8_t>(c), absl::kZeroPad4));
    } else {
      out.append(text.data(), size);
    }
    text.remove_prefix(size == 0 ? 1 : size);
  }
  out += '"';
  return out;
}

std::string Id(uint64_t id) { return absl::StrCat("\"", absl::Hex(id, absl::kZeroPad16), "\""); }

// Members and elements with what stands between and around them.
class Joined {
 public:
  Joined(std::string* out, char open, char close) : out_(out), close_(close) { out_->push_back(open); }
  ~Joined() { out_->push_back(close_); }
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

std::string Json(const FlightEntry& entry) {
  const Collective& what = entry.what;
  const absl::string_view state = entry.is_open() ? "open" : entry.code == absl::StatusCode::kOk ? "done" : "failed";
  std::string out;
  {
    Joined members(&out, '{', '}');
    members.Add("\"number\":", entry.number);
    members.Add("\"channel\":", Id(entry.channel));
    members.Add("\"sequence\":", entry.sequence);
    members.Add("\"kind\":", Quoted(ToString(what.kind)));
    members.Add("\"dtype\":", Quoted(ToString(what.dtype)));
    members.Add("\"count\":", what.count);
    members.Add("\"op\":", Quoted(ToString(what.op)));
    members.Add("\"root\":", what.root);
    members.Add("\"role\":", Quoted(ToString(what.role)));
    members.Add("\"index\":", what.index);
    members.Add("\"index_count\":", what.index_count);
    members.Add("\"text\":", Quoted(ToString(what)));
    members.Add("\"hash\":", Id(HashOf(what)));
    members.Add("\"issued_us\":", absl::ToUnixMicros(entry.issued));
    members.Add("\"ended_us\":", entry.is_open() ? "null" : absl::StrCat(absl::ToUnixMicros(entry.ended)));
    members.Add("\"state\":", Quoted(state));
    members.Add("\"code\":", Quoted(absl::StatusCodeToString(entry.code)));
  }
  return out;
}

absl::Status SystemError(absl::string_view what, absl::string_view path) {
  return absl::ErrnoToStatus(errno, absl::StrCat("a flight record can't be ", what, ": ", path));
}

absl::Status Write(int file, absl::string_view path, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(file, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return SystemError("written", path);
    bytes.remove_prefix(written);
  }
  return absl::OkStatus();  // Not synced: a slow disk must not hold up heartbeats.
}

}  // namespace

std::string FlightJson(const FlightHeader& header, absl::Span<const FlightEntry> entries) {
  std::string out;
  {
    Joined members(&out, '{', '}');
    members.Add("\"version\":1");
    members.Add("\"group\":", Quoted(header.group));
    members.Add("\"rank\":", header.rank);
    members.Add("\"world_size\":", header.world_size);
    members.Add("\"backend\":", Quoted(header.backend));
    members.Add("\"time\":", Quoted(absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", header.time, absl::UTCTimeZone())));
    members.Add("\"status\":{\"code\":", Quoted(absl::StatusCodeToString(header.status.code())),
                ",\"message\":", Quoted(header.status.message()), "}");
    members.Add("\"waits\":");
    {
      Joined waits(&out, '[', ']');
      for (const std::string& wait : header.waits) waits.Add(Quoted(wait));
    }
    members.Add("\"channels\":");
    {
      Joined channels(&out, '[', ']');
      for (const FlightHeader::Channel& channel : header.channels) {
        channels.Add("{\"id\":", Id(channel.id), ",\"name\":", Quoted(channel.name), ",\"position\":", channel.position,
                     "}");
      }
    }
    members.Add("\n\"entries\":");
    {
      Joined list(&out, '[', ']');
      for (const FlightEntry& entry : entries) list.Add("\n", Json(entry));
    }
  }
  out += '\n';
  return out;
}

absl::Status WriteFlight(const std::string& path, absl::string_view json) {
  // Two dumps of one rank at a time must not write into one file.
  static std::atomic<int> count = 0;
  const std::string beside = absl::StrCat(path, ".part", getpid(), "-", count++);
  const int file = open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0) return SystemError("written", path);
  absl::Status status = Write(file, path, json);
  if (close(file) != 0 && status.ok()) status = SystemError("written", path);
  if (status.ok() && rename(beside.c_str(), path.c_str()) != 0) status = SystemError("renamed", path);
  if (!status.ok()) unlink(beside.c_str());
  return status;
}

}  // namespace evenkeel
