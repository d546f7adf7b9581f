// Measures the cost of exhausted ranks for the others: a step, its backward, and samples per
// second, for each way to join and each skew, beside the same steps without join, with inputs for
// all.
//
//   bazel run //tests/skew -- --world=8 --pairs=30
//
//   # processes over TCP
//   bazel run //tools:launch -- --nproc=8 -- $PWD/bazel-bin/tests/skew/skew --pairs=30
//
//   # each rank in a network namespace of its own
//   tests/skew/slow_link.sh 8 100mbit --pairs=30
//
//   bazel run //tests/skew -- --world=32 --steps=2000 --step_ms=2 --layer_elements=4096
//     --pairs=10 --rows='every 8th'
//
// The last one is the case in which another system lost a third of its throughput: 32 ranks, 4 of
// them without any inputs, which shadow 2000 steps in each block.
//
// The two that are compared run in blocks in turn, so that what the machine does meanwhile hits
// both; a ratio is the median over pairs of blocks of their median steps, with its 95 % interval.
// The highest rank, which always has all inputs, measures and prints.

#include <algorithm>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/tcp/tcp.h"
#include "evenkeel/tests/skew/skewed_training.h"
#include "evenkeel/tools/measure/paired_ratio.h"
#include "evenkeel/tools/measure/rounds.h"
#include "gflags/gflags.h"

DEFINE_string(backend, "local",
              "Of ranks that are threads: local or tcp. Ranks that a launcher starts use TCP.");
DEFINE_int32(world, 8, "Ranks that are threads.");
DEFINE_int32(pairs, 30, "Pairs of blocks for each row; at least 30 for a figure to be quoted.");
DEFINE_int32(steps, 20, "Steps of a block.");
DEFINE_double(step_ms, 30, "What forward and backward of a step wait, a third of it the forward.");
DEFINE_int64(layer_elements, 65536, "float32 elements of each of the 12 layers.");
DEFINE_int32(batch, 32, "Samples of a rank's step, for samples per second.");
DEFINE_string(rows, "", "Measures only rows whose names contain this.");

namespace evenkeel {
namespace {

struct Row {
  std::string name;
  SkewSetting setting;
};

std::vector<Row> Rows() {
  const SkewSetting base{.steps = FLAGS_steps,
                         .forward = absl::Milliseconds(FLAGS_step_ms / 3),
                         .backward = absl::Milliseconds(FLAGS_step_ms * 2 / 3),
                         .layer_elements = FLAGS_layer_elements};
  std::vector<Row> rows;
  const auto add = [&](std::string name, JoinWay way, Skew skew) {
    rows.push_back({std::move(name), base});
    rows.back().setting.way = way;
    rows.back().setting.skew = skew;
  };
  add("none, even", JoinWay::kNone, Skew::kEven);  // Against itself: what the measurement is worth.
  add("disabled, even", JoinWay::kDisabled, Skew::kEven);
  add("on, even", JoinWay::kShadow, Skew::kEven);
  add("on, 10 fewer on half", JoinWay::kShadow, Skew::kTen);
  add("on, every 8th empty", JoinWay::kShadow, Skew::kEmptyEighth);
  add("none, wrong order", JoinWay::kNone, Skew::kEven);
  rows.back().setting.registration_order = true;
  std::erase_if(rows, [](const Row& row) { return !absl::StrContains(row.name, FLAGS_rows); });
  return rows;
}

struct Measured {
  double step_ms = 0, backward_ms = 0, samples = 0;  // Medians; samples per second of all ranks.
  PairedRatio step, backward;                        // Over those without join.
  bool follows_backward = false;
};

double SamplesPerSecond(const SkewSetting& setting, int world, double seconds) {
  int64_t steps = 0;
  for (int rank = 0; rank < world; ++rank) steps += setting.StepsOf(rank, world);
  return static_cast<double>(steps * FLAGS_batch) / seconds;
}

absl::StatusOr<Measured> Measure(Communicator& comm, const SkewSetting& setting) {
  SkewSetting plain = setting;
  plain.way = JoinWay::kNone;
  plain.skew = Skew::kEven;
  plain.registration_order = false;
  EK_ASSIGN_OR_RETURN(const auto ours, SkewedTraining::Create(&comm, setting));
  EK_ASSIGN_OR_RETURN(const auto theirs, SkewedTraining::Create(&comm, plain));
  std::vector<double> steps[2], backwards[2], samples;  // Ours and theirs.
  EK_RETURN_IF_ERROR(RunRounds(2, 1 + FLAGS_pairs, [&](size_t i, int round) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const BlockTimes times, (i == 0 ? *ours : *theirs).RunBlock());
    // The first round warms up, and has its buckets rebuilt.
    if (round == 0 || times.steps.empty()) return absl::OkStatus();
    steps[i].push_back(MedianOf(times.steps));
    backwards[i].push_back(MedianOf(times.backwards));
    if (i == 0) samples.push_back(SamplesPerSecond(setting, comm.world_size(), times.block));
    return absl::OkStatus();
  }));
  Measured measured{.follows_backward = ours->BucketsFollowBackward()};
  if (steps[0].empty()) return measured;  // An exhausted rank's view is of no interest.
  if (steps[0].size() != steps[1].size())
    return absl::InternalError(absl::StrCat("blocks of a row and of its base: ", steps[0].size(),
                                            " and ", steps[1].size(), " (internal error)"));
  measured.step_ms = 1e3 * MedianOf(steps[0]);
  measured.backward_ms = 1e3 * MedianOf(backwards[0]);
  measured.samples = MedianOf(samples);
  measured.step = RatioOf(steps[0], steps[1]);
  measured.backward = RatioOf(backwards[0], backwards[1]);
  return measured;
}

absl::Status MeasureAll(Communicator& comm) {
  const bool prints = comm.rank() + 1 == comm.world_size();
  if (prints) {
    std::cout << absl::StrFormat(
        "%s, %d ranks, blocks of %d steps of %.0f ms, %.1f MB of gradients in 4 buckets, batches "
        "of %d\n\n"
        "%-24s %9s %13s %10s %7s  %-36s %s\n",
        comm.backend_name(), comm.world_size(), FLAGS_steps, FLAGS_step_ms,
        static_cast<double>(12 * FLAGS_layer_elements * 4) / 1e6, FLAGS_batch, "join, inputs",
        "step P50", "backward P50", "samples/s", "order", "step / without join",
        "backward / without join");
  }
  for (const Row& row : Rows()) {
    EK_ASSIGN_OR_RETURN(const Measured measured, Measure(comm, row.setting));
    if (!prints) continue;
    std::cout << absl::StrFormat("%-24s %6.2f ms %10.2f ms %10.0f %7s  %-36s %s\n", row.name,
                                 measured.step_ms, measured.backward_ms, measured.samples,
                                 measured.follows_backward ? "right" : "WRONG",
                                 measured.step.ToString(), measured.backward.ToString())
              << std::flush;
  }
  return absl::OkStatus();
}

absl::Status Main() {
  if (FLAGS_world < 2 || FLAGS_pairs < 1 || FLAGS_steps < 1 || !(FLAGS_step_ms > 0) ||
      FLAGS_layer_elements < 1) {
    return absl::InvalidArgumentError(
        "--world must be at least 2; --pairs, --steps, --step_ms, --layer_elements 1");
  }
  if (Rows().empty())
    return absl::InvalidArgumentError(
        absl::StrCat("--rows=", FLAGS_rows, ": no row's name has that"));
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  if (environment.world_size > 1) {
    EK_ASSIGN_OR_RETURN(const auto comm, CreateCommunicator(environment, {.backend = "tcp"}));
    EK_RETURN_IF_ERROR(MeasureAll(*comm));
    return comm->Finalize();
  }
  if (FLAGS_backend != "tcp" && FLAGS_backend != "local") {
    return absl::InvalidArgumentError(
        absl::StrCat("--backend=", FLAGS_backend, ": it is tcp or local"));
  }
  EK_ASSIGN_OR_RETURN(const std::vector<std::unique_ptr<Communicator>> group,
                      FLAGS_backend == "tcp" ? CreateTcpGroupInProcess(FLAGS_world)
                                             : CreateLocalGroup(FLAGS_world));
  return internal::RunGroup(group, MeasureAll);
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  gflags::SetUsageMessage(
      "What ranks that become exhausted cost the others; see tests/skew/main.cc.");
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  const absl::Status status = evenkeel::Main();
  if (status.ok()) return 0;
  std::cerr << "skew: " << status.message() << "\n";
  return 1;
}
