"""Prints "PASSED FAILED" for the event stream of one `bazel test`.

    count.py EVENTS.json BAZEL_EXIT_STATUS

A test that was not built counts as failed; one that is incompatible with this
machine (no CUDA toolkit) did not run and counts as neither. So does a test all of
whose cases skipped, which Bazel calls passed: standard error says how many cases
skipped, and why, those of tests that need a GPU (tag "gpu") by themselves. A C++
test that wrote no GoogleTest report counts as failed: a library with its own
main() may have replaced GoogleTest's, so that no case ran. If Bazel failed for a
reason that no test carries, that is one failure.
"""

import collections
import json
import sys
import urllib.parse
import xml.etree.ElementTree


def read_events(path):
    try:
        with open(path, encoding="utf-8") as stream:
            return [json.loads(line) for line in stream if line.strip()]
    except (OSError, ValueError):
        return []


def cases_of(uri):
    """For each case in GoogleTest's report of a test: why it skipped, or None."""
    try:
        report = xml.etree.ElementTree.parse(urllib.parse.unquote(urllib.parse.urlparse(uri).path))
    except (OSError, xml.etree.ElementTree.ParseError):
        return []
    reasons = []
    for case in report.iter("testcase"):
        if not case.get("classname"):  # The report that Bazel makes where a test has made none.
            continue
        skipped = case.find("skipped")
        if skipped is None:
            reasons.append(None)
        else:  # GoogleTest: the place in the source, and the reason in the lines behind it.
            lines = (skipped.get("message") or skipped.text or "").strip().split("\n")
            reasons.append(" ".join(lines[1:] or lines).strip() or "no reason given")
    return reasons


class Skips:
    """The outcomes of the cases of tests, by whether these need a GPU."""

    def __init__(self):
        self.gpu, self.incompatible = set(), set()
        self.cases = collections.defaultdict(list)

    def without_a_run(self):
        """Tests in which no case ran; a test without a report ran unless it needs a GPU."""
        return {label for label, reasons in self.cases.items() if None not in reasons and (reasons or label in self.gpu)}

    def sentences(self):
        yield from self.sentences_of("GPU tests", self.gpu)
        if self.gpu and self.incompatible:
            yield f"  {len(self.incompatible)} targets not built: no CUDA toolkit, NCCL or cuDNN"
        yield from self.sentences_of("Other tests", self.cases.keys() - self.gpu, only_skips=True)

    def sentences_of(self, what, labels, only_skips=False):
        reasons = [reason for label in labels for reason in self.cases.get(label, [])]
        ran = reasons.count(None)
        if not labels or (only_skips and ran == len(reasons)):
            return
        yield f"{what}: {ran} ran, {len(reasons) - ran} skipped"
        for reason, times in collections.Counter(r for r in reasons if r).most_common():
            yield f"  {times} skipped: {reason}"
        silent = [label for label in labels if self.cases.get(label) == [] and label in self.gpu]
        if silent:
            yield f"  {len(silent)} targets without a report of their cases"


def count(events, status):
    """(passed, failed, Skips)"""
    tests, broken, results, skips, with_cases = set(), set(), {}, Skips(), set()
    for event in events:
        ident = event["id"]
        if "targetConfigured" in ident:
            configured = event.get("configured", {})
            if configured.get("testSize"):
                tests.add(ident["targetConfigured"]["label"])
                if configured.get("targetKind") != "sh_test rule" and "benchmark" not in configured.get("tag", []):
                    with_cases.add(ident["targetConfigured"]["label"])
                if "gpu" in configured.get("tag", []):
                    skips.gpu.add(ident["targetConfigured"]["label"])
        elif "targetCompleted" in ident:
            label = ident["targetCompleted"]["label"]
            is_built = event.get("completed", {}).get("success", False)
            is_skipped = event.get("aborted", {}).get("reason") == "SKIPPED"
            if is_skipped and label in skips.gpu:
                skips.incompatible.add(label)
            if not is_built and not is_skipped:
                broken.add(label)
        elif "testResult" in ident:
            cases = skips.cases[ident["testResult"]["label"]]
            for output in event.get("testResult", {}).get("testActionOutput", []):
                if output["name"] == "test.xml":
                    cases += cases_of(output["uri"])
        elif "testSummary" in ident:
            result = event.get("testSummary", {}).get("overallStatus")
            results[ident["testSummary"]["label"]] = result

    passed = {test for test, result in results.items() if result == "PASSED"}
    silent = {test for test in passed & with_cases if not skips.cases.get(test)}
    for test in sorted(silent):
        print(f"FAILED  {test} wrote no GoogleTest report; does a dependency define main()?", file=sys.stderr)
    passed -= silent
    failed = (set(results) | (tests & broken)) - passed
    passed -= skips.without_a_run()
    if status != 0 and not failed:
        return len(passed), 1, skips
    return len(passed), len(failed), skips


def main():
    passed, failed, skips = count(read_events(sys.argv[1]), int(sys.argv[2]))
    for sentence in skips.sentences():
        print(sentence, file=sys.stderr)
    print(passed, failed)


main()
