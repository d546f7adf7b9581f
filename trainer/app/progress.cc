#include "evenkeel/trainer/app/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numbers>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

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

std::string ProgressLine::Text() const {
  std::string text = absl::StrCat("epoch ", Of(state_.epoch + 1, options_.epochs), "  step ",
                                  Of(state_.step, options_.total_steps));
  if (state_.loss.has_value()) {
    absl::StrAppendFormat(&text, "  loss %.4f  %s", *state_.loss, QualityText(state_, options_));
  }
  const Mark& first = marks_.front();
  const Mark& last = marks_.back();
  const double seconds = absl::ToDoubleSeconds(last.time - first.time);
  const int64_t steps = last.step - first.step;
  if (seconds <= 0 || steps <= 0) return text;
  absl::StrAppend(&text, "  ", Short(static_cast<double>(last.count - first.count) / seconds), " ",
                  options_.unit, "/s");
  if (!std::isnan(state_.exposed)) absl::StrAppend(&text, "  exposed ", Percent(state_.exposed));
  if (options_.total_steps > 0) {
    const int64_t left = std::max<int64_t>(0, options_.total_steps - state_.step);
    absl::StrAppend(&text, "  ", Clock(absl::Seconds(seconds * left / steps)), " left");
  }
  return text;
}

void ProgressLine::Show(absl::Time now) {
  if (is_terminal_) {
    // A line that wraps would not be written over. The code erases what a longer line left.
    const int columns = Columns(out_);
    const std::string text = columns > 0 ? Text().substr(0, columns - 1) : Text();
    absl::FPrintF(out_, "\r%s\033[K", text);
    is_line_open_ = true;
  } else {
    absl::FPrintF(out_, "%s\n", Text());
  }
  std::fflush(out_);
  shown_ = now;
  is_pending_ = false;
}

}  // namespace evenkeel
