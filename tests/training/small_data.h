// A small data set in files, as the trainer wants it: noise with a bright stripe whose row tells
// the label.
//
//   // in TEST_TMPDIR
//   const std::string folder = WriteSmallData("data", {.train = 240, .test = 50});

#ifndef EVENKEEL_TESTS_TRAINING_SMALL_DATA_H_
#define EVENKEEL_TESTS_TRAINING_SMALL_DATA_H_

#include <string>

#include "absl/strings/string_view.h"

namespace evenkeel {

struct SmallData {
  int train = 240;
  int test = 50;
};

// The folder's path. Equal calls write equal files.
std::string WriteSmallData(const std::string& name, const SmallData& data = {});

std::string TempPath(const std::string& name);  // In TEST_TMPDIR.
void WriteText(const std::string& path, absl::string_view contents);
std::string ReadText(const std::string& path);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_TRAINING_SMALL_DATA_H_
