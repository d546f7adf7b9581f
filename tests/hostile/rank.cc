// One rank of a job that adds numbers, and checks every sum, until it is told to stop.
//
//   rank STOP_FILE SECONDS     rank 0 looks for STOP_FILE; when it is there, all ranks leave after
//     the same step.
//                              SECONDS: how long to wait for the other ranks at the start.
//
// Each step uses both planes: an all_reduce, and an exchange over the control plane. Rank 0 prints
// its progress, "<unix microseconds> <steps>", each rank in the end how it ended.

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr size_t kElements = 1 << 14;
constexpr absl::Duration kBetweenReports = absl::Milliseconds(20);
constexpr absl::Duration kPatience = absl::Seconds(60);

// Returns rank `rank`'s contribution in a step; sums of it are exact in float32.
float Value(int64_t step, int rank, size_t i) {
  return static_cast<float>((step * 31 + rank * 7 + i) % 1000);
}

absl::Status OneStep(Communicator& comm, int64_t step, std::vector<float>& data) {
  for (size_t i = 0; i < kElements; ++i) data[i] = Value(step, comm.rank(), i);
  EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kSum));
  for (size_t i = 0; i < kElements; ++i) {
    float expected = 0;
    for (int rank = 0; rank < comm.world_size(); ++rank) expected += Value(step, rank, i);
    if (data[i] == expected) continue;
    return absl::DataLossError(
        absl::StrCat("step ", step, ", element ", i, " is ", data[i], ", not ", expected));
  }
  return absl::OkStatus();
}

// Whether all ranks are to stop; rank 0 knows.
absl::StatusOr<bool> ExchangeStop(Communicator& comm, int64_t step, bool stop) {
  const std::string mine =
      comm.rank() == 0 && stop ? "stop" : absl::StrCat("rank ", comm.rank(), " step ", step);
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      comm.control().Exchange("hostile", mine, kPatience));
  for (int rank = 1; rank < comm.world_size(); ++rank) {
    if (parts[rank] == absl::StrCat("rank ", rank, " step ", step)) continue;
    return absl::DataLossError(
        absl::StrCat("step ", step, ": rank ", rank, " is said to have said ", parts[rank]));
  }
  return parts[0] == "stop";
}

absl::Status AddUntilStopped(Communicator& comm, const std::string& stop_file) {
  std::vector<float> data(kElements);
  absl::Time next_report = absl::InfinitePast();
  bool stop = false;
  for (int64_t step = 0; !stop; ++step) {
    bool is_time = false;
    if (comm.rank() == 0 && absl::Now() >= next_report) {
      std::cout << absl::StrCat(absl::ToUnixMicros(absl::Now()), " ", step, "\n") << std::flush;
      next_report = absl::Now() + kBetweenReports;
      is_time = access(stop_file.c_str(), F_OK) == 0;
    }
    EK_RETURN_IF_ERROR(OneStep(comm, step, data));
    EK_ASSIGN_OR_RETURN(stop, ExchangeStop(comm, step, is_time));
  }
  return comm.Finalize();
}

absl::Status Main(const std::string& stop_file, absl::Duration patience) {
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  absl::StatusOr<std::unique_ptr<Communicator>> comm =
      CreateCommunicator(environment, {.backend = "tcp", .connect_timeout = patience});
  const absl::Status status = comm.ok() ? AddUntilStopped(**comm, stop_file) : comm.status();
  std::cout << absl::StrCat("ends: ", status.ToString(), "\n") << std::flush;
  return status;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  if (argc != 3) return EXIT_FAILURE;
  return evenkeel::Main(argv[1], absl::Seconds(std::atof(argv[2]))).ok() ? EXIT_SUCCESS
                                                                         : EXIT_FAILURE;
}
