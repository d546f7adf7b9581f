// The style and the script of a report, which are files of their own in the source and part of the program.

#ifndef EVENKEEL_TRAINER_REPORT_REPORT_ASSETS_H_
#define EVENKEEL_TRAINER_REPORT_REPORT_ASSETS_H_

namespace evenkeel {

extern const char kReportStyle[];   // report.css
extern const char kReportScript[];  // report.js

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_REPORT_ASSETS_H_
