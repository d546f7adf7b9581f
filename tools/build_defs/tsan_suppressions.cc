// Facts that ThreadSanitizer cannot know about libraries that it did not compile.

extern "C" const char* __tsan_default_suppressions();

extern "C" const char* __tsan_default_suppressions() {
  // absl::Status counts its references inside the installed library, so the
  // deletion by the last owner, with that of its payloads, looks unordered after
  // the copies of others. The record of lock orders that Abseil keeps is guarded
  // by a lock of its own.
  //
  // GNU's OpenMP (below oneDNN) synchronises by futexes of its own, so memory
  // that its threads hand over looks unordered. Only what happens inside its
  // parallel regions is left out.
  //
  // Gloo's buffers, when an operation fails, wait in their destructor for its
  // own thread, by an atomic inside the library, so what that thread did looks
  // unordered. asan sees whether it touches a buffer too late.
  return "race:gloo::transport::tcp::\n"
         "race:absl::*::Status::Unref\n"
         "race:absl::*::status_internal::Payload\n"
         "race:absl::*::synchronization_internal::GraphCycles\n"
         "race:libgomp.so\n"
         "thread:libgomp.so\n"
         "called_from_lib:libgomp.so\n";
}
