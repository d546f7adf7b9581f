// The style and the script of a report: separate source files, embedded into the program.

#ifndef EVENKEEL_TRAINER_REPORT_REPORT_ASSETS_H_
#define EVENKEEL_TRAINER_REPORT_REPORT_ASSETS_H_

namespace evenkeel {

extern const char kReportStyle[];   // report.css
extern const char kReportScript[];  // report.js

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_REPORT_ASSETS_H_
