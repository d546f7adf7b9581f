#include "evenkeel/trainer/app/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <numbers>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace evenkeel {
namespace {

// Rates are means over this time: steady enough to read, and they follow a change.
constexpr absl::Duration kRateWindow = absl::Seconds(30);

std::string Of(int64_t done, int64_t total) {
  return total > 0 ? absl::StrCat(done, "/", total) : absl::StrCat(done);
}

std::string Clock(absl::Duration duration) {
  const int64_t seconds = absl::ToInt64Seconds(duration + absl::Milliseconds(500));
  if (seconds < 3600) return absl::StrFormat("%d:%02d", seconds / 60, seconds % 60);
  return absl::StrFormat("%dh%02d", seconds / 3600, seconds / 60 % 60);
}

// "9876", "12.3k", "456k", "7.89M".
std::string Short(double number) {
  if (number < 9999.5) return absl::StrFormat("%.0f", number);
  if (number < 99950) return absl::StrFormat("%.1fk", number / 1e3);
  return number < 999500 ? absl::StrFormat("%.0fk", number / 1e3)
                         : absl::StrFormat("%.2fM", number / 1e6);
}

std::string Percent(double ratio) {
  return absl::StrFormat(ratio < 0.0995 ? "%.1f%%" : "%.0f%%", 100 * ratio);
}

std::string QualityText(const ProgressState& state, const ProgressOptions& options) {
  if (options.quality == ProgressQuality::kPerplexity)
    return absl::StrFormat("perplexity %.4g", std::exp(*state.loss));
  if (options.quality == ProgressQuality::kBitsPerByte) {
    return absl::StrFormat("%.3f bits/byte",
                           *state.loss / std::numbers::ln2 / options.bytes_per_token);
  }
  return absl::StrFormat("accuracy %.1f%%", 100 * state.accuracy);
}

// Width of the terminal; 0: unknown.
int Columns(std::FILE* out) {
  winsize size{};
  return ioctl(fileno(out), TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

// Open MPI gives its ranks a terminal, whose output it passes on line by line.
bool TakesEscapes() {
  const char* const terminal = std::getenv("TERM");
  return terminal != nullptr && absl::string_view(terminal) != "dumb" &&
         std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr;
}

bool IsTerminal(std::FILE* out) { return isatty(fileno(out)) == 1 && TakesEscapes(); }

}  // namespace

absl::string_view BeginLine(std::FILE* out) { return IsTerminal(out) ? "\r\033[K" : ""; }

ProgressLine::ProgressLine(std::FILE* out, const ProgressOptions& options)
    : ProgressLine(out, options, IsTerminal(out)) {}

ProgressLine::ProgressLine(std::FILE* out, const ProgressOptions& options, bool is_terminal)
    : out_(out), options_(options), is_terminal_(is_terminal) {}

void ProgressLine::Update(const ProgressState& state, absl::Time now) {
  state_ = state;
  is_pending_ = true;
  if (marks_.empty()) shown_ = now;  // The first line comes a period after the start, with a rate.
  const absl::Duration period = is_terminal_ ? options_.terminal_period : options_.plain_period;
  const bool is_due = now - shown_ >= period;
  // One mark per line is enough for a rate, and bounds their number.
  if (marks_.empty() || is_due) marks_.push_back({now, state.step, state.count});
  while (marks_.size() > 2 && now - marks_[1].time > kRateWindow) marks_.pop_front();
  if (is_due) Show(now);
}

void ProgressLine::Finish() {
  if (is_pending_) Show(shown_);
  if (is_line_open_) std::fputc('\n', out_);
  is_line_open_ = false;
  std::fflush(out_);
}

std::string ProgressLine::Text(size_t most) const {
  enum Part { kEpoch, kStep, kLoss, kQuality, kRate, kExposed, kLeft, kParts };
  std::array<std::string, kParts> parts;
  parts[kEpoch] = absl::StrCat("epoch ", Of(state_.epoch + 1, options_.epochs));
  parts[kStep] = absl::StrCat("step ", Of(state_.step, options_.total_steps));
  if (state_.loss.has_value()) {
    parts[kLoss] = absl::StrFormat("loss %.4f", *state_.loss);
    parts[kQuality] = QualityText(state_, options_);
  }
  const Mark& first = marks_.front();
  const Mark& last = marks_.back();
  const double seconds = absl::ToDoubleSeconds(last.time - first.time);
  const int64_t steps = last.step - first.step;
  if (seconds > 0 && steps > 0) {
    parts[kRate] = absl::StrCat(Short(static_cast<double>(last.count - first.count) / seconds), " ",
                                options_.unit, "/s");
    if (!std::isnan(state_.exposed))
      parts[kExposed] = absl::StrCat("exposed ", Percent(state_.exposed));
    if (options_.total_steps > 0) {
      const int64_t left = std::max<int64_t>(0, options_.total_steps - state_.step);
      parts[kLeft] = absl::StrCat(Clock(absl::Seconds(seconds * left / steps)), " left");
    }
  }
  const auto line = [&parts] {
    std::string text;
    for (const std::string& part : parts)
      if (!part.empty()) absl::StrAppend(&text, text.empty() ? "" : "  ", part);
    return text;
  };
  for (const Part least : {kExposed, kEpoch, kQuality, kRate}) {
    if (line().size() <= most) break;
    parts[least].clear();
  }
  return line().substr(0, most);
}

void ProgressLine::Show(absl::Time now) {
  if (is_terminal_) {
    // A line that wraps would not be written over. The code erases what a longer line left.
    const int columns = Columns(out_);
    absl::FPrintF(out_, "\r%s\033[K", Text(columns > 0 ? columns - 1 : std::string::npos));
    is_line_open_ = true;
  } else {
    absl::FPrintF(out_, "%s\n", Text(std::string::npos));
  }
  std::fflush(out_);
  shown_ = now;
  is_pending_ = false;
}

}  // namespace evenkeel
