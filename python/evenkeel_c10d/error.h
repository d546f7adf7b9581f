// evenkeel's failures as exceptions that torch's bindings turn into Python's.
//
// The implementation is in module.cc, the only file that includes Python.

#ifndef EVENKEEL_PYTHON_EVENKEEL_C10D_ERROR_H_
#define EVENKEEL_PYTHON_EVENKEEL_C10D_ERROR_H_

#include <c10/util/Exception.h>

#include <exception>
#include <functional>
#include <string>

#include "evenkeel/comm/abi/group.h"

namespace evenkeel::bridge {

// Returns RuntimeError for a call that was wrong by itself, NotImplementedError for one that
// evenkeel lacks, else an evenkeel_c10d.Error with its attributes. May be called with the GIL or
// without it.
std::exception_ptr ExceptionOf(const abi::Failure& failure);

// Returns the text of the Python exception that the calling thread handles, for the peers of a rank
// that aborts; empty if there is none.
std::string ReasonOfAbort();

// Calls `function`. Returns false if it throws, with the text of the exception in `error`, without
// torch's backtrace.
template <typename Function>
bool Try(std::string* error, Function function) {
  try {
    function();
    return true;
  } catch (const c10::Error& caught) {
    *error = caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    *error = caught.what();
  }
  return false;
}

// Calls `function` without the GIL, whether the caller holds it or not.
void WithoutGil(const std::function<void()>& function);

}  // namespace evenkeel::bridge

#endif  // EVENKEEL_PYTHON_EVENKEEL_C10D_ERROR_H_
