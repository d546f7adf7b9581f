"""Prints "PASSED FAILED" for the event stream of one `bazel test`.

    count.py EVENTS.json BAZEL_EXIT_STATUS

A test that was not built counts as failed; one that is incompatible with this
machine (no CUDA toolkit) did not run and counts as neither. If Bazel failed
for a reason that no test carries, that is one failure.
"""

import json
import sys


def read_events(path):
    try:
        with open(path, encoding="utf-8") as stream:
            return [json.loads(line) for line in stream if line.strip()]
    except (OSError, ValueError):
        return []


def count(events, status):
    tests, broken, results = set(), set(), {}
    for event in events:
        ident = event["id"]
        if "targetConfigured" in ident:
            if event.get("configured", {}).get("testSize"):
                tests.add(ident["targetConfigured"]["label"])
        elif "targetCompleted" in ident:
            is_built = event.get("completed", {}).get("success", False)
            is_skipped = event.get("aborted", {}).get("reason") == "SKIPPED"
            if not is_built and not is_skipped:
                broken.add(ident["targetCompleted"]["label"])
        elif "testSummary" in ident:
            result = event.get("testSummary", {}).get("overallStatus")
            results[ident["testSummary"]["label"]] = result

    passed = {test for test, result in results.items() if result == "PASSED"}
    failed = (set(results) | (tests & broken)) - passed
    if status != 0 and not failed:
        return len(passed), 1
    return len(passed), len(failed)


print(*count(read_events(sys.argv[1]), int(sys.argv[2])))
