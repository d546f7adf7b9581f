// One rank of a job that trains, saves, and checks a sum in each step, until it is told to stop.
//
//   rank STOP_FILE SECONDS [FOLDER [STEPS [CANDIDATES]]]
//
// STOP_FILE:  rank 0 looks for it; when it is there, all ranks leave after the same step.
// SECONDS:    how long to wait for the other ranks at the start.
// FOLDER:     for checkpoints, one every kSaveEvery steps, and the weights in the end.
// STEPS:      after which they leave; 0: only STOP_FILE ends the job.
// CANDIDATES: host:port,host:port..., where the ranks look for their store; rank 0 takes the first
//             one that is free.
//
// HOSTILE_THREADS: the number of threads that it can start; HOSTILE_BACKEND: instead of tcp.
//
// Each step uses both planes: collectives, and an exchange over the control plane. Rank 0 prints
// its progress, "<unix microseconds> <steps>", each rank in the end how it ended.

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/few_threads.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/test_model.h"

namespace evenkeel {
namespace {

constexpr size_t kElements = 1 << 14;
constexpr absl::Duration kBetweenReports = absl::Milliseconds(20);
constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr absl::Duration kCompute = absl::Milliseconds(5);  // Of a step; it leaves the cores idle.
constexpr int kSaveEvery = 50;

struct Arguments {
  std::string stop_file, folder;
  absl::Duration patience;
  int64_t steps = 0;
  std::vector<std::string> candidates;
  std::string backend = "tcp";
};

// Returns rank `rank`'s contribution in a step; sums of it are exact in float32.
float Value(int64_t step, int rank, size_t i) {
  return static_cast<float>((step * 31 + rank * 7 + i) % 1000);
}

absl::Status CheckSum(Communicator& comm, int64_t step, std::vector<float>& data) {
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

absl::Status TrainUntilStopped(Communicator& comm, const Arguments& arguments) {
  internal::TestModel model({300, 70, 1, 500});
  EK_ASSIGN_OR_RETURN(const auto ddp, DataParallel::Create(&comm, &model.params(), {}));
  EK_ASSIGN_OR_RETURN(const auto optimizer, Optimizer::Create(*ddp, AdamW{.learning_rate = 1e-3},
                                                              {.placement = WholeTensors{}}));
  std::vector<float> data(kElements);
  absl::Time next_report = absl::InfinitePast();
  PendingSave save;
  bool stop = false;
  int64_t step = 0;
  for (; !stop; ++step) {
    bool is_time = arguments.steps > 0 && step + 1 >= arguments.steps;
    if (comm.rank() == 0 && absl::Now() >= next_report) {
      std::cout << absl::StrCat(absl::ToUnixMicros(absl::Now()), " ", step, "\n") << std::flush;
      next_report = absl::Now() + kBetweenReports;
      is_time |= access(arguments.stop_file.c_str(), F_OK) == 0;
    }
    EK_RETURN_IF_ERROR(CheckSum(comm, step, data));
    model.params().ClearGradients();
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    absl::SleepFor(kCompute);
    model.Backward(comm.rank(), static_cast<int>(step % 1000));
    for (int param = 0; param < model.size(); ++param)
      EK_RETURN_IF_ERROR(ddp->GradientReady(param));
    EK_RETURN_IF_ERROR(ddp->FinishStep());
    EK_RETURN_IF_ERROR(optimizer->Step());
    if (step % kSaveEvery == 0 && !arguments.folder.empty()) {
      EK_RETURN_IF_ERROR(save.Wait(kPatience));
      EK_ASSIGN_OR_RETURN(save, optimizer->SaveAsync(absl::StrCat(arguments.folder, "/", step)));
    }
    EK_ASSIGN_OR_RETURN(stop, ExchangeStop(comm, step, is_time));
  }
  EK_RETURN_IF_ERROR(save.Wait(kPatience));
  std::cout << absl::StrCat("steps ", step, "\n");
  if (!arguments.folder.empty())
    std::ofstream(absl::StrCat(arguments.folder, "/weights", comm.rank())) << model.Bytes();
  return comm.Finalize();
}

absl::Status Main(const Arguments& arguments) {
  EK_ASSIGN_OR_RETURN(Environment environment, ReadEnvironment());
  if (!arguments.candidates.empty()) {
    environment.store_folder.clear();
    environment.store_addresses = arguments.candidates;
  }
  absl::StatusOr<std::unique_ptr<Communicator>> comm = CreateCommunicator(
      environment, {.backend = arguments.backend, .connect_timeout = arguments.patience});
  const absl::Status status = comm.ok() ? TrainUntilStopped(**comm, arguments) : comm.status();
  std::cout << absl::StrCat("ends: ", status.ToString(), "\n") << std::flush;
  return status;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  if (argc < 3 || argc > 6) return EXIT_FAILURE;
  evenkeel::Arguments arguments{.stop_file = argv[1],
                                .folder = argc > 3 ? argv[3] : "",
                                .patience = absl::Seconds(std::atof(argv[2])),
                                .steps = argc > 4 ? std::atol(argv[4]) : 0};
  if (argc > 5) arguments.candidates = absl::StrSplit(argv[5], ',');
  if (const char* const threads = std::getenv("HOSTILE_THREADS"); threads != nullptr)
    evenkeel::LetThreadsStart(std::atoi(threads));
  if (const char* const backend = std::getenv("HOSTILE_BACKEND"); backend != nullptr)
    arguments.backend = backend;
  return evenkeel::Main(arguments).ok() ? EXIT_SUCCESS : EXIT_FAILURE;
}
