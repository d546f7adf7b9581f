// What all models of this trainer take and answer: images of 28x28 pixels, 10 classes, as in MNIST and Fashion-MNIST.

#ifndef EVENKEEL_TRAINER_IMAGE_SHAPE_H_
#define EVENKEEL_TRAINER_IMAGE_SHAPE_H_

namespace evenkeel {

inline constexpr int kImageSide = 28;
inline constexpr int kImagePixels = kImageSide * kImageSide;
inline constexpr int kClasses = 10;

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_IMAGE_SHAPE_H_
