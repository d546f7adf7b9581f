// The parts of a report but for its curves and steps: key figures, ranks, buckets, memory, tables. Each is empty if the
// record has nothing for it.
//
//   html += RenderFigures(record);
//
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_REPORT_REPORT_SECTIONS_H_
#define EVENKEEL_TRAINER_REPORT_REPORT_SECTIONS_H_

#include <string>

#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

std::string RenderFigures(const RunRecord& record);
std::string RenderRanks(const RunRecord& record);  // When each had a batch.
std::string RenderPlans(const RunRecord& record);  // Buckets.
std::string RenderMemory(const RunRecord& record);
std::string RenderRankTable(const RunRecord& record);
std::string RenderEvents(const RunRecord& record);
std::string RenderSettings(const RunRecord& record);

// What a language model's loss (in nats per prediction) is in bits per byte.
double BitsPerByte(double loss, double bytes_per_prediction);

// A page's part, with its heading; nothing if `content` is empty.
std::string Section(const std::string& heading, const std::string& lead, const std::string& content);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_REPORT_SECTIONS_H_
