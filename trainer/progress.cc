#include "evenkeel/trainer/progress.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace evenkeel {
namespace {

// Rates are means over this time: steady enough to read, and they follow a change.
constexpr absl::Duration kRateWindow = absl::Seconds(30);

std::string Of(int64_t done, int64_t total) { return total > 0 ? absl::StrCat(done, "/", total) : absl::StrCat(done); }

std::string Clock(absl::Duration duration) {
  const int64_t seconds = absl::ToInt64Seconds(duration + absl::Milliseconds(500));
  if (seconds < 3600) return absl::StrFormat("%d:%02d", seconds / 60, seconds % 60);
  return absl::StrFormat("%d:%02d:%02d", seconds / 3600, seconds / 60 % 60, seconds % 60);
}

}  // namespace

ProgressLine::ProgressLine(std::FILE* out, const ProgressOptions& options)
    : ProgressLine(out, options, isatty(fileno(out)) == 1) {}

ProgressLine::ProgressLine(std::FILE* out, const ProgressOptions& options, bool is_terminal)
    : out_(out), options_(options), is_terminal_(is_terminal) {}

void ProgressLine::Update(const ProgressState& state, absl::Time now) {
  state_ = state;
  is_pending_ = true;
  if (marks_.empty()) shown_ = now;  // The first line comes a period after the start, with a rate.
  const absl::Duration period = is_terminal_ ? options_.terminal_period : options_.plain_period;
  const bool is_due = now - shown_ >= period;
  // One mark per line is enough for a rate, and bounds their number.
  if (marks_.empty() || is_due) marks_.push_back({now, state.step, state.samples});
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
  std::string text =
      absl::StrFormat("epoch %s  step %s  loss %.4f  accuracy %.1f%%", Of(state_.epoch + 1, options_.epochs),
                      Of(state_.step, options_.total_steps), state_.loss, 100 * state_.accuracy);
  const Mark& first = marks_.front();
  const Mark& last = marks_.back();
  const double seconds = absl::ToDoubleSeconds(last.time - first.time);
  const int64_t steps = last.step - first.step;
  if (seconds <= 0 || steps <= 0) return text;
  absl::StrAppendFormat(&text, "  %.0f samples/s", (last.samples - first.samples) / seconds);
  if (options_.total_steps > 0) {
    const int64_t left = std::max<int64_t>(0, options_.total_steps - state_.step);
    absl::StrAppend(&text, "  ", Clock(absl::Seconds(seconds * left / steps)), " left");
  }
  return text;
}

void ProgressLine::Show(absl::Time now) {
  if (is_terminal_) {
    absl::FPrintF(out_, "\r%s\033[K", Text());  // The code erases what a longer line left.
    is_line_open_ = true;
  } else {
    absl::FPrintF(out_, "%s\n", Text());
  }
  std::fflush(out_);
  shown_ = now;
  is_pending_ = false;
}

}  // namespace evenkeel
