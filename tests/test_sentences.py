"""No two sentences on one record disagree, and none says more than the tables hold.

For every record in `data/`, for records as runs leave them, and for seeded random jobs of one to four GPU ranks, all
sentences are made (findings, titles of figures, tables, the line on the fastest run) and checked against the tables.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplab import figures
from fsdplab.figures.fastest import race_of, step_words
from fsdplab.figures.plotly_go import go
from fsdplab.figures.view import views
from fsdplab.profiling.findings import Finding, findings
from fsdplab.profiling.late_rank import late_rank_of
from fsdplab.profiling.step_facts import step_facts
from fsdplab.profiling.step_summary import step_summary
from fsdplab.profiling.tables import Table, difference_of_steps, tables_of_pair, tables_of_record
from fsdplab.profiling.traces.import_traces import record_of_traces
from fsdplab.records import RunRecord, Spread
from tests.gpu_traces import GpuRank
from tests.test_figures_profiled import profiled

DATA = Path(__file__).parent.parent / "data"
EXCLUSIVE = (
    {"slow_rank", "late_rank"}, {"one_loader", "late_rank"}, {"unknown_link", "slow_link"},
    {"host_bound", "data_loading"}, {"host_bound", "synchronisation"}, {"data_loading", "synchronisation"},
    {"idle", "host_bound"}, {"idle", "data_loading"}, {"idle", "synchronisation"}, {"idle", "kernel_gaps"},
    {"short_of_cores", "skew"}, {"short_of_cores", "slow_rank"}, {"short_of_cores", "idle"},
)  # fmt: skip
UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
SPAN = re.compile(r"(?<![\w.])(\d+(?:[.,]\d+)*) (ns|µs|ms|s)\b")
SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")


def words(figure: go.Figure) -> str:
    return re.sub(r"<br>", " ", f"{figure.layout.title.text}").replace("<b>", "").replace("</b>", "")


def spans(text: str) -> list[float]:
    return [float(number.replace(",", "")) * UNITS[unit] for number, unit in SPAN.findall(text)]


def drawn(draw: object, *given: object) -> str:
    """The title of a figure; "" where there is nothing to draw."""
    try:
        return words(draw(*given))  # type: ignore[operator]
    except ValueError:
        return ""


# ---- what may be wrong


def wrong(record: RunRecord) -> Iterator[str]:
    """What the sentences on one record say that is not so."""
    found, worst = findings(record), step_summary(record.table("breakdown"))
    assert worst is not None
    yield from wrong_claims(record, found)
    yield from wrong_names(record, found)
    yield from wrong_ranks(record, found)
    exposed = drawn(figures.exposed_bar, [record])
    if exposed and worst.exposed_ns and not any(map(near(worst.exposed_ns / 1e9), spans(exposed))):
        yield f"the title of exposed time, {exposed!r}, has not the {worst.exposed_ns} ns of the table"
    for title in (exposed, drawn(figures.step_bar, [record])):
        if any(float(share) > 100 for share in SHARE.findall(title)):
            yield f"a share above the whole: {title!r}"


def near(value: float):
    return lambda other: abs(other - value) <= 0.006 * max(value, other) + 1e-9


def wrong_claims(record: RunRecord, found: list[Finding]) -> Iterator[str]:
    """Claims on exposed time add up to what is exposed; a title has its own seconds, and no share above 100 %."""
    facts = step_facts(record)
    exposed = [each for each in found if each.of == "exposed"]
    if sum(each.seconds for each in exposed) > facts.exposed_s + 1e-6:
        yield f"findings claim more than the {facts.exposed_s} s that are exposed"
    withheld = any(each.kind == "short_of_cores" for each in found)
    untold = facts.exposed_s - sum(each.seconds for each in exposed)
    if not withheld and untold > max(0.05 * facts.exposed_s, 0.02 * facts.step_s) + 1e-6:
        yield f"{untold} s of {facts.exposed_s} exposed are claimed by nobody"
    idle = facts.other_s > 0.1 * facts.step_s + 1e-9
    if idle and not withheld and not any(each.of == "step" for each in found):
        yield f"{facts.other_s} s of {facts.step_s} are idle, and nobody says so"
    for each in found:
        if each.seconds > facts.step_s * (1 + 1e-9):
            yield f"{each.kind} claims {each.seconds} s of a step of {facts.step_s}"
        if (
            each.seconds
            and each.of == "exposed"
            and not any(map(near(each.seconds), spans(f"{each.title} {each.text}")))
        ):
            yield f"{each.title!r} has not its own {each.seconds} s"
        if any(float(share) > 100 for share in SHARE.findall(each.title)):
            yield f"a share above the whole: {each.title!r}"


def wrong_names(record: RunRecord, found: list[Finding]) -> Iterator[str]:
    """Ranks, units and phases that a finding names are in the tables, and its kinds may stand together."""
    ranks = {row["rank"] for row in record.table("breakdown")}
    tables = ("exposed", "timeline", "ledger", "life")
    units = {row["unit"] for table in tables for row in record.table(table)} | {"", "root"}
    phases = {row["phase"] for table in tables for row in record.table(table)} | {""}
    for each in found:
        named = {int(rank) for rank in re.findall(r"\b[Rr]ank (\d+)\b", f"{each.title} {each.text}")}
        if not named | ({each.rank} - {None}) <= ranks:
            yield f"{each.title!r} names a rank that the record has not: {ranks}"
        if each.unit not in units or each.phase not in phases:
            yield f"{each.title!r} names {each.unit!r} in {each.phase!r}, which no table has"
    kinds = [each.kind for each in found]
    if len(set(kinds)) < len(kinds):
        yield f"one kind twice: {kinds}"
    yield from (f"kinds that exclude each other: {kinds}" for pair in EXCLUSIVE if pair <= set(kinds))


def wrong_ranks(record: RunRecord, found: list[Finding]) -> Iterator[str]:
    """Findings and the straggler map name the same rank, or none; nobody is late beside "no rank is late"."""
    late, title = late_rank_of(record), drawn(figures.straggler_map, record)
    told = {each.rank for each in found if each.kind in ("slow_rank", "late_rank")}
    straggler = {int(rank) for rank in re.findall(r"rank (\d+) straggles", title)}
    if (told or straggler) - ({late.rank} if late else set()):
        yield f"{told or straggler} is called late, and the test on arrivals names {late}"
    if told and straggler and told != straggler or straggler and "no straggler" in title:
        yield f"findings name {told}, the straggler map says {title!r}"
    worst = step_summary(record.table("breakdown"))
    known = worst is not None and worst.waiting_ns is not None
    smaller = any(each.kind == "smaller_causes" for each in found)
    if straggler and not told and known and not smaller and not record.summary.short_of_cores:
        yield f"no finding names a rank, the straggler map says {title!r}"
    if told and any("No rank is late" in each.text for each in found):
        yield f"{told} is late, and another finding says that none is"


def wrong_tables(tables: list[Table], record: RunRecord) -> Iterator[str]:
    """A sentence names ranks that its rows have, and shares are of a whole."""
    ranks = {row["rank"] for row in record.table("breakdown")}
    for table in tables:
        named = {int(rank) for rank in re.findall(r"\b[Rr]ank (\d+)\b", table.sentence)}
        if not named <= ranks:
            yield f"{table.name} names rank {named}, the record has {ranks}"
        if any(float(share) > 100.5 for share in SHARE.findall(table.sentence)):
            yield f"a share above the whole: {table.sentence!r}"
        for row in table.rows if table.name == "idle" else ():
            parts = sum(value for name, value in row.items() if name.endswith("_ns") and name != "idle_ns")
            if abs(parts - row["idle_ns"]) > 1:
                yield f"the causes of idle time are {parts} of {row['idle_ns']} ns"


def wrong_pair(first: RunRecord, second: RunRecord) -> Iterator[str]:
    """The figure of a difference goes the way of the tables, and its largest part too."""
    before, after = (step_summary(record.table("breakdown")).exposed_ns for record in (first, second))
    title = drawn(figures.difference, first, second)
    said = re.search(r"is exposed .* a step (less|more)", title)
    if said and (after > before) != (said[1] == "more"):
        yield f"{title!r}, and exposed time goes from {before} to {after} ns"
    if said and (part := re.search(r"\(([-+−])[\d.]+", title)) and (part[1] == "+") != (said[1] == "more"):
        yield f"the largest part goes the other way: {title!r}"
    table = difference_of_steps(first, second)
    lengths = [step_summary(record.table("breakdown")).step_ns for record in (first, second)]
    summed = sum(row["difference_ns"] for row in table.rows if row["part"] != "loading data")
    if abs(summed - (lengths[1] - lengths[0])) > 2:
        yield f"parts of the difference sum to {summed} ns, the steps differ by {lengths[1] - lengths[0]}"
    if (longer := re.search(r"(longer|shorter)", table.sentence)) and (summed > 0) != (longer[1] == "longer"):
        yield f"{table.sentence!r}, and the parts sum to {summed}"


def wrong_race(records: list[RunRecord]) -> Iterator[str]:
    """Terminal, steps and Pareto name one winner, or none does."""
    shown = views(records)
    race, titles = (
        race_of(shown),
        [step_words(shown), drawn(figures.step_time, records), drawn(figures.pareto, records)],
    )
    winners = [
        re.findall(r"(\S+) (?:needs least memory, \S+ \S+, and )?is fastest", title) for title in titles if title
    ]
    expected = [] if race.winner is None else [shown[race.winner].label]
    if any(names and names != expected for names in winners) or winners[0] != expected:
        yield f"the race is won by {expected}, and titles say {titles}"


# ---- records


def random_job(seed: int) -> list[GpuRank]:
    """Steps of kernels, collectives of all ranks, copies, loading and synchronising calls, in a random order."""
    chance = random.Random(seed)
    size, steps = chance.choice((1, 2, 2, 4)), chance.choice((1, 3, 9))
    slow = chance.choice((None, size - 1))
    pieces = ["n", *(chance.choice("kkknnclsg") for _ in range(chance.randint(3, 9)))]
    job = [GpuRank(rank, world_size=size) for rank in range(size)]
    host, device = [0.0] * size, [0.0] * size
    for step in range(steps):
        begins = list(host)
        for number, piece in enumerate(pieces):
            lasts = chance.uniform(50, 400)
            arrivals = []
            for rank, trace in enumerate(job):
                own = lasts * chance.uniform(0.97, 1.03) * (1.4 if rank == slow else 1)
                host[rank] += 5
                if piece == "l":
                    trace.loader(host[rank], host[rank] + own)
                    host[rank] += own
                elif piece == "s":
                    until = max(host[rank], device[rank]) + 1
                    trace.synchronise(host[rank], until)
                    host[rank] = until
                elif piece == "g":  # the host is busy with something that the trace does not show
                    host[rank] += own
                start = max(device[rank], host[rank] + 3)
                if piece == "k":
                    name = f"model.layers.{number % 3}"
                    trace.range(f"FSDP::pre_forward ({name})", host[rank], host[rank] + 2)
                    trace.kernel(host[rank] + 1, start, start + own)
                    device[rank] = start + own
                elif piece == "c":
                    trace.copy(host[rank] + 1, start, start + own / 4)
                    device[rank] = start + own / 4
                arrivals.append(start)
            for rank, trace in enumerate(job) if piece == "n" else ():
                kind = ("all_gather", "reduce_scatter", "all_reduce")[number % 3]
                trace.nccl(kind, host[rank] + 1, arrivals[rank], max(arrivals) + lasts, elements=2**16)
                device[rank] = max(device[rank], chance.choice((arrivals[rank], max(arrivals) + lasts)))
        for rank, trace in enumerate(job):
            host[rank] += 4
            trace.step(step, begins[rank], host[rank] - 1)
            trace.kernel(host[rank] - 2, max(device[rank], host[rank]), max(device[rank], host[rank]) + 20)
            device[rank] = max(device[rank], host[rank]) + 20
    return job


def late_job() -> list[GpuRank]:
    """Rank 2 of 4 comes 200 us late to the one collective of each of nine steps."""
    job = [GpuRank(rank, world_size=4) for rank in range(4)]
    for at in range(0, 9000, 1000):
        for rank, trace in enumerate(job):
            done = at + (500 if rank == 2 else 300)
            trace.step(at // 1000, at, at + 900).kernel(at + 1, at + 5, done)
            trace.nccl("all_reduce", at + 2, done, at + 600).kernel(at + 3, at + 600, at + 960)
    return job


def written(job: list[GpuRank], folder: Path) -> RunRecord:
    folder.mkdir(parents=True, exist_ok=True)
    return record_of_traces([trace.write(folder / f"rank{number}.json") for number, trace in enumerate(job)])


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    """Every record of `data`, and records as runs of several kinds leave them."""
    folder, many = tmp_path_factory.mktemp("records"), (1, *range(10, 18))
    older = DATA / "traces-torch-2.1"
    return {
        "traces-08": RunRecord.load(DATA / "traces-08"),
        "its traces": record_of_traces(sorted((DATA / "traces-08" / "traces").glob("*.json.gz"))),
        "torch 2.1": record_of_traces(sorted(older.glob("*.json.gz"))),
        "simulated": RunRecord.load(DATA / "wind-tunnel-8b"),
        "ahead": profiled(folder / "ahead", steps=many),
        "behind": profiled(folder / "behind", steps=many, prefetch=0),
        "even": profiled(folder / "even", steps=many, pace=(1.0, 1.0)),
        "four ranks": profiled(folder / "four", steps=many, pace=(1.0, 1.0, 1.3, 1.0)),
        "measured": profiled(folder / "measured", emulated=False),
        "alone": profiled(folder / "alone", ranks_talk=False),
        "one late": written(late_job(), folder / "late"),
    }


def test_every_sentence_on_a_record_agrees_with_its_tables(records: dict[str, RunRecord]) -> None:
    assert [f"{name}: {what}" for name, record in records.items() for what in wrong(record)] == []


def test_every_sentence_on_two_records_agrees_with_their_tables(records: dict[str, RunRecord]) -> None:
    pairs = itertools.permutations([name for name in records if name != "simulated"], 2)
    found = [f"{a}, {b}: {what}" for a, b in pairs for what in wrong_pair(records[a], records[b])]
    assert found == []


def test_the_sentences_of_tables_agree_with_their_rows(records: dict[str, RunRecord]) -> None:
    for name in ("traces-08", "its traces", "torch 2.1"):
        assert list(wrong_tables(tables_of_record(records[name]), records[name])) == [], name
    both = tables_of_pair(records["traces-08"], records["its traces"])
    assert list(wrong_tables(both, records["traces-08"])) == [] and len(both) == 3


@pytest.mark.parametrize("block", range(6))
def test_sentences_on_random_jobs(block: int, tmp_path: Path) -> None:
    found = []
    for seed in range(10 * block, 10 * block + 10):
        record = written(random_job(seed), tmp_path / str(seed))
        found += [f"job {seed}: {what}" for what in (*wrong(record), *wrong_tables(tables_of_record(record), record))]
    assert found == []


def test_terminal_steps_and_pareto_name_one_winner(records: dict[str, RunRecord]) -> None:
    def run(name: str, seconds: list[float]) -> RunRecord:
        timed = replace(records["ahead"].summary, step_time_s=Spread.of(seconds))
        return replace(records["ahead"], spec=records["ahead"].spec | {"strategy": name}, summary=timed)

    quick, slow = [0.10, 0.101, 0.102, 0.103, 0.101, 0.1], [0.20, 0.21, 0.22, 0.2, 0.21, 0.22]
    cases = [(quick, slow), (slow, quick), (quick, quick), (quick, [0.09, 0.2, 0.1, 0.11, 0.3, 0.1]), (quick[:2], slow)]
    for first, second in cases:
        assert list(wrong_race([run("zero1", first), run("zero2", second)])) == [], (first, second)
