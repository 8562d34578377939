"""`fsdplab report`: recorded runs and traces of PyTorch's profiler, shown and exported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdplab.cli.errors import refuse
from fsdplab.cli.exports import Exports
from fsdplab.cli.outputs import (
    Detail,
    Outputs,
    end_if_failed,
    print_findings,
    print_output_of_ranks,
    show,
    with_verdicts,
)
from fsdplab.records import RecordError, RunRecord, comparison_json


def report_records(paths: Sequence[Path], outputs: Outputs, exports: Exports) -> None:
    """Load recorded runs, show them, write the requested files; a finished record of the twin is the reference.

    Where a run has failed it ends with its report and exit code 1, as the command did that recorded it.
    """
    outputs.check()
    exports.check()
    loaded = load_all(paths)
    twins = [record for record in loaded if record.spec.get("engine") == "twin"]
    records = [record for record in loaded if record not in twins] or loaded
    reference = next((twin for twin in twins if twin.status == "finished"), None)
    comparison = comparison_json(records, reference)
    shown = with_verdicts(records, comparison)
    show(outputs.console(), shown, reference, outputs.detail)
    if outputs.detail is not Detail.QUIET:
        print_findings(outputs.console(), records)
    if outputs.detail is Detail.VERBOSE:
        print_output_of_ranks(outputs.console(), records)
    outputs.write(comparison, shown, records)
    exports.write(records, outputs.console())
    end_if_failed(loaded)


def load_all(paths: Sequence[Path]) -> list[RunRecord]:
    """Folders are records; files are traces, all of one run."""
    from fsdplab.profiling import AccountingError
    from fsdplab.profiling.traces.chrome import TraceError
    from fsdplab.profiling.traces.import_traces import record_of_traces

    traces = [path for path in paths if path.is_file()]
    try:
        loaded = [RunRecord.load(path) for path in paths if path not in traces]
        return loaded + ([record_of_traces(traces)] if traces else [])
    except (AccountingError, RecordError, TraceError) as error:
        refuse(str(error))
