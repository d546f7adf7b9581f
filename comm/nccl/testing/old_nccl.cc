// A library that calls itself NCCL, for library_test.

extern "C" {

int old_nccl_version = 2408;

int ncclGetVersion(int* version) {
  *version = old_nccl_version;
  return 0;
}

}  // extern "C"
