"""Lesson 16, the part in the notebook's process: meshes, and models composed of several parallelisms beside their
twins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fsdplab.figures import style
from fsdplab.figures.bars import named_axis
from fsdplab.figures.lines import points
from fsdplab.figures.plotly_go import go
from fsdplab.teaching.core.diagrams import HeldCell, cells_in_time, mesh
from fsdplab.teaching.core.display import Table, table
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing
from fsdplab.workloads import MOE_PRESETS

_ROWS = ("#9cc3e6", "#f2c38b", "#a8d5a2", "#d7b5e0")  # a colour for each place on a mesh's first axis
EXPERTS = MOE_PRESETS["moe-tiny"].experts


@dataclass(frozen=True)
class Composed:
    """The training of a composed model compared with its twin, on rank 0; each method is a table of it."""

    what: str
    seen: dict[str, Any]

    def at_rest(self) -> Table:
        """Return the part of a parameter that each rank holds between two steps."""
        header = ["parameter of block 0", "at rest", "rank 0 holds"]
        return table(header, self.seen["at rest"], f"Measured: {self.what}.")

    def rows_at_rest(self, parameter: str) -> int:
        """Return the rows of a parameter of block 0 that rank 0 holds between two steps."""
        shapes = {name: shape for name, _, shape in self.seen["at rest"]}
        rows = shapes[parameter].strip("[]").split(",")[0]  # of "[16, 64]"
        return int(rows)

    def beside_twin(self) -> Table:
        """Return the loss of each step, and how far the parameters are from the twin's in the end."""
        rows = []
        for step, (loss, twin_loss) in enumerate(self.seen["losses"]):
            rows.append([step, f"{loss:.6f}", f"{twin_loss:.6f}"])
        caption = f"Measured: {self.what}. The farthest parameter ends {self.seen['drift']:.0e} from the twin's."
        return table(["step", "loss", "the twin's"], rows, caption)

    def gradients(self) -> Table:
        """Return the norm of each matrix's first gradient over the twin's."""
        rows = [[name, f"{ratio:.4f}"] for name, ratio in sorted(self.seen["ratios"].items())]
        return table(["gradient of", "norm over the twin's"], rows, f"Measured: {self.what}, first step.")

    def traffic(self) -> Table:
        """Return the bytes that rank 0 sends in a step, by mesh axis."""
        rows = [[axis, f"{nbytes / 1000:,.1f}"] for axis, nbytes in sorted(self.seen["bytes"].items())]
        return table(["over the axis", "kB a step"], rows, f"Measured: {self.what}, last step.")

    def kilobytes(self, axis: str) -> float:
        """Return the kB that rank 0 sends in a step over one axis."""
        return self.seen["bytes"][axis] / 1000


def tensor() -> Composed:
    """Train GPT-tiny on a 2 x 2 mesh (dp, tp), by the learner's `compose`.

    It is the reference where that check has not passed.
    """
    return Composed("gpt-tiny, dp = 2 x tp = 2", _call("tensor"))


def experts(divide: float) -> Composed:
    """Train MoE-tiny on a 2 x 2 mesh (efsdp, ep), expert gradients divided by `divide`."""
    what = f"moe-tiny, efsdp = 2 x ep = 2, expert gradients divided by {divide:g}"
    return Composed(what, _call("experts", divide=float(divide)))


@doing("three steps on 4 ranks, and the twin beside them")
def _call(function: str, **payload: Any) -> dict[str, Any]:
    """Run a function of `on_ranks.py` on four ranks; return what rank 0 saw."""
    return dict(LessonRanks(__file__)(function, 4, **payload)[0])


@doing("one step of two stages on 4 ranks, and the twin beside it")
def pipeline() -> Table:
    """Train two stages x two data ranks, four micro-batches (1F1B): collectives of rank 0, drift from the twin."""
    by_way = LessonRanks(__file__)("stages", 4)[0]
    rows = []
    for way, seen in by_way.items():
        rows.append([way, seen["all_gather"], seen["reduce_scatter"], f"{seen['drift']:.1e}"])
    header = ["after each forward", "all-gathers", "reductions", "farthest from the twin"]
    return table(header, rows, "Measured: rank 0 of 4, one step of 4 micro-batches.")


def mesh_map() -> go.Figure:
    """Draw the notebook's mesh of two axes, and what a rank of it holds of a matrix of 64 rows that both axes cut."""

    def part(dp: int, tp: int) -> str:
        # tp gives a rank 32 of the 64 rows, and dp cuts these into 16 and 16
        first = 32 * tp + 16 * dp
        return f"rows {first} to {first + 15} of query"

    return _mesh_figure({"dp": 2, "tp": 2}, part, "tp cuts the 64 rows of query in two, dp cuts each half again")


def expert_map() -> go.Figure:
    """Draw the mesh of the experts, and which experts a rank holds shards of."""
    half = EXPERTS // 2

    def part(efsdp: int, ep: int) -> str:
        return f"shard {efsdp + 1} of 2 of experts {half * ep} to {half * ep + half - 1}"

    title = "Tokens travel along a row; the ranks of a column share their experts"
    return _mesh_figure({"efsdp": 2, "ep": 2}, part, title)


def _mesh_figure(axes: dict[str, int], holds: Callable[[int, int], str], title: str) -> go.Figure:
    """Draw the ranks of a mesh of two axes: the first downwards, the second from left to right.

    `axes` has the number of ranks by the axis's name; `holds(row, column)` is written below the rank.
    """
    (down, rows), (right, columns) = axes.items()
    names, owners = [], []
    for row in range(rows):
        row_names = []
        for column in range(columns):
            rank = row * columns + column
            row_names.append(f"rank {rank}: {holds(row, column)}")
        names.append(row_names)
        owners.append([row] * columns)  # a row has one colour
    across_headings = [f"{right} {column}" for column in range(columns)]
    down_headings = [f"{down} {row}" for row in range(rows)]
    figure = mesh(across_headings, down_headings, owners, names, _ROWS[:rows])
    figure.update_xaxes(title_text=f"{right}: ranks of a row (neighbours)")
    figure.update_yaxes(title_text=down)

    where = f"Computed: {rows} x {columns} ranks; a collective over {right} joins a row, one over {down} a column"
    listed = "; ".join(name for row_names in names for name in row_names)
    return style.titled(figure, title, where, f"Ranks on a mesh. {title}. {listed}.", height=76 + 70 * rows)


# ---- pipelines over time

ORDERS = ("GPipe", "1F1B")
MOST_MOMENTS = 36  # of a diagram: a page's width holds so many with a number in each
_TAKES = {"forward": 1, "backward": 2}  # a backward computes twice as much
_LABELLED = 100  # turns: a browser takes as long for their numbers as for all else of the figure
_IDLE, _KEPT = "idle: the bubble", "micro-batches whose activations stage 0 keeps"
_KINDS = {
    **{phase: style.PHASE_COLOURS[phase] for phase in _TAKES},
    _IDLE: style.STEP_COLOURS["other"],
    _KEPT: style.CATEGORY_COLOURS["activations"],
}


@dataclass(frozen=True)
class Turn:
    """One stage's forward or backward of one micro-batch; the forward of one takes one unit of time."""

    stage: int
    phase: str
    micro_batch: int
    start: int

    @property
    def end(self) -> int:
        """Return when it is over."""
        return self.start + _TAKES[self.phase]


def schedule(stages: int, micro_batches: int, order: str = "1F1B") -> list[Turn]:
    """Return the turns of all stages, in the order of GPipe or of 1F1B.

    GPipe (Huang et al. 2019) runs all forwards, then all backwards. 1F1B (Narayanan et al. 2019) runs as many forwards
    as stages follow, then one backward, one forward, ... A turn starts when its stage is free and its input is there:
    `max(turn.end for turn in schedule(2, 1)) == 6`. ValueError for an order that is none of these, or without stages or
    micro-batches.
    """
    if order not in ORDERS or stages < 1 or micro_batches < 1:
        raise ValueError(
            f"there is no schedule {order!r} of {stages} stages and {micro_batches} micro-batches; expected"
            f" {' or '.join(ORDERS)}, at least one stage and at least one micro-batch"
        )
    todo = []  # of each stage, (phase, micro-batch) in its order
    for stage in range(stages):
        # of 4 stages the first one runs 4 forwards ahead, the last one 1
        forwards_first = micro_batches if order == "GPipe" else stages - stage
        todo.append(_order(forwards_first, micro_batches))
    ended: dict[tuple[int, str, int], int] = {}  # (stage, phase, micro-batch) -> when
    free = [0] * stages  # when each stage has ended its last turn
    turns = []
    # stage after stage takes the turns whose input is there, until none of the stages has one left
    while any(todo):
        for stage, waiting in enumerate(todo):
            while waiting:
                phase, number = waiting[0]
                ready = _ready(ended, stage, phase, number, stages)
                # a later turn of this stage cannot begin either: a stage keeps its order
                if ready is None:
                    break
                waiting.pop(0)
                turn = Turn(stage, phase, number, max(free[stage], ready))
                free[stage] = turn.end
                ended[stage, phase, number] = turn.end
                turns.append(turn)
    return turns


def _order(forwards: int, micro_batches: int) -> list[tuple[str, int]]:
    """Return (phase, micro-batch) in the order of a stage that begins with so many forwards."""
    first = min(forwards, micro_batches)
    turns = [("forward", number) for number in range(first)]
    for number in range(micro_batches):
        turns.append(("backward", number))
        if first + number < micro_batches:
            turns.append(("forward", first + number))
    return turns


def _ready(ended: dict[tuple[int, str, int], int], stage: int, phase: str, number: int, stages: int) -> int | None:
    """Return when the turn's input is there; None where that is not known yet."""
    if phase == "forward":
        if stage == 0:
            return 0
        return ended.get((stage - 1, phase, number))
    if stage == stages - 1:
        return ended.get((stage, "forward", number))  # the loss follows the last forward
    return ended.get((stage + 1, phase, number))


def bubble(stages: int, micro_batches: int) -> go.Figure:
    """Draw a lane a stage: forwards and backwards of each micro-batch, and white where the stage has nothing to do."""
    turns = schedule(stages, micro_batches)
    end = max(turn.end for turn in turns)
    # a stage waits for p - 1 forwards and backwards of the m + p - 1 that the step lasts
    idle = (stages - 1) / (micro_batches + stages - 1)
    has_numbers = len(turns) <= _LABELLED
    figure, outlines = go.Figure(), []
    for phase in _TAKES:
        of_phase = [turn for turn in turns if turn.phase == phase]
        figure.add_trace(_labels(phase, of_phase if has_numbers else []))
        outlines.append(_outline(phase, of_phase, 1 if has_numbers else 0.5))
    names = {stage: f"stage {stage}" for stage in range(stages)}
    figure.update_layout(
        shapes=outlines,
        xaxis=dict(title_text="time (a forward of one micro-batch is 1)", range=[0, 1.01 * end]),
        yaxis=named_axis(names, stages - 0.5, -0.5),
    )
    title = f"{stages} stages, {micro_batches} micro-batches: each stage is idle for {idle:.1%} of the time"
    where = "Computed: 1F1B, equal stages, a backward takes twice a forward, messages take no time"
    alt = f"Lanes of pipeline stages. {title}; the last stage waits at the start, the first before its last backwards."
    return style.titled(figure, title, where, alt, 66 + 34 * stages)


def _outline(phase: str, turns: Sequence[Turn], edge: float) -> dict[str, Any]:
    """Return all turns of a phase as one path: a browser takes three times as long to draw 2,000 bars."""
    path = ""
    for turn in turns:
        top, bottom = turn.stage - 0.43, turn.stage + 0.43
        path += f"M{turn.start},{top}H{turn.end}V{bottom}H{turn.start}Z"
    look = dict(fillcolor=style.PHASE_COLOURS[phase], line=dict(color=style.EDGE, width=edge))
    return dict(type="path", path=path, layer="between", **look)


def _labels(phase: str, turns: Sequence[Turn]) -> go.Scatter:
    """Return the numbers of the micro-batches, and the phase's entry in the legend.

    Without turns there is a point outside the picture, since a trace of no points has no entry.
    """
    colour = style.PHASE_COLOURS[phase]
    middles = [(turn.start + turn.end) / 2 for turn in turns]
    return points(
        phase,
        colour,
        middles or [-9],
        [turn.stage for turn in turns] or [0],
        mode="markers+text",
        marker=dict(symbol="square", size=13, line_width=0),
        customdata=[turn.start for turn in turns],
        text=[str(turn.micro_batch) for turn in turns],
        textfont=dict(size=13, color=style.ink_on(colour)),
        hovertemplate=f"{phase} of micro-batch %{{text}}, from %{{customdata}}<extra></extra>",
    )


# ---- both orders, with a play button


def pipeline_cells(order: str, stages: int, micro_batches: int) -> Iterator[HeldCell]:
    """Yield every turn of an order, and every moment in which a stage has none.

    Then follows how many micro-batches stage 0 keeps at each moment.
    """
    turns = schedule(stages, micro_batches, order)
    end = max(turn.end for turn in turns)
    busy = set()  # (stage, moment)
    for turn in turns:
        lasts = turn.end - turn.start
        yield HeldCell(_row(order, turn.stage), turn.start, turn.phase, str(turn.micro_batch), lasts)
        for moment in range(turn.start, turn.end):
            busy.add((turn.stage, moment))
    for stage in range(stages):
        for moment in range(end):
            if (stage, moment) not in busy:
                yield HeldCell(_row(order, stage), moment, _IDLE)
    for moment, count in enumerate(kept(turns)):
        if count:
            yield HeldCell(f"{order}: kept on stage 0", moment, _KEPT, str(count))


def kept(turns: list[Turn]) -> list[int]:
    """Return the micro-batches on stage 0 at each moment, from the start of their forward to their backward's end."""
    began, ended = {}, {}
    for turn in turns:
        if turn.stage == 0 and turn.phase == "forward":
            began[turn.micro_batch] = turn.start
        elif turn.stage == 0:
            ended[turn.micro_batch] = turn.end
    counts = []
    for moment in range(max(ended.values())):
        # a micro-batch's activations are kept from its forward to the end of its backward
        counts.append(sum(began[number] <= moment < ended[number] for number in began))
    return counts


def _row(order: str, stage: int) -> str:
    """Return the name of a row: a stage under an order."""
    return f"{order}: stage {stage}"


def pipeline_diagram(stages: int = 3, micro_batches: int = 6) -> go.Figure:
    """Draw both orders on one clock, with a play button; a moment is a forward of one micro-batch.

    ValueError for fewer than two stages, no micro-batch, or a schedule too long for a page.
    """
    # a forward and a backward take 1 + 2 moments
    end = 3 * (micro_batches + stages - 1)
    if stages < 2 or micro_batches < 1 or end > MOST_MOMENTS or stages > 4:
        raise ValueError(
            f"{stages} stages and {micro_batches} micro-batches cannot be drawn; expected 2 to 4 stages, and so many"
            f" micro-batches that 3 (m + p - 1) is at most {MOST_MOMENTS}: pipeline_diagram(3, 6)"
        )
    cells: list[HeldCell] = []
    rows, most = [], {}
    for order in ORDERS:
        cells += pipeline_cells(order, stages, micro_batches)
        rows += [_row(order, stage) for stage in range(stages)]
        rows.append(f"{order}: kept on stage 0")
        most[order] = max(kept(schedule(stages, micro_batches, order)))
    subtitle = (
        f"Computed: {stages} equal stages, {micro_batches} micro-batches; a moment is a forward, a backward takes two,"
        " messages take no time"
    )
    alt = (
        f"Lanes of {stages} pipeline stages over {end} moments, in two orders. GPipe runs all forwards, then all"
        " backwards. 1F1B runs a few forwards, then one backward and one forward in turn. In both orders each stage is"
        f" idle for {3 * (stages - 1)} of the moments: the last stage at the start, the first before its backwards."
        f" Stage 0 keeps the activations of at most {most['GPipe']} micro-batches under GPipe and {most['1F1B']} under"
        " 1F1B."
    )
    return cells_in_time(
        cells,
        rows,
        [str(moment) for moment in range(end)],
        _KINDS,
        "GPipe and 1F1B: the same forwards and backwards in two orders",
        subtitle,
        alt,
    )


# ---- an expert layer, drawn

TOKEN_MOMENTS = ("route", "all-to-all", "experts compute", "all-to-all back", "weighted sum")
MOST_ROWS = 16  # of a picture that a screen holds
_OWN, _SENT, _COMPUTED = "tokens of the rank's text", "tokens at an expert", "an expert's answers"
_BACK, _SUMMED = "answers that came back", "sum of a token's answers"
_TOKEN_KINDS = {
    _OWN: style.LANE_COLOURS["compute in forward"],
    _SENT: style.COLLECTIVE_COLOURS["all_gather"],
    _COMPUTED: style.LANE_COLOURS["compute in backward"],
    _BACK: style.COLLECTIVE_COLOURS["all_gather in backward"],
    _SUMMED: style.COLLECTIVE_COLOURS["all_reduce"],
}
CHOICES = ((0, 2), (1, 2), (0, 3), (2, 3))


@dataclass(frozen=True)
class Routing:
    """The experts that each token goes to, on `ranks` ranks with equally many tokens and experts, in order.

    ValueError where there is no such layer: `Routing(((0, 2), (1, 2), (0, 3), (2, 3)), ranks=2, experts=4)` is one.
    """

    choices: Sequence[Sequence[int]]
    ranks: int
    experts: int

    def __post_init__(self) -> None:
        for what, count in (("tokens", len(self.choices)), ("experts", self.experts)):
            if self.ranks < 2 or count < self.ranks or count % self.ranks:
                raise ValueError(
                    f"{count} {what} cannot be spread evenly over {self.ranks} ranks; expected 2 ranks or more, and a"
                    f" multiple of them of {what}"
                )
        known = set(range(self.experts))
        for token, chosen in enumerate(self.choices):
            different = set(chosen)
            if not chosen or len(different) < len(chosen) or not different <= known:
                raise ValueError(
                    f"token {token} goes to experts {list(chosen)}; expected different experts of 0 to"
                    f" {self.experts - 1}, such as {CHOICES[0]}"
                )
        rows = self.experts + 2 * self.ranks
        if rows > MOST_ROWS:
            raise ValueError(
                f"{self.experts} experts on {self.ranks} ranks take {rows} rows; expected at"
                f" most {MOST_ROWS}: draw a smaller layer"
            )

    def home(self, token: int) -> int:
        """Return the rank that a token belongs to."""
        return token * self.ranks // len(self.choices)

    def place(self, expert: int) -> int:
        """Return the rank that holds an expert."""
        return expert * self.ranks // self.experts

    def tokens_of(self, rank: int) -> list[int]:
        """Return the tokens of a rank's own text."""
        return [token for token in range(len(self.choices)) if self.home(token) == rank]

    def sent_to(self, expert: int) -> list[int]:
        """Return the tokens that chose an expert."""
        return [token for token, chosen in enumerate(self.choices) if expert in chosen]

    @property
    def travelling(self) -> int:
        """Return the copies of tokens that leave their rank, in each of the two all-to-alls."""
        copies = 0
        for token, chosen in enumerate(self.choices):
            for expert in chosen:
                # a token whose expert is on its own rank stays there
                copies += self.place(expert) != self.home(token)
        return copies


def token_cells(routing: Routing) -> Iterator[HeldCell]:
    """Yield what each rank and each of its experts holds, moment by moment."""
    for rank in range(routing.ranks):
        tokens, row = routing.tokens_of(rank), f"rank {rank}: its tokens"
        choices = []
        for token in tokens:
            experts = " ".join(f"e{expert}" for expert in routing.choices[token])
            choices.append(f"t{token}: {experts}")
        chosen = ", ".join(choices)
        # moments 0, 3 and 4 are of the tokens' rank, 1 and 2 of the experts
        yield HeldCell(row, 0, _OWN, chosen)
        yield HeldCell(f"rank {rank}: answers", 3, _BACK, chosen)
        yield HeldCell(row, 4, _SUMMED, _names(tokens))

    for expert in range(routing.experts):
        tokens = routing.sent_to(expert)
        if not tokens:
            continue
        rank = routing.place(expert)
        row = f"rank {rank}: expert e{expert}"
        yield HeldCell(row, 1, _SENT, _by_home(routing, tokens, rank))
        yield HeldCell(row, 2, _COMPUTED, f"e{expert} of {_names(tokens)}")


def _names(tokens: Sequence[int]) -> str:
    """Return tokens by name: `t0 t3`."""
    return " ".join(f"t{token}" for token in tokens)


def _by_home(routing: Routing, tokens: Sequence[int], rank: int) -> str:
    """Return tokens at an expert on `rank`, its own first: `t3, rank 0's t0 t1`."""
    by_home: dict[int, list[int]] = {}
    for token in tokens:
        # the rank that the token comes from
        by_home.setdefault(routing.home(token), []).append(token)
    words = []
    if rank in by_home:
        words.append(_names(by_home.pop(rank)))
    for home, travelled in sorted(by_home.items()):
        words.append(f"rank {home}'s {_names(travelled)}")
    return ", ".join(words)


def token_diagram(choices: Sequence[Sequence[int]] = CHOICES, ranks: int = 2, experts: int = 4) -> go.Figure:
    """Draw the five moments of an expert layer, with a play button; `choices` are the experts of each token.

    ValueError where tokens or experts cannot be spread over the ranks, or a token chooses experts that there are not.
    """
    routing = Routing(choices, ranks, experts)
    rows = []
    for rank in range(ranks):
        rows.append(f"rank {rank}: its tokens")
        for expert in range(experts):
            if routing.place(expert) == rank:
                rows.append(f"rank {rank}: expert e{expert}")
        rows.append(f"rank {rank}: answers")
    loads = [len(routing.sent_to(expert)) for expert in range(experts)]
    routes = [f"token {token} to experts {', '.join(map(str, chosen))}" for token, chosen in enumerate(choices)]
    subtitle = (
        f"Drawn from the rule, nothing was run: {len(choices)} tokens (t) and {experts} experts (e) on {ranks} ranks of"
        " an ep group"
    )
    alt = (
        f"Tokens and experts on {ranks} ranks over five moments. The router sends {'; '.join(routes)}. After the first"
        f" all-to-all the experts hold {', '.join(map(str, loads))} tokens. They compute, and the"
        " second all-to-all brings each answer back to its token's rank, where the answers of a token are summed."
    )
    return cells_in_time(
        list(token_cells(routing)),
        rows,
        TOKEN_MOMENTS,
        _TOKEN_KINDS,
        f"An expert layer: {routing.travelling} copies of tokens leave their rank, {routing.travelling} answers return",
        subtitle,
        alt,
    )
