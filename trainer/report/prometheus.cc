#include "evenkeel/trainer/report/prometheus.h"

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/launch/prometheus_text.h"

namespace evenkeel {
namespace {

// Returns the name of a gauge: Prometheus has no '/' in names.
std::string GaugeName(absl::string_view scalar) {
  return absl::StrCat("evenkeel_", absl::StrReplaceAll(scalar, {{"/", "_"}}));
}

class PrometheusFile : public MetricsSink {
 public:
  PrometheusFile(std::string path, absl::string_view model, absl::Duration period)
      : path_(std::move(path)),
        labels_(absl::StrCat("{model=", PrometheusQuoted(model), ",run=",
                             PrometheusQuoted(std::filesystem::path(path_).stem().string()), "}")),
        period_(period) {}

  absl::Status Write(int64_t step, absl::Time time, std::span<const Scalar> scalars) override {
    for (const Scalar& scalar : scalars)
      gauges_[GaugeName(scalar.name)] = {std::string(scalar.help), scalar.value};
    step_ = step;
    // The clock may have been set back.
    if (absl::AbsDuration(time - written_) < period_) return absl::OkStatus();
    return WriteFile(time, /*is_up=*/true);
  }

  absl::Status Finish(absl::Time time) override { return WriteFile(time, /*is_up=*/false); }

 private:
  struct Gauge {
    std::string help;
    double value = 0;
  };

  void AppendGauge(absl::string_view name, const Gauge& gauge, std::string& text) const {
    absl::StrAppend(&text, "# HELP ", name, " ", gauge.help, "\n# TYPE ", name, " gauge\n", name,
                    labels_, " ", PrometheusNumber(gauge.value), "\n");
  }

  std::string Text(absl::Time time, bool is_up) const {
    std::string text;
    for (const auto& [name, gauge] : gauges_) AppendGauge(name, gauge, text);
    AppendGauge("evenkeel_train_step", {"Last finished training step", static_cast<double>(step_)},
                text);
    AppendGauge("evenkeel_train_up", {"1 while training is running, else 0", is_up ? 1.0 : 0.0},
                text);
    AppendGauge("evenkeel_train_last_update_timestamp_seconds",
                {"Unix time at which these values were written",
                 static_cast<double>(absl::ToUnixMillis(time)) / 1e3},
                text);
    return text;
  }

  // Not flushed to the disk, since training would wait for it: after a crash of the machine the
  // values are old in any case.
  absl::Status WriteFile(absl::Time time, bool is_up) {
    written_ = time;
    const std::string text = Text(time, is_up);
    return WriteFileAtomically(path_, text, Flush::kNo);
  }

  const std::string path_;
  const std::string labels_;
  const absl::Duration period_;
  std::map<std::string, Gauge> gauges_;
  int64_t step_ = -1;
  absl::Time written_ = absl::InfinitePast();
};

}  // namespace

std::unique_ptr<MetricsSink> OpenPrometheus(std::string path, absl::string_view model,
                                            absl::Duration period) {
  return std::make_unique<PrometheusFile>(std::move(path), model, period);
}

}  // namespace evenkeel
