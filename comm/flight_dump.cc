#include "evenkeel/comm/flight_dump.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/json.h"
#include "evenkeel/comm/base/unique_fd.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {
namespace {

using internal::JsonJoined;
using internal::JsonQuoted;

std::string Id(uint64_t id) { return absl::StrCat("\"", absl::Hex(id, absl::kZeroPad16), "\""); }

std::string Json(const FlightEntry& entry) {
  const Collective& what = entry.what;
  const absl::string_view state = entry.is_open()                       ? "open"
                                  : entry.code == absl::StatusCode::kOk ? "done"
                                                                        : "failed";
  std::string out;
  {
    JsonJoined members(&out, '{', '}');
    members.Add("\"number\":", entry.number);
    members.Add("\"channel\":", Id(entry.channel));
    members.Add("\"sequence\":", entry.sequence);
    members.Add("\"kind\":", JsonQuoted(ToString(what.kind)));
    members.Add("\"dtype\":", JsonQuoted(ToString(what.dtype)));
    members.Add("\"count\":", what.count);
    members.Add("\"op\":", JsonQuoted(ToString(what.op)));
    members.Add("\"root\":", what.root);
    members.Add("\"role\":", JsonQuoted(ToString(what.role)));
    members.Add("\"index\":", what.index);
    members.Add("\"index_count\":", what.index_count);
    members.Add("\"tag\":", what.tag);
    members.Add("\"text\":", JsonQuoted(ToString(what)));
    members.Add("\"hash\":", Id(HashOf(what)));
    members.Add("\"issued_us\":", absl::ToUnixMicros(entry.issued));
    members.Add("\"ended_us\":",
                entry.is_open() ? "null" : absl::StrCat(absl::ToUnixMicros(entry.ended)));
    members.Add("\"state\":", JsonQuoted(state));
    members.Add("\"code\":", JsonQuoted(absl::StatusCodeToString(entry.code)));
  }
  return out;
}

absl::Status SystemError(absl::string_view what, absl::string_view path) {
  return absl::ErrnoToStatus(errno, absl::StrCat("a flight record cannot be ", what, ": ", path));
}

}  // namespace

std::string FlightJson(const FlightHeader& header, absl::Span<const FlightEntry> entries) {
  std::string out;
  {
    JsonJoined members(&out, '{', '}');
    members.Add("\"version\":1");
    members.Add("\"group\":", JsonQuoted(header.group));
    members.Add("\"rank\":", header.rank);
    members.Add("\"world_size\":", header.world_size);
    members.Add("\"backend\":", JsonQuoted(header.backend));
    members.Add("\"time\":", JsonQuoted(absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", header.time,
                                                         absl::UTCTimeZone())));
    members.Add("\"status\":{\"code\":", JsonQuoted(absl::StatusCodeToString(header.status.code())),
                ",\"message\":", JsonQuoted(header.status.message()), "}");
    members.Add("\"waits\":");
    {
      JsonJoined waits(&out, '[', ']');
      for (const std::string& wait : header.waits) waits.Add(JsonQuoted(wait));
    }
    members.Add("\"channels\":");
    {
      JsonJoined channels(&out, '[', ']');
      for (const FlightHeader::Channel& channel : header.channels) {
        channels.Add("{\"id\":", Id(channel.id), ",\"name\":", JsonQuoted(channel.name),
                     ",\"position\":", channel.position, "}");
      }
    }
    members.Add("\n\"entries\":");
    {
      JsonJoined list(&out, '[', ']');
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
  absl::Status status;  // Not synced: a slow disk must not delay heartbeats.
  if (!internal::WriteAll(file, json)) status = SystemError("written", path);
  if (close(file) != 0 && status.ok()) status = SystemError("written", path);
  if (status.ok() && rename(beside.c_str(), path.c_str()) != 0)
    status = SystemError("renamed", path);
  if (!status.ok()) unlink(beside.c_str());
  return status;
}

}  // namespace evenkeel
