// What ThreadSanitizer cannot know about libraries that it did not compile.

extern "C" const char* __tsan_default_suppressions();

extern "C" const char* __tsan_default_suppressions() {
  // GNU's OpenMP (below oneDNN) synchronises by futexes of its own, so memory
  // that its threads hand over looks unordered. Only what happens inside its
  // parallel regions is left out.
  return "race:libgomp.so\n"
         "thread:libgomp.so\n"
         "called_from_lib:libgomp.so\n";
}
