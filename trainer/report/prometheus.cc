#include "evenkeel/trainer/report/prometheus.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "evenkeel/tools/prometheus_text.h"

namespace evenkeel {
namespace {

// Converts `text` to a name: a letter or '_', then letters, '_' and digits.
std::string Word(absl::string_view text) {
  std::string word(text);
  for (char& c : word) c = absl::ascii_isalnum(c) ? c : '_';
  if (word.empty() || absl::ascii_isdigit(word[0])) word.insert(0, "_");
  return word;
}

// Returns {model="cnn",run="a \"b\""}, or an empty text.
std::string LabelText(const std::map<std::string, std::string>& labels) {
  std::string text;
  for (const auto& [name, value] : labels) {
    absl::StrAppend(&text, text.empty() ? "{" : ",", Word(name), "=", PrometheusQuoted(value));
  }
  return text.empty() ? text : text + "}";
}

class PrometheusFile : public MetricsSink {
 public:
  explicit PrometheusFile(PrometheusOptions options)
      : options_(std::move(options)), labels_(LabelText(options_.labels)) {}

  absl::Status Write(const ScalarPoint& point) override {
    for (const Scalar& scalar : point.scalars) {
      gauges_[absl::StrCat("evenkeel_", Word(scalar.name))] = {std::string(scalar.help),
                                                               scalar.value};
    }
    step_ = point.step;
    // The clock may have been set back.
    const absl::Duration since = absl::AbsDuration(point.time - written_);
    if (since < options_.period) return absl::OkStatus();
    return WriteFile(point.time, /*is_up=*/true);
  }

  absl::Status Finish(absl::Time time) override { return WriteFile(time, /*is_up=*/false); }

 private:
  struct Gauge {
    std::string help;
    double value = 0;
  };

  void AppendGauge(absl::string_view name, const Gauge& gauge, std::string& text) const {
    absl::StrAppend(&text, "# HELP ", name, " ",
                    absl::StrReplaceAll(gauge.help, {{"\\", "\\\\"}, {"\n", "\\n"}}), "\n");
    absl::StrAppend(&text, "# TYPE ", name, " gauge\n", name, labels_, " ",
                    PrometheusNumber(gauge.value), "\n");
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
    const std::string temporary = absl::StrCat(options_.path, ".", getpid(), ".tmp");
    FILE* const file = fopen(temporary.c_str(), "we");
    if (file == nullptr)
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", temporary));
    const bool is_written = fwrite(text.data(), 1, text.size(), file) == text.size();
    int error = is_written ? 0 : errno;
    if (fclose(file) != 0 && error == 0) error = errno;
    if (error == 0 && rename(temporary.c_str(), options_.path.c_str()) != 0) error = errno;
    if (error == 0) return absl::OkStatus();
    unlink(temporary.c_str());
    return absl::ErrnoToStatus(error, absl::StrCat("cannot write ", options_.path));
  }

  const PrometheusOptions options_;
  const std::string labels_;
  std::map<std::string, Gauge> gauges_;
  int64_t step_ = -1;
  absl::Time written_ = absl::InfinitePast();
};

}  // namespace

std::unique_ptr<MetricsSink> OpenPrometheus(PrometheusOptions options) {
  return std::make_unique<PrometheusFile>(std::move(options));
}

}  // namespace evenkeel
