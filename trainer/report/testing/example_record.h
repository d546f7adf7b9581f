// A run that never was, with something of everything that a record can hold, and strings that mean
// harm.

#ifndef EVENKEEL_TRAINER_REPORT_TESTING_EXAMPLE_RECORD_H_
#define EVENKEEL_TRAINER_REPORT_TESTING_EXAMPLE_RECORD_H_

#include <string>

#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

inline constexpr char kHostile[] = "</script><b onload='x'>&\"\\ \x01\xFF";

// Ranks become exhausted one after the other, in each of two epochs; times are in steps of 10 ms.
RunRecord ExampleRecord(int ranks, int64_t steps = 200);

// A record of three ranks, the last of which is lost after 160 of 200 steps, in the second epoch.
RunRecord RecordOfLostRank();

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_TESTING_EXAMPLE_RECORD_H_
