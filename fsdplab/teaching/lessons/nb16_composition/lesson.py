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
        """The part of a parameter that each rank holds between two steps."""
        header = ["parameter of block 0", "at rest", "rank 0 holds"]
        return table(header, self.seen["at rest"], f"Measured: {self.what}.")

    def rows_at_rest(self, parameter: str) -> int:
        """Rows of a parameter of block 0 that rank 0 holds between two steps."""
        shapes = {name: shape for name, _, shape in self.seen["at rest"]}
        return int(shapes[parameter].strip("[]").split(",")[0])

    def beside_twin(self) -> Table:
        """Loss of each step, and how far the parameters are from the twin's in the end."""
        rows = [[step, f"{ours:.6f}", f"{twins:.6f}"] for step, (ours, twins) in enumerate(self.seen["losses"])]
        caption = f"Measured: {self.what}. The farthest parameter ends {self.seen['drift']:.0e} from the twin's."
        return table(["step", "loss", "the twin's"], rows, caption)

    def gradients(self) -> Table:
        """The norm of each matrix's first gradient over the twin's."""
        rows = [[name, f"{ratio:.4f}"] for name, ratio in sorted(self.seen["ratios"].items())]
        return table(["gradient of", "norm over the twin's"], rows, f"Measured: {self.what}, first step.")

    def traffic(self) -> Table:
        """Bytes that rank 0 sends in a step, by mesh axis."""
        rows = [[axis, f"{nbytes / 1000:,.1f}"] for axis, nbytes in sorted(self.seen["bytes"].items())]
        return table(["over the axis", "kB a step"], rows, f"Measured: {self.what}, last step.")

    def kilobytes(self, axis: str) -> float:
        """kB that rank 0 sends in a step over one axis."""
        return self.seen["bytes"][axis] / 1000


def tensor() -> Composed:
    """GPT-tiny on a 2 x 2 mesh (dp, tp), by the learner's `compose` where its check passed, else the reference."""
    return Composed("gpt-tiny, dp = 2 x tp = 2", _call("tensor"))


def experts(divide: float) -> Composed:
    """MoE-tiny on a 2 x 2 mesh (efsdp, ep), expert gradients divided by `divide`."""
    what = f"moe-tiny, efsdp = 2 x ep = 2, expert gradients divided by {divide:g}"
    return Composed(what, _call("experts", divide=float(divide)))


@doing("three steps on 4 ranks, and the twin beside them")
def _call(function: str, **payload: Any) -> dict[str, Any]:
    return dict(LessonRanks(__file__)(function, 4, **payload)[0])


@doing("one step of two stages on 4 ranks, and the twin beside it")
def pipeline() -> Table:
    """Two stages x two data ranks, four micro-batches (1F1B): collectives of rank 0, drift from the twin."""
    found = LessonRanks(__file__)("stages", 4)[0]
    rows = [[way, seen["all_gather"], seen["reduce_scatter"], f"{seen['drift']:.1e}"] for way, seen in found.items()]
    header = ["after each forward", "all-gathers", "reductions", "farthest from the twin"]
    return table(header, rows, "Measured: rank 0 of 4, one step of 4 micro-batches.")


def mesh_map() -> go.Figure:
    """The notebook's mesh of two axes, and what a rank of it holds of a matrix of 64 rows that both axes cut."""
    part = lambda dp, tp: f"rows {32 * tp + 16 * dp} to {32 * tp + 16 * dp + 15} of query"  # noqa: E731
    return _mesh_figure({"dp": 2, "tp": 2}, part, "tp cuts the 64 rows of query in two, dp cuts each half again")


def expert_map() -> go.Figure:
    """The mesh of the experts, and which experts a rank holds shards of."""
    half = EXPERTS // 2
    part = lambda efsdp, ep: f"shard {efsdp + 1} of 2 of experts {half * ep} to {half * ep + half - 1}"  # noqa: E731
    title = "Tokens travel along a row; the ranks of a column share their experts"
    return _mesh_figure({"efsdp": 2, "ep": 2}, part, title)


def _mesh_figure(axes: dict[str, int], holds: Callable[[int, int], str], title: str) -> go.Figure:
    """Ranks of a mesh of two axes: the first downwards, the second from left to right; `holds(row, column)` is written
    below the rank.
    """
    (down, rows), (right, columns) = axes.items()
    ranks = [[(row, column) for column in range(columns)] for row in range(rows)]
    names = [[f"rank {row * columns + column}: {holds(row, column)}" for row, column in each] for each in ranks]
    owners = [[row for row, _ in each] for each in ranks]
    headings = [f"{right} {column}" for column in range(columns)], [f"{down} {row}" for row in range(rows)]
    figure = mesh(*headings, owners, names, _ROWS[:rows])
    figure.update_xaxes(title_text=f"{right}: ranks of a row (neighbours)").update_yaxes(title_text=down)
    where = f"Computed: {rows} x {columns} ranks; a collective over {right} joins a row, one over {down} a column"
    listed = "; ".join(name for row in names for name in row)
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
        """When it is over."""
        return self.start + _TAKES[self.phase]


def schedule(stages: int, micro_batches: int, order: str = "1F1B") -> list[Turn]:
    """GPipe's schedule (Huang et al. 2019): all forwards, then all backwards; or 1F1B (Narayanan et al. 2019): as many
    forwards as stages follow, then one backward, one forward, ...

    A turn starts when its stage is free and its input is there: `max(turn.end for turn in schedule(2, 1)) == 6`.
    """
    if order not in ORDERS or stages < 1 or micro_batches < 1:
        raise ValueError(
            f"there is no schedule {order!r} of {stages} stages and {micro_batches} micro-batches; expected"
            f" {' or '.join(ORDERS)}, at least one stage and at least one micro-batch"
        )
    first = [micro_batches if order == "GPipe" else stages - stage for stage in range(stages)]
    todo = [_order(forwards, micro_batches) for forwards in first]
    ended: dict[tuple[int, str, int], int] = {}
    free, found = [0] * stages, []
    while any(todo):
        for stage, left in enumerate(todo):
            while left and (ready := _ready(ended, stage, *left[0], stages)) is not None:
                phase, number = left.pop(0)
                turn = Turn(stage, phase, number, max(free[stage], ready))
                free[stage] = ended[stage, phase, number] = turn.end
                found.append(turn)
    return found


def _order(forwards: int, micro_batches: int) -> list[tuple[str, int]]:
    """(phase, micro-batch) in the order of a stage that begins with so many forwards."""
    first = min(forwards, micro_batches)
    turns = [("forward", number) for number in range(first)]
    for number in range(micro_batches):
        turns.append(("backward", number))
        turns += [("forward", first + number)] if first + number < micro_batches else []
    return turns


def _ready(ended: dict[tuple[int, str, int], int], stage: int, phase: str, number: int, stages: int) -> int | None:
    """When the turn's input is there; None where that is not known yet."""
    if phase == "forward":
        return 0 if stage == 0 else ended.get((stage - 1, phase, number))
    return ended.get((stage, "forward", number) if stage == stages - 1 else (stage + 1, phase, number))


def bubble(stages: int, micro_batches: int) -> go.Figure:
    """A lane a stage: forwards and backwards of each micro-batch, and white where the stage has nothing to do."""
    turns = schedule(stages, micro_batches)
    end = max(turn.end for turn in turns)
    idle = (stages - 1) / (micro_batches + stages - 1)
    of_phase = {phase: [turn for turn in turns if turn.phase == phase] for phase in _TAKES}
    figure = go.Figure([_labels(phase, own if len(turns) <= _LABELLED else []) for phase, own in of_phase.items()])
    names = {stage: f"stage {stage}" for stage in range(stages)}
    figure.update_layout(
        shapes=[_outline(phase, own, 1 if len(turns) <= _LABELLED else 0.5) for phase, own in of_phase.items()],
        xaxis=dict(title_text="time (a forward of one micro-batch is 1)", range=[0, 1.01 * end]),
        yaxis=named_axis(names, stages - 0.5, -0.5),
    )
    title = f"{stages} stages, {micro_batches} micro-batches: each stage is idle for {idle:.1%} of the time"
    where = "Computed: 1F1B, equal stages, a backward takes twice a forward, messages take no time"
    alt = f"Lanes of pipeline stages. {title}; the last stage waits at the start, the first before its last backwards."
    return style.titled(figure, title, where, alt, 66 + 34 * stages)


def _outline(phase: str, turns: Sequence[Turn], edge: float) -> dict[str, Any]:
    """All turns of a phase as one path: a browser takes three times as long to draw 2,000 bars."""
    boxes = (f"M{turn.start},{turn.stage - 0.43}H{turn.end}V{turn.stage + 0.43}H{turn.start}Z" for turn in turns)
    look = dict(fillcolor=style.PHASE_COLOURS[phase], line=dict(color=style.EDGE, width=edge))
    return dict(type="path", path="".join(boxes), layer="between", **look)


def _labels(phase: str, turns: Sequence[Turn]) -> go.Scatter:
    """The numbers of the micro-batches, and the phase's entry in the legend."""
    colour = style.PHASE_COLOURS[phase]
    return points(
        phase,
        colour,
        [(turn.start + turn.end) / 2 for turn in turns] or [-9],
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
    """Every turn of an order, every moment in which a stage has none, and how many micro-batches stage 0 keeps then."""
    turns = schedule(stages, micro_batches, order)
    end = max(turn.end for turn in turns)
    for turn in turns:
        yield HeldCell(_row(order, turn.stage), turn.start, turn.phase, str(turn.micro_batch), turn.end - turn.start)
    for stage in range(stages):
        busy = {moment for turn in turns if turn.stage == stage for moment in range(turn.start, turn.end)}
        yield from (HeldCell(_row(order, stage), moment, _IDLE) for moment in range(end) if moment not in busy)
    counts = enumerate(kept(turns))
    yield from (HeldCell(f"{order}: kept on stage 0", moment, _KEPT, str(count)) for moment, count in counts if count)


def kept(turns: list[Turn]) -> list[int]:
    """Micro-batches on stage 0 at each moment, from the start of their forward to the end of their backward."""
    began = {turn.micro_batch: turn.start for turn in turns if turn.stage == 0 and turn.phase == "forward"}
    ended = {turn.micro_batch: turn.end for turn in turns if turn.stage == 0 and turn.phase == "backward"}
    return [sum(began[each] <= moment < ended[each] for each in began) for moment in range(max(ended.values()))]


def _row(order: str, stage: int) -> str:
    return f"{order}: stage {stage}"


def pipeline_diagram(stages: int = 3, micro_batches: int = 6) -> go.Figure:
    """Both orders on one clock, with a play button; a moment is a forward of one micro-batch.

    ValueError for fewer than two stages, no micro-batch, or a schedule too long for a page.
    """
    end = 3 * (micro_batches + stages - 1)
    if stages < 2 or micro_batches < 1 or end > MOST_MOMENTS or stages > 4:
        raise ValueError(
            f"{stages} stages and {micro_batches} micro-batches cannot be drawn; expected 2 to 4 stages, and so many"
            f" micro-batches that 3 (m + p - 1) is at most {MOST_MOMENTS}: pipeline_diagram(3, 6)"
        )
    most = {order: max(kept(schedule(stages, micro_batches, order))) for order in ORDERS}
    lanes = [*(f"stage {stage}" for stage in range(stages)), "kept on stage 0"]
    rows = [f"{order}: {lane}" for order in ORDERS for lane in lanes]
    return cells_in_time(
        [cell for order in ORDERS for cell in pipeline_cells(order, stages, micro_batches)],
        rows,
        [str(moment) for moment in range(end)],
        _KINDS,
        "GPipe and 1F1B: the same forwards and backwards in two orders",
        f"Computed: {stages} equal stages, {micro_batches} micro-batches; a moment is a forward, a backward takes two,"
        " messages take no time",
        f"Lanes of {stages} pipeline stages over {end} moments, in two orders. GPipe runs all forwards, then all"
        " backwards. 1F1B runs a few forwards, then one backward and one forward in turn. In both orders each stage is"
        f" idle for {3 * (stages - 1)} of the moments: the last stage at the start, the first before its backwards."
        f" Stage 0 keeps the activations of at most {most['GPipe']} micro-batches under GPipe and {most['1F1B']} under"
        " 1F1B.",
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
        for token, chosen in enumerate(self.choices):
            if not chosen or len({*chosen}) < len(chosen) or not {*chosen} <= {*range(self.experts)}:
                raise ValueError(
                    f"token {token} goes to experts {list(chosen)}; expected different experts of 0 to"
                    f" {self.experts - 1}, such as {CHOICES[0]}"
                )
        if self.experts + 2 * self.ranks > MOST_ROWS:
            raise ValueError(
                f"{self.experts} experts on {self.ranks} ranks take {self.experts + 2 * self.ranks} rows; expected at"
                f" most {MOST_ROWS}: draw a smaller layer"
            )

    def home(self, token: int) -> int:
        """The rank that a token belongs to."""
        return token * self.ranks // len(self.choices)

    def place(self, expert: int) -> int:
        """The rank that holds an expert."""
        return expert * self.ranks // self.experts

    def tokens_of(self, rank: int) -> list[int]:
        """The tokens of a rank's own text."""
        return [token for token in range(len(self.choices)) if self.home(token) == rank]

    def sent_to(self, expert: int) -> list[int]:
        """The tokens that chose an expert."""
        return [token for token, chosen in enumerate(self.choices) if expert in chosen]

    @property
    def travelling(self) -> int:
        """The copies of tokens that leave their rank, in each of the two all-to-alls."""
        return sum(
            self.place(expert) != self.home(token) for token, chosen in enumerate(self.choices) for expert in chosen
        )


def token_cells(routing: Routing) -> Iterator[HeldCell]:
    """What each rank and each of its experts holds, moment by moment."""
    for rank in range(routing.ranks):
        own, tokens = routing.tokens_of(rank), f"rank {rank}: its tokens"
        chosen = ", ".join(f"t{token}: " + " ".join(f"e{each}" for each in routing.choices[token]) for token in own)
        yield HeldCell(tokens, 0, _OWN, chosen)
        yield HeldCell(f"rank {rank}: answers", 3, _BACK, chosen)
        yield HeldCell(tokens, 4, _SUMMED, _names(own))
    for expert in range(routing.experts):
        if sent := routing.sent_to(expert):
            row = f"rank {routing.place(expert)}: expert e{expert}"
            yield HeldCell(row, 1, _SENT, _by_home(routing, sent, routing.place(expert)))
            yield HeldCell(row, 2, _COMPUTED, f"e{expert} of {_names(sent)}")


def _names(tokens: Sequence[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


def _by_home(routing: Routing, tokens: Sequence[int], rank: int) -> str:
    """`t3, rank 0's t0 t1`."""
    own = [token for token in tokens if routing.home(token) == rank]
    said = [_names(own)] if own else []
    for other in range(routing.ranks):
        came = [token for token in tokens if routing.home(token) == other != rank]
        said += [f"rank {other}'s {_names(came)}"] if came else []
    return ", ".join(said)


def token_diagram(choices: Sequence[Sequence[int]] = CHOICES, ranks: int = 2, experts: int = 4) -> go.Figure:
    """The five moments of an expert layer, with a play button; `choices` are the experts of each token.

    ValueError where tokens or experts cannot be spread over the ranks, or a token chooses experts that there are not.
    """
    routing = Routing(choices, ranks, experts)
    rows = []
    for rank in range(ranks):
        held = [expert for expert in range(experts) if routing.place(expert) == rank]
        lanes = ["its tokens", *(f"expert e{expert}" for expert in held), "answers"]
        rows += [f"rank {rank}: {lane}" for lane in lanes]
    loads = [len(routing.sent_to(expert)) for expert in range(experts)]
    return cells_in_time(
        list(token_cells(routing)),
        rows,
        TOKEN_MOMENTS,
        _TOKEN_KINDS,
        f"An expert layer: {routing.travelling} copies of tokens leave their rank, {routing.travelling} answers return",
        f"Drawn from the rule, nothing was run: {len(choices)} tokens (t) and {experts} experts (e) on {ranks} ranks of"
        " an ep group",
        f"Tokens and experts on {ranks} ranks over five moments. The router sends "
        + "; ".join(f"token {token} to experts {', '.join(map(str, chosen))}" for token, chosen in enumerate(choices))
        + f". After the first all-to-all the experts hold {', '.join(map(str, loads))} tokens. They compute, and the"
        " second all-to-all brings each answer back to its token's rank, where the answers of a token are summed.",
    )
