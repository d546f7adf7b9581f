// Prints how each of the cases of cases.h ends, on every rank.
//
//   bazel run //tests:six_cases                        all cases, over threads (local) and
//     processes (tcp)
//   bazel run //tests:six_cases -- --backends=shm,hierarchical,simulated_nccl
//
// The exit code is 1 if a promise is broken; the broken ones are printed below the table.

#include <algorithm>
#include <cstdio>
#include <future>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/tests/child_processes.h"
#include "evenkeel/tests/six_cases/cases.h"
#include "gflags/gflags.h"

DEFINE_string(backends, "local,tcp",
              "Which backends: local, simulated_nccl (ranks are threads), tcp, shm, hierarchical "
              "(ranks are processes; "
              "hierarchical: of two hosts, as far as shared memory goes).");
DEFINE_double(hang_s, 20, "After so many seconds a case hangs, and is ended.");
DEFINE_bool(at_once, false,
            "Runs the cases at the same time; the seconds then depend on each other.");
DEFINE_int32(rank_of_case, -1, "Internal: this process is a rank of that case.");
DEFINE_string(backend, "", "Internal: that rank's.");
DEFINE_int32(inputs, 0, "Internal: that rank's.");

namespace evenkeel {
namespace {

// Far beyond what the table allows: no deadline of an operation may be what ends a case.
constexpr absl::Duration kTimeout = absl::Seconds(15);
constexpr char kSecret[] = "of the six cases";

using Reports = std::vector<RankReport>;

absl::Status RunAsRank() {
  EndWithParent();
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm,
                      CreateCommunicator(environment, {.backend = FLAGS_backend,
                                                       .communicator = {.timeout = kTimeout}}));
  std::cout << ToLine(RunCase(kUnevenCases[FLAGS_rank_of_case], FLAGS_inputs, *comm)) << std::flush;
  return absl::OkStatus();
}

absl::StatusOr<Reports> RunAsProcesses(const std::string& backend, int number,
                                       const std::vector<int>& inputs) {
  const int world_size = static_cast<int>(inputs.size());
  EK_ASSIGN_OR_RETURN(
      std::unique_ptr<TcpStoreServer> server,
      TcpStoreServer::Create(
          {.secret = kSecret, .world_size = world_size, .host = "the table's program"}));
  ChildProcesses ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    Variables variables = RankVariables(rank, world_size, server->address(), kSecret);
    if (backend == "hierarchical") variables["EVENKEEL_HOST_PARTS"] = "2";
    EK_RETURN_IF_ERROR(
        ranks.Start({ThisProgram(), absl::StrCat("--rank_of_case=", number),
                     absl::StrCat("--inputs=", inputs[rank]), absl::StrCat("--backend=", backend)},
                    variables));
  }
  Reports reports(world_size);
  absl::Status status;
  ranks.Listen(absl::Now() + absl::Seconds(FLAGS_hang_s), [&](int, absl::string_view line) {
    absl::StatusOr<RankReport> report = ReportFromLine(line);
    if (report.ok()) {
      reports[report->rank] = *std::move(report);
    } else {
      status = report.status();
    }
  });
  for (int rank = 0; rank < world_size; ++rank) {
    std::cerr << ranks.complaints(rank);
    if (!ranks.is_running(rank) && ranks.exit_code(rank) != 0) {
      status.Update(absl::InternalError(
          absl::StrCat("rank ", rank, " ended with code ", ranks.exit_code(rank))));
    }
  }
  EK_RETURN_IF_ERROR(status);
  return reports;
}

absl::StatusOr<Reports> RunAsThreads(const TestBackend& backend, int number,
                                     const std::vector<int>& inputs) {
  EK_ASSIGN_OR_RETURN(TestGroup group,
                      backend.create(static_cast<int>(inputs.size()), {.timeout = kTimeout}));
  Reports reports(inputs.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    threads.emplace_back(
        [&, rank] { reports[rank] = RunCase(kUnevenCases[number], inputs[rank], *group[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  return reports;
}

void PrintRow(const UnevenCase& uneven, absl::string_view backend, const std::vector<int>& inputs,
              const Reports& reports) {
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const RankReport& report = reports[rank];
    const absl::Status& status = report.result.status;
    const std::string outcome = report.ended == 0 ? "HANGS" : status.ok() ? "success" : "error";
    absl::PrintF("%-34s %-14s %-6s %4d  %-8s %7.3f  %s\n", uneven.name, backend,
                 absl::StrJoin(inputs, ","), rank, outcome,
                 report.ended == 0 ? 0 : SecondsSinceDivergence(reports, static_cast<int>(rank)),
                 status.ok() ? "" : status.message());
  }
  std::fflush(stdout);
}

int PrintTable() {
  std::vector<std::string> broken;
  absl::PrintF("%-34s %-14s %-6s %4s  %-8s %7s  %s\n", "case", "backend", "inputs", "rank",
               "outcome", "seconds", "message");
  for (const std::string& backend : std::vector<std::string>(absl::StrSplit(FLAGS_backends, ','))) {
    const TestBackend* const known = FindTestBackend(backend);
    if (known == nullptr) {
      std::cerr << "six_cases: there is no backend " << backend << " here: see --help\n";
      return 2;
    }
    const bool are_threads = backend == "local" || backend == "simulated_nccl";
    for (const std::vector<int>& inputs : {std::vector<int>{5, 6}, {3, 0, 2}}) {
      const auto when = FLAGS_at_once ? std::launch::async : std::launch::deferred;
      std::vector<std::future<absl::StatusOr<Reports>>> runs;
      for (int number = 0; number < static_cast<int>(std::size(kUnevenCases)); ++number) {
        runs.push_back(std::async(when, [&, number] {
          return are_threads ? RunAsThreads(*known, number, inputs)
                             : RunAsProcesses(backend, number, inputs);
        }));
      }
      for (int number = 0; number < static_cast<int>(std::size(kUnevenCases)); ++number) {
        const UnevenCase& uneven = kUnevenCases[number];
        const absl::StatusOr<Reports> reports = runs[number].get();
        if (!reports.ok()) {
          broken.push_back(absl::StrCat(uneven.name, ": ", reports.status().ToString()));
          continue;
        }
        PrintRow(uneven, backend, inputs, *reports);
        for (const std::string& what : Judge(uneven, inputs, *reports)) {
          broken.push_back(absl::StrCat(backend, " ", absl::StrJoin(inputs, ","), ", case ", what));
        }
      }
    }
  }
  for (const std::string& what : broken) std::cout << "BROKEN " << what << "\n";
  std::cout << (broken.empty() ? "All promises are kept.\n"
                               : absl::StrCat(broken.size(), " promises are broken.\n"));
  return broken.empty() ? 0 : 1;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  gflags::SetUsageMessage(
      "Prints how six programs end whose ranks have different numbers of inputs, and a seventh.");
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  if (FLAGS_rank_of_case < 0) return evenkeel::PrintTable();
  const absl::Status status = evenkeel::RunAsRank();
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
