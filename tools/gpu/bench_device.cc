// Measures the speed of the device code that is bound by memory, beside a plain copy of as many
// bytes. See --help.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/tools/gpu/device_cases.h"
#include "evenkeel/tools/gpu/open_device.h"
#include "evenkeel/tools/measure/paired_ratio.h"
#include "evenkeel/tools/measure/rounds.h"
#include "evenkeel/tools/measure/table.h"
#include "evenkeel/tools/program.h"
#include "gflags/gflags.h"

DEFINE_string(device, "cuda", "cuda; or simulated, whose times are not those of any device.");
DEFINE_int64(largest_mib, 256, "From 1 MiB, four times as much each time, to this.");
DEFINE_bool(quick, false, "Fewer pairs.");
DEFINE_bool(devices, false, "Only tell which devices there are, one per line.");
DEFINE_bool(rows, false, "Rows with tabs, for programs: name, result, figure, bar.");
DEFINE_double(pytorch_adamw_seconds, 0,
              "What a step of PyTorch's fused AdamW took (tools/gpu/pytorch_adamw.py).");

namespace evenkeel {
namespace {

constexpr char kUsage[] = R"(How fast buckets are packed and unpacked and AdamW steps on a device.

  bazel run //tools/gpu:bench_device

Each row beside a plain copy that reads and writes as many bytes, in turns: the median of the paired ratios with its
95 % interval. 1 is the copy's speed. From 16 MiB on, 0.85 is the bar; ends with 1 if a figure is below.)";

constexpr double kBar = 0.85;
constexpr int64_t kBarFrom = int64_t{16} << 20;
// The size that pytorch_adamw.py updates.
constexpr int64_t kPyTorchBytes = int64_t{256} << 20;

class Bench {
 public:
  explicit Bench(const BenchDevice& device)
      : device_(device), is_real_(device.runtime->name() == "cuda") {}

  // Beside a copy of as many bytes.
  absl::Status Measure(const DeviceCase& measured, bool has_bar) {
    EK_ASSIGN_OR_RETURN(const DeviceCase copy, CopyCase(device_, measured.bytes));
    const int repeats =
        is_real_ ? static_cast<int>(std::clamp<int64_t>((int64_t{2} << 30) / copy.bytes, 4, 400))
                 : 1;
    const int pairs = !is_real_ ? 1 : FLAGS_quick ? 9 : 31;
    EK_RETURN_IF_ERROR(TimeOf(copy, repeats).status());  // Warms up: kernels are loaded.
    EK_RETURN_IF_ERROR(TimeOf(measured, repeats).status());
    std::vector<double> copies, runs;
    EK_RETURN_IF_ERROR(RunRounds(2, pairs, [&](size_t i, int) -> absl::Status {
      const DeviceCase& one = i == 0 ? copy : measured;
      EK_ASSIGN_OR_RETURN(const double seconds, TimeOf(one, repeats));
      (i == 0 ? copies : runs).push_back(seconds / static_cast<double>(one.bytes));
      return absl::OkStatus();
    }));
    const PairedRatio ratio = RatioOf(copies, runs);
    seconds_ = MedianOf(runs) * static_cast<double>(measured.bytes);
    const std::string figure =
        absl::StrFormat("%s of a copy; %.0f GB/s, the copy %.0f GB/s", ratio.ToString(),
                        1e-9 / MedianOf(runs), 1e-9 / MedianOf(copies));
    Add(measured.name, figure, has_bar, ratio.median >= kBar, absl::StrFormat(">= %.2f", kBar));
    return absl::OkStatus();
  }

  // Beside what another program took, just before.
  void CompareLast(const std::string& name, double others_seconds) {
    const double ratio = others_seconds / seconds_;
    Add(name,
        absl::StrFormat("%.3f times as fast: %.3f ms, PyTorch %.3f ms", ratio, seconds_ * 1e3,
                        others_seconds * 1e3),
        /*has_bar=*/true, ratio >= 1 / 1.05, ">= 0.95");
  }

  bool all_passed() const { return all_passed_; }

 private:
  // Returns the time of one run, in seconds.
  absl::StatusOr<double> TimeOf(const DeviceCase& measured, int repeats) {
    EK_ASSIGN_OR_RETURN(const double seconds, device_.Seconds([&]() -> absl::Status {
      for (int i = 0; i < repeats; ++i) EK_RETURN_IF_ERROR(measured.run());
      return absl::OkStatus();
    }));
    return std::max(seconds, 1e-9) / repeats;
  }

  void Add(const std::string& name, const std::string& figure, bool has_bar, bool is_good,
           const std::string& bar) {
    const bool is_judged = has_bar && is_real_;
    const std::string result = !is_judged ? "shown" : is_good ? "passed" : "failed";
    const std::string shown_bar = is_judged ? bar : "";
    all_passed_ = all_passed_ && (is_good || !is_judged);
    if (FLAGS_rows) {
      std::cout << name << '\t' << result << '\t' << figure << '\t' << shown_bar << std::endl;
    } else {
      const Table table({{"", -32}, {"", -8}, {"", -8}, {"", 0}});
      std::cout << table.Line({name, result, shown_bar, figure}) << std::flush;
    }
  }

  const BenchDevice& device_;
  const bool is_real_;
  double seconds_ = 0;  // The last case's.
  bool all_passed_ = true;
};

absl::Status TellDevices() {
  EK_ASSIGN_OR_RETURN(const BenchDevice device, OpenBenchDevice(FLAGS_device));
  EK_ASSIGN_OR_RETURN(const int count, device.runtime->DeviceCount());
  for (int i = 0; i < count; ++i) {
    EK_ASSIGN_OR_RETURN(const DeviceFacts facts, device.runtime->Facts(Device::Cuda(i)));
    std::cout << absl::StrFormat("%d, %s, %d MiB, %d multiprocessors, sm_%d\n", i, facts.name,
                                 facts.total_bytes >> 20, facts.multiprocessors,
                                 facts.compute_capability);
  }
  return absl::OkStatus();
}

absl::StatusOr<int> Run(int argc, char** argv) {
  EK_RETURN_IF_ERROR(ParseFlags(kUsage, argc, argv));
  if (FLAGS_devices) {
    EK_RETURN_IF_ERROR(TellDevices());
    return EXIT_SUCCESS;
  }
  if (FLAGS_largest_mib < 1) return absl::InvalidArgumentError("--largest_mib must be at least 1");
  EK_ASSIGN_OR_RETURN(const BenchDevice device, OpenBenchDevice(FLAGS_device));
  Bench bench(device);
  const auto measure = [&](const absl::StatusOr<DeviceCase>& measured,
                           bool has_bar) -> absl::Status {
    EK_RETURN_IF_ERROR(measured.status());
    return bench.Measure(*measured, has_bar);
  };
  for (int64_t bytes = 1 << 20; bytes <= FLAGS_largest_mib << 20; bytes *= 4) {
    const bool has_bar = bytes >= kBarFrom;
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      EK_RETURN_IF_ERROR(measure(PackCase(device, bytes, dtype), has_bar));
      EK_RETURN_IF_ERROR(measure(UnpackCase(device, bytes, dtype), has_bar));
    }
    EK_RETURN_IF_ERROR(measure(AdamWCase(device, bytes, DType::kBFloat16), has_bar));
    EK_RETURN_IF_ERROR(measure(AdamWCase(device, bytes, DType::kFloat32), has_bar));
    if (bytes == kPyTorchBytes && FLAGS_pytorch_adamw_seconds > 0) {
      bench.CompareLast("AdamW beside PyTorch's fused one", FLAGS_pytorch_adamw_seconds);
    }
  }
  return bench.all_passed() ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  return evenkeel::RunProgram([&] { return evenkeel::Run(argc, argv); });
}
