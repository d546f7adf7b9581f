// A line that shows the progress of training.
//
//   ProgressLine progress(stdout, {.total_steps = 1875, .epochs = 4});
//   progress.Update({.step = 12, .count = 1536, .loss = 0.61, .accuracy = 0.78}, SteadyNow());
//   progress.Finish();                        // before anything else is printed
//
//   epoch 1/4  step 12/1875  loss 0.6100  accuracy 78.0%  9876 samples/s  exposed 4.2%  0:31 left
//
// The caller chooses the counted unit and the measure of quality: for language models tokens, and
// perplexity or bits per byte. `exposed` is the fraction of the steps' time in which the rank
// waited for gradients after the backward pass.
//
// On a terminal the line is rewritten in place, ten times a second at most, without the parts that
// do not fit; elsewhere (a file, a pipe) it is printed as a line of its own every few seconds.
// It has some 95 characters.
//
// Units:   `count` is from the start of training, over all ranks if the caller has it. Losses are
//          in nats.
// Threads: thread-compatible.

#ifndef EVENKEEL_TRAINER_APP_PROGRESS_H_
#define EVENKEEL_TRAINER_APP_PROGRESS_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <limits>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace evenkeel {

// The measure that is shown beside the loss.
enum class ProgressQuality {
  kAccuracy,
  kPerplexity,   // e to the loss.
  kBitsPerByte,  // For models of texts whose tokens have known bytes.
};

struct ProgressState {
  int64_t step = 0;                                           // Steps done.
  int epoch = 0;                                              // From 0.
  int64_t count = 0;                                          // Samples or tokens.
  std::optional<double> loss;                                 // None: unknown, as the accuracy.
  double accuracy = 0;                                        // From 0 to 1.
  double exposed = std::numeric_limits<double>::quiet_NaN();  // From 0 to 1; NaN: unknown.
};

struct ProgressOptions {
  int64_t total_steps = 0;  // 0: unknown; no time left is shown.
  int epochs = 0;           // 0: unknown.
  const char* unit = "samples";
  ProgressQuality quality = ProgressQuality::kAccuracy;
  double bytes_per_token = 1;  // For kBitsPerByte.
  absl::Duration terminal_period = absl::Milliseconds(100);
  absl::Duration plain_period = absl::Seconds(5);
};

// Returns the text with which another writer, also one in another process, begins its line: on a
// terminal it erases an open progress line, whose next update is drawn below; elsewhere it is
// empty.
absl::string_view BeginLine(std::FILE* out);

class ProgressLine {
 public:
  // `out` must outlive the object.
  ProgressLine(std::FILE* out, const ProgressOptions& options);
  // For tests: treats `out` as a terminal, or not, whatever it is.
  ProgressLine(std::FILE* out, const ProgressOptions& options, bool is_terminal);

  // Shows `state` if the last line is old enough. The first call starts the clock.
  void Update(const ProgressState& state, absl::Time now);
  // Shows the last state unless it was shown, and ends the line.
  void Finish();

 private:
  struct Mark {
    absl::Time time;
    int64_t step;
    int64_t count;
  };

  // Returns the line; if it is longer than `most`, without its less important parts.
  std::string Text(size_t most) const;
  void Show(absl::Time now);

  std::FILE* const out_;
  const ProgressOptions options_;
  const bool is_terminal_;

  ProgressState state_;
  std::deque<Mark> marks_;  // The last half minute or so; rates are averages over them.
  absl::Time shown_ = absl::InfinitePast();
  bool is_pending_ = false;    // `state_` was not shown yet.
  bool is_line_open_ = false;  // On a terminal: the cursor is at the end of the line.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_PROGRESS_H_
