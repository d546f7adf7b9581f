// GPT-2's alphabet: the order of the bytes in a vocabulary, and the printable character that stands
// for each byte in files.
//
//   Gpt2Order('A');       // 32: printable bytes come first,
//   Gpt2Order(' ');       // 220: then the others.
//   Gpt2Character(' ');   // U+0120; printable bytes stand for themselves
//
// Threads: pure functions.
// Source:  bytes_to_unicode() in https://github.com/openai/gpt-2, encoder.py.

#ifndef EVENKEEL_TRAINER_TOKENIZER_GPT2_BYTES_H_
#define EVENKEEL_TRAINER_TOKENIZER_GPT2_BYTES_H_

#include <cstdint>

namespace evenkeel {

constexpr int kPrintableBytes = 188;

constexpr bool IsPrintable(int byte) {
  return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xff && byte != 0xad);
}

constexpr int32_t Gpt2Order(uint8_t byte) {
  int32_t order = IsPrintable(byte) ? 0 : kPrintableBytes;
  for (int lower = 0; lower < byte; ++lower) order += IsPrintable(lower) == IsPrintable(byte);
  return order;
}

constexpr uint32_t Gpt2Character(uint8_t byte) {
  return IsPrintable(byte) ? byte : 256 + Gpt2Order(byte) - kPrintableBytes;
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_TOKENIZER_GPT2_BYTES_H_
