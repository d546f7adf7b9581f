#include "evenkeel/trainer/data/augment.h"

#include <algorithm>
#include <vector>

#include "evenkeel/trainer/data/stable_random.h"

namespace evenkeel {
namespace {

// Separates these numbers from others of the same seed: initial weights and the order of samples.
constexpr uint64_t kPurpose = 0x6175676D656E74;  // "augment"

void ChangeRow(const ImageChange& change, std::span<const float> row, std::span<float> changed) {
  const int side = static_cast<int>(row.size());
  const int begin = std::clamp(change.right, 0, side);
  const int end = std::clamp(side + change.right, 0, side);
  std::fill(changed.begin(), changed.begin() + begin, 0.0f);
  for (int x = begin; x < end; ++x) {
    const int from = x - change.right;
    changed[x] = row[change.is_mirrored ? side - 1 - from : from];
  }
  std::fill(changed.begin() + std::max(begin, end), changed.end(), 0.0f);
}

}  // namespace

ImageChange ChangeOf(const AugmentOptions& options, int epoch, int32_t sample) {
  const uint64_t epoch_seed = StableRandom(options.seed ^ kPurpose, epoch).Next();
  StableRandom random(epoch_seed, sample);
  const auto shift = [&] {
    return static_cast<int>(random.Below(2 * uint64_t(options.max_shift) + 1)) - options.max_shift;
  };
  ImageChange change;
  change.right = shift();
  change.down = shift();
  change.is_mirrored = options.mirrors && random.Below(2) == 1;
  return change;
}

void ApplyChange(const ImageChange& change, const ImageShape& shape, std::span<const float> image,
                 std::span<float> changed) {
  const int side = shape.side;
  for (int channel = 0; channel < shape.channels; ++channel) {
    for (int y = 0; y < side; ++y) {
      const std::span<float> row = changed.subspan((channel * side + y) * side, side);
      const int from = y - change.down;
      if (from < 0 || from >= side) {
        std::ranges::fill(row, 0.0f);
      } else {
        ChangeRow(change, image.subspan((channel * side + from) * side, side), row);
      }
    }
  }
}

void Augment(const AugmentOptions& options, const ImageShape& shape, int epoch,
             std::span<const int32_t> samples, std::span<float> images) {
  const size_t pixels = shape.pixels();
  std::vector<float> original(pixels);
  for (size_t i = 0; i < samples.size(); ++i) {
    const std::span<float> image = images.subspan(i * pixels, pixels);
    std::ranges::copy(image, original.begin());
    ApplyChange(ChangeOf(options, epoch, samples[i]), shape, original, image);
  }
}

}  // namespace evenkeel
