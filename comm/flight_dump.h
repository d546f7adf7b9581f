// The file of a rank's flight record: one JSON object, which `//tools:flight` merges with those of
// the other ranks.
//
//   EK_RETURN_IF_ERROR(WriteFlight("/tmp/job/world.rank3.json",
//                                  FlightJson(header, recorder.Entries())));
//
// Form:
//
//   {"version":1, "group":"world", "rank":3, "world_size":4, "backend":"tcp",
//    "time":"2026-11-20T14:05:06.123456Z",
//    "status":{"code":"UNAVAILABLE", "message":"rank 1 of 4 is lost: ..."},
//    "waits":["#412 barrier (user)", ...],
//    "channels":[{"id":"00c5...", "name":"user", "position":413}, ...],
//    "entries":[{"number":812, "channel":"00c5...", "sequence":412, "kind":"all_reduce",
//                "dtype":"float32", "count":1048576, "op":"sum", "root":-1, "role":"bucket",
//                "index":2, "index_count":5, "tag":0,
//                "text":"all_reduce bucket 2/5 float32[1048576] sum", "hash":"31ab...",
//                "issued_us":1795183506123456, "ended_us":null, "state":"open", "code":"OK"},
//               ...]}
//
// Times are in microseconds since 1970. A state is open, done or failed. The file is UTF-8,
// whatever bytes a name or a message contains.
//
// Errors: those of the file system, with the path. A file is complete or absent.

#ifndef EVENKEEL_COMM_FLIGHT_DUMP_H_
#define EVENKEEL_COMM_FLIGHT_DUMP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/flight_recorder.h"

namespace evenkeel {

// The content of a dump beside the entries.
struct FlightHeader {
  struct Channel {
    uint64_t id = 0;
    std::string name;
    int64_t position = 0;
  };
  std::string group;
  int rank = 0;
  int world_size = 1;
  std::string backend;
  absl::Time time;
  absl::Status status;             // The group's status.
  std::vector<std::string> waits;  // The waits of this rank's threads.
  std::vector<Channel> channels;
};

std::string FlightJson(const FlightHeader& header, absl::Span<const FlightEntry> entries);

// Writes a temporary file beside `path`, then renames it.
absl::Status WriteFlight(const std::string& path, absl::string_view json);

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_FLIGHT_DUMP_H_
