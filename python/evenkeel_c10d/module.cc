// The Python module evenkeel_c10d._bridge: makes backends, and turns failures into Python's
// exceptions. build.py names it after the version of torch: EVENKEEL_BRIDGE.
//
// An exception travels as torch's python_error. A translator of our own would not do: pybind's
// translators see what torch's bindings throw, but not what the autograd engine throws, and the
// engine runs the collectives of DistributedDataParallel.

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/pythoncapi_compat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend.h"
#include "error.h"
#include "evenkeel/join/abi/step_monitor.h"
#include "store.h"
#include "work.h"

namespace py = pybind11;

namespace evenkeel::bridge {
namespace {

// evenkeel_c10d.Error, and a function of the package. Never freed: works may fail until the process
// has ended.
PyObject* error_type = nullptr;
PyObject* reason_of_abort = nullptr;

std::exception_ptr PythonError(const abi::Failure& failure) {
  const py::gil_scoped_acquire gil;
  try {
    py::dict attributes;
    attributes["kind"] = failure.kind;
    attributes["ranks"] = py::tuple(py::cast(failure.ranks));
    attributes["operation"] = failure.operation;
    attributes["position"] = failure.position;
    const auto type = py::reinterpret_borrow<py::object>(error_type);
    const py::object error = type(failure.message, **attributes);
    python_error carrier;
    carrier.type = type.inc_ref().ptr();
    carrier.value = error.inc_ref().ptr();
    carrier.message = failure.message;
    return std::make_exception_ptr(std::move(carrier));
  } catch (py::error_already_set&) {
    return nullptr;
  }
}

bool CanUsePython() { return error_type != nullptr && Py_IsInitialized() && !Py_IsFinalizing(); }

// A monitor that a forked child forgets: it has neither the threads nor the right to use the
// parent's connections.
class Monitor {
 public:
  Monitor(const c10::intrusive_ptr<c10d::Store>& store, int rank,
          const std::vector<uint64_t>& ranks, std::chrono::milliseconds timeout,
          const std::string& name) {
    StoreAdapter adapter(store, rank, "watch", name, ranks);
    abi::Failure failure;
    monitor_ = abi::CreateStepMonitor(
        adapter,
        OptionsOf(store, rank, static_cast<int>(ranks.size()), timeout, adapter.name(), ranks),
        &failure);
    if (monitor_ == nullptr) std::rethrow_exception(ExceptionOf(failure));
  }
  ~Monitor() {
    if (getpid() != pid_) monitor_.release();  // NOLINT(bugprone-unused-return-value)
    WithoutGil([this] { monitor_.reset(); });
  }
  abi::StepMonitor* operator->() { return monitor_.get(); }

 private:
  const pid_t pid_ = getpid();
  std::unique_ptr<abi::StepMonitor> monitor_;
};

void Require(const abi::Failure& failure) {
  if (failure.code != abi::Code::kOk) std::rethrow_exception(ExceptionOf(failure));
}

Backend& Own(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto* own = dynamic_cast<Backend*>(backend.get());
  if (own == nullptr) throw py::type_error("the group does not use the backend evenkeel");
  return *own;
}

}  // namespace

std::exception_ptr ExceptionOf(const abi::Failure& failure) {
  const c10::SourceLocation location{__func__, __FILE__, __LINE__};
  const std::string message = "evenkeel: " + failure.message;
  switch (failure.code) {
    case abi::Code::kInvalidArgument:
      return std::make_exception_ptr(c10::Error(location, message));
    case abi::Code::kUnimplemented:
      return std::make_exception_ptr(c10::NotImplementedError(location, message));
    default:
      break;
  }
  std::exception_ptr error = CanUsePython() ? PythonError(failure) : nullptr;
  if (error != nullptr) return error;
  return std::make_exception_ptr(c10::DistBackendError(location, message));
}

std::string ReasonOfAbort() {
  if (!CanUsePython()) return "";
  const py::gil_scoped_acquire gil;
  try {
    return py::handle(reason_of_abort)().cast<std::string>();
  } catch (py::error_already_set&) {  // The text of the exception raises one.
    return "";
  }
}

void WithoutGil(const std::function<void()>& function) {
  if (!Py_IsInitialized() || !PyGILState_Check()) return function();
  const py::gil_scoped_release release;
  function();
}

namespace {

void DefineGroups(py::module_& module) {
  module.def(
      "create",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
         std::chrono::milliseconds timeout, std::string name,
         std::vector<uint64_t> global_ranks) -> c10::intrusive_ptr<c10d::Backend> {
        return Backend::Create({.store = store,
                                .rank = rank,
                                .world_size = world_size,
                                .timeout = timeout,
                                .name = std::move(name),
                                .global_ranks = std::move(global_ranks)});
      },
      py::arg("store"), py::arg("rank"), py::arg("world_size"), py::arg("timeout"), py::arg("name"),
      py::arg("global_ranks"), py::call_guard<py::gil_scoped_release>());
  module.def("leave_all", &Backend::LeaveAll, py::arg("why"), py::arg("timeout"),
             py::call_guard<py::gil_scoped_release>());
  module.def(
      "transport",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) { return Own(backend).transport(); },
      py::arg("backend"));
  module.def(
      "flight_json",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) { return Own(backend).FlightJson(); },
      py::arg("backend"), py::call_guard<py::gil_scoped_release>());
}

void DefineWorks(py::module_& module) {
  using torch::jit::PythonFutureWrapper;
  // Registered, so that Python gets objects of this class: see _futures.py.
  py::class_<Work, c10d::Work, c10::intrusive_ptr<Work>>(module, "Work")
      .def("is_message", [](Work& work) { return c10d::isP2POp(work.retrieveOpType()); });
  module.def(
      "share_future",
      [](const PythonFutureWrapper& from, PythonFutureWrapper& to) { to.fut = from.fut; },
      py::arg("source"), py::arg("to"));
  // Unlike Future.wait(), it does not raise the future's error.
  module.def(
      "await_future", [](PythonFutureWrapper& future) { future.fut->wait(); }, py::arg("future"),
      py::call_guard<py::gil_scoped_release>());
}

void DefineSharing(py::class_<Monitor>& monitor) {
  monitor
      .def(
          "begin_sharing",
          [](Monitor& monitor, int64_t batch, int64_t quantum, const std::vector<int64_t>& least,
             const std::vector<int64_t>& most, int64_t lag) {
            Require(monitor->BeginSharing(
                {.batch = batch, .quantum = quantum, .least = least, .most = most, .lag = lag}));
          },
          py::arg("batch"), py::arg("quantum"), py::arg("least"), py::arg("most"), py::arg("lag"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "divide",
          [](Monitor& monitor, int64_t step, int64_t samples) {
            std::vector<int64_t> boundaries;
            Require(monitor->Divide(step, samples, &boundaries));
            return boundaries;
          },
          py::arg("step"), py::arg("samples"), py::call_guard<py::gil_scoped_release>())
      .def(
          "last_times", [](Monitor& monitor) { return monitor->LastTimes(); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "add_times",
          [](Monitor& monitor, int64_t step, const std::vector<int64_t>& times) {
            Require(monitor->AddTimes(step, times));
          },
          py::arg("step"), py::arg("times"), py::call_guard<py::gil_scoped_release>())
      .def(
          "restart_sharing", [](Monitor& monitor) { monitor->RestartSharing(); },
          py::call_guard<py::gil_scoped_release>())
      .def("shares", [](Monitor& monitor) { return monitor->Shares(); })
      .def("take_share_news", [](Monitor& monitor) { return monitor->TakeShareNews(); });
}

void DefineMonitor(py::module_& module) {
  using abi::Phase;
  py::class_<Monitor> monitor(module, "StepMonitor");
  DefineSharing(monitor);
  monitor
      .def(py::init<const c10::intrusive_ptr<c10d::Store>&, int, const std::vector<uint64_t>&,
                    std::chrono::milliseconds, const std::string&>(),
           py::arg("store"), py::arg("rank"), py::arg("ranks"), py::arg("timeout"), py::arg("name"),
           py::call_guard<py::gil_scoped_release>())
      .def("enter",
           [](Monitor& monitor, int phase) {
             return static_cast<int>(monitor->Enter(static_cast<Phase>(phase)));
           })
      .def("begin_backward", [](Monitor& monitor) { monitor->BeginBackward(); })
      .def("begin_wait", [](Monitor& monitor) { monitor->BeginWait(); })
      .def("end_wait", [](Monitor& monitor) { monitor->EndWait(); })
      .def(
          "end_reduction", [](Monitor& monitor) { monitor->EndReduction(); },
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("steps", [](Monitor& monitor) { return monitor->steps(); })
      .def("take_news", [](Monitor& monitor) { return monitor->TakeNews(); })
      .def("table", [](Monitor& monitor) { return monitor->Table(); })
      .def("stragglers",
           [](Monitor& monitor) {
             py::list found;
             for (const auto& [rank, cost, phase] : monitor->Stragglers())
               found.append(py::make_tuple(rank, cost, static_cast<int>(phase)));
             return found;
           })
      .def(
          "tell", [](Monitor& monitor, const std::string& text) { monitor->Tell(text); },
          py::arg("text"), py::call_guard<py::gil_scoped_release>())
      .def("take_messages",
           [](Monitor& monitor) {
             py::list taken;
             for (const auto& [from, text] : monitor->TakeMessages())
               taken.append(py::make_tuple(from, text));
             return taken;
           })
      .def("failure",
           [](Monitor& monitor) {
             const abi::Failure failure = monitor->failure();
             return py::make_tuple(failure.message, failure.ranks);
           })
      .def(
          "abort", [](Monitor& monitor, const std::string& why) { monitor->Abort(why); },
          py::arg("why"), py::call_guard<py::gil_scoped_release>())
      .def(
          "leave", [](Monitor& monitor) { monitor->Leave(); },
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace evenkeel::bridge

PYBIND11_MODULE(EVENKEEL_BRIDGE, module) {
  const std::string loaded = evenkeel::abi::Version();
  if (loaded != EVENKEEL_VERSION) {
    throw py::import_error("evenkeel_c10d was built with evenkeel " EVENKEEL_VERSION
                           " and libevenkeel.so is " +
                           loaded + "; install both again.");
  }
  module.attr("version") = loaded;
  module.def("set_error_type",
             [](const py::object& type) { evenkeel::bridge::error_type = type.inc_ref().ptr(); });
  module.def("set_reason_of_abort", [](const py::object& function) {
    evenkeel::bridge::reason_of_abort = function.inc_ref().ptr();
  });
  evenkeel::bridge::DefineGroups(module);
  evenkeel::bridge::DefineWorks(module);
  evenkeel::bridge::DefineMonitor(module);
}
