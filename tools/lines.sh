#!/usr/bin/env bash
# Prints the production lines of C++: per folder, and the longest files and functions.
#
#   tools/lines.sh        the files that git knows, and each function of more than 70 lines
#   tools/lines.sh 100    ... of more than 100 lines
#
# Tests, benchmarks, and what only tests use (testing/, simulated...) do not count. A function is
# what ends with a brace in the first column; its signature counts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
most=${1-70}
[[ $# -le 1 && $most =~ ^[0-9]+$ ]] || { echo "usage: tools/lines.sh [LINES]" >&2; exit 2; }

mapfile -t files < <(git ls-files '*.cc' '*.h' '*.cu' '*.cuh' |
  grep -vE '_test\.|_benchmark|^tests/|testing|simulated')

awk -v most="$most" '
  function folder(file) { sub(/\/.*/, "", file); return file }
  FNR == 1 { files[folder(FILENAME)]++; all_files++; began = 0 }
  {
    lines[folder(FILENAME)]++; all++
    if (++of_file[FILENAME] > of_file[largest]) largest = FILENAME
  }
  # A line in the first column begins a definition.
  /^[A-Za-z_~]/ && !/^(namespace|struct|class|enum|union|extern|using|template|[A-Z_]+\()/ {
    began = FNR; name = $0
    if (/[;}]$/) began = 0
  }
  /^\}$/ && began {
    n = FNR - began + 1
    functions++
    if (n > most) over[++overs] = sprintf("%5d  %s:%d  %s", n, FILENAME, began, substr(name, 1, 60))
    if (n > longest) { longest = n; where = FILENAME ":" began }
    began = 0
  }
  END {
    for (f in lines) printf "%7d lines  %4d files  %s\n", lines[f], files[f], f | "sort -k5"
    close("sort -k5")
    printf "%7d lines  %4d files  in all\n", all, all_files
    printf "largest file: %s, %d lines\n", largest, of_file[largest]
    printf "longest function: %s, %d lines\n", where, longest
    printf "%d of %d functions have more than %d lines\n", overs, functions, most
    for (i = 1; i <= overs; i++) print over[i] | "sort -rn"
  }' "${files[@]}"
