// Memory that is kept from step to step.
//
//   int64_t held = 0;
//   Buffer<float> scores(&held);
//   // at a multiple of 64 bytes; what it held may be lost
//   float* data = scores.Resize(rows * vocabulary);
//
// It grows and never shrinks, so that steps of equal size allocate once. `held` counts the bytes of
// all buffers that were made with it.
//
// Threads: thread-compatible, together with the others of its count.

#ifndef EVENKEEL_TRAINER_GPT_BUFFER_H_
#define EVENKEEL_TRAINER_GPT_BUFFER_H_

#include <cstdint>
#include <memory>
#include <new>
#include <utility>

namespace evenkeel {

template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t* held) : held_(held) {}

  T* Resize(int64_t count) {
    if (count > count_) {
      memory_.reset();
      *held_ -= std::exchange(count_, 0) * kBytes;
      const int64_t bytes = count * kBytes;
      memory_.reset(static_cast<T*>(::operator new(bytes, kAlignment)));
      count_ = count;
      *held_ += bytes;
    }
    return memory_.get();
  }

  T* data() const { return memory_.get(); }

 private:
  static constexpr int64_t kBytes = sizeof(T);
  // A cache line, and the widest vector register.
  static constexpr std::align_val_t kAlignment{64};
  struct Deleter {
    void operator()(T* data) const { ::operator delete(data, kAlignment); }
  };

  int64_t* held_;
  int64_t count_ = 0;
  std::unique_ptr<T, Deleter> memory_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_BUFFER_H_
