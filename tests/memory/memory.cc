// Prints how much memory each part of training holds per rank, against the number of ranks:
//
//   bazel run //tests/memory

#include <iostream>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "evenkeel/tests/memory/memory_use.h"

namespace evenkeel {
namespace {

std::string Mib(int64_t bytes) {
  return absl::StrFormat("%7.2f", static_cast<double>(bytes) / (1 << 20));
}

bool Print() {
  std::cout << absl::StrFormat("MiB per rank; %s of parameters, AdamW; in-process ranks\n\n",
                               Mib(ParameterBytes()));
  std::cout << absl::StrFormat("%-10s %-7s %5s %11s %10s %8s %10s %11s %12s %8s\n", "optimizer",
                               "mode", "ranks", "parameters", "gradients", "buckets", "optimizer",
                               "most state", "peak, steady", "peak");
  for (const auto& [name, optimizer] : {std::pair("unsharded", OptimizerKind::kUnsharded),
                                        std::pair("sharded", OptimizerKind::kSharded),
                                        std::pair("sliced", OptimizerKind::kSliced)}) {
    for (const bool views : {false, true}) {
      for (const int world : {1, 2, 4, 8}) {
        const absl::StatusOr<MemoryUse> use =
            MeasureMemory({.world = world, .views = views, .optimizer = optimizer});
        if (!use.ok()) {
          std::cerr << "memory: " << use.status().message() << "\n";
          return false;
        }
        std::cout << absl::StrFormat("%-10s %-7s %5d %11s %10s %8s %10s %11s %12s %8s\n", name,
                                     views ? "views" : "copies", world, Mib(use->parameters),
                                     Mib(use->gradients), Mib(use->buckets), Mib(use->optimizer),
                                     Mib(use->most_state), Mib(use->steady_peak), Mib(use->peak));
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace evenkeel

int main() { return evenkeel::Print() ? 0 : 1; }
