// The part of a program that knows evenkeel; its callers need none of evenkeel's headers.

#ifndef FIT_LINE_H_
#define FIT_LINE_H_

#include <string>

// Fits a line through points that are spread unevenly over the job's ranks. What it found, or
// "error: ..." and why.
std::string FitLine(const std::string& backend);

#endif  // FIT_LINE_H_
