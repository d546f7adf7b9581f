// The parts of a report except its curves: key figures, steps, ranks, buckets, memory, tables.
// Each is empty if the record has no data for it.
//
//   html += RenderFigures(record);
//
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_REPORT_REPORT_SECTIONS_H_
#define EVENKEEL_TRAINER_REPORT_REPORT_SECTIONS_H_

#include <string>

#include "absl/strings/string_view.h"
#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

// The style and the script of a page: report.css and report.js, embedded into the program.
extern const char kReportStyle[];
extern const char kReportScript[];

std::string RenderFigures(const RunRecord& record);
std::string RenderRanks(const RunRecord& record);   // The steps for which each had a batch.
std::string RenderPlans(const RunRecord& record);   // Buckets.
std::string RenderMemory(const RunRecord& record);  // With the hosts of the ranks.
std::string RenderWaits(const RunRecord& record);   // Without the costs over time.
std::string RenderEvents(const RunRecord& record);
std::string RenderSettings(const RunRecord& record);

// The sampled steps, rank by rank: the computation of each rank, and below it the reduction of its
// buckets, in one shade where backward hid it and in another where the rank waited. One step is
// shown at a time; switching steps needs no script.
std::string RenderTimeline(const RunRecord& record);

// Renders a rank's name, a text about it, a row of bars, and the rows below it.
std::string RenderLane(int rank, absl::string_view text, absl::string_view bars,
                       absl::string_view below = "");

// Converts a language model's loss from nats per prediction to bits per byte.
double BitsPerByte(double loss, double bytes_per_prediction);

// Returns a section of the page with its heading; an empty text if `content` is empty.
std::string Section(const std::string& heading, const std::string& lead,
                    const std::string& content);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_REPORT_SECTIONS_H_
