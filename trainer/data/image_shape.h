// The input and output of the image models of this trainer: square images and 10 classes, as in
// MNIST, Fashion-MNIST (grey, 28x28) and CIFAR-10 (three colours, 32x32).

#ifndef EVENKEEL_TRAINER_DATA_IMAGE_SHAPE_H_
#define EVENKEEL_TRAINER_DATA_IMAGE_SHAPE_H_

namespace evenkeel {

inline constexpr int kImageSide = 28;  // MNIST's.
inline constexpr int kImagePixels = kImageSide * kImageSide;
inline constexpr int kClasses = 10;

struct ImageShape {
  int channels = 1;
  int side = kImageSide;
  constexpr int pixels() const { return channels * side * side; }
  friend bool operator==(const ImageShape&, const ImageShape&) = default;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_IMAGE_SHAPE_H_
