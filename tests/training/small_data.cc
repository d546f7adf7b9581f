#include "evenkeel/tests/training/small_data.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <cstdint>
#include <fstream>
#include <initializer_list>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/data/stable_random.h"

namespace evenkeel {
namespace {

// Header of an IDX file of bytes: big-endian numbers.
std::string IdxHeader(std::initializer_list<int> sizes) {
  std::string header = {0, 0, 8, static_cast<char>(sizes.size())};
  for (int size : sizes) {
    for (int shift : {24, 16, 8, 0}) header += static_cast<char>(size >> shift);
  }
  return header;
}

// A rank that has been started already may read an older file of that name, which is the same.
void Replace(const std::string& path, const std::string& contents) {
  const std::string whole = absl::StrCat(path, ".new");
  WriteText(whole, contents);
  rename(whole.c_str(), path.c_str());
}

void WriteSplit(const std::string& folder, const std::string& split, int count, uint64_t seed) {
  StableRandom random(seed);
  std::string images = IdxHeader({count, kImageSide, kImageSide});
  std::string labels = IdxHeader({count});
  for (int i = 0; i < count; ++i) {
    const int label = static_cast<int>(random.Below(kClasses));
    labels += static_cast<char>(label);
    for (int pixel = 0; pixel < kImagePixels; ++pixel) {
      const bool is_in_stripe = pixel / kImageSide / 2 == label + 2;
      images += static_cast<char>(random.Below(128) + (is_in_stripe ? 127 : 0));
    }
  }
  Replace(absl::StrCat(folder, "/", split, "-images-idx3-ubyte"), images);
  Replace(absl::StrCat(folder, "/", split, "-labels-idx1-ubyte"), labels);
}

}  // namespace

std::string TempPath(const std::string& name) {
  return absl::StrCat(getenv("TEST_TMPDIR"), "/", name);
}

void WriteText(const std::string& path, absl::string_view contents) {
  std::ofstream(path, std::ios::binary)
      .write(contents.data(), static_cast<std::streamsize>(contents.size()));
}

std::string ReadText(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::string WriteSmallData(const std::string& name, const SmallData& data) {
  const std::string folder = TempPath(name);
  mkdir(folder.c_str(), 0755);
  WriteSplit(folder, "train", data.train, 1);
  WriteSplit(folder, "t10k", data.test, 2);
  return folder;
}

}  // namespace evenkeel
