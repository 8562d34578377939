"""The pictures of lessons 00 to 06 and 21: who holds what, when, and who sends it."""

from __future__ import annotations

import math

from .sheet import COMPUTE, EXPOSED, GRADIENT, GRADIENTS, GREY, HIDDEN, MOMENTS, PALE, SHARD, WHOLE, Sheet, drawn


@drawn("00", "DDP keeps everything twice; full sharding keeps half on each rank", "two ranks")
def two_ways(sheet: Sheet) -> str:
    """What two ranks hold under DDP and under full sharding."""
    for column, (name, parts) in enumerate((("DDP (no_shard)", 1), ("full sharding (full_shard)", 2))):
        left = 60 + 450 * column
        sheet.words(left + 195, 92, name, 23, bold=True)
        for rank in range(2):
            x, height = left + 205 * rank, 240 / parts
            sheet.box(x, 140, 185, 330, fill="#ffffff")
            sheet.words(x + 92, 122, f"rank {rank}")
            for number, (what, fill) in enumerate(
                ((("parameters", SHARD)), ("gradients", GRADIENTS), ("moments", MOMENTS))
            ):
                share = height / 4 * (2 if what == "moments" else 1)
                y = 465 - height + height / 4 * number
                sheet.box(x + 6, y, 173, share, what if parts == 1 else f"{what}, 1/2", fill, 17)
            if parts == 2:
                sheet.box(x + 6, 285, 173, 52, "one block,\nwhile it computes", WHOLE, 16)
    return (
        "Two ranks under DDP each hold all parameters, gradients and moments. Under full sharding each rank holds half"
        " of the three, and one block's unsharded parameters while it computes with them."
    )


@drawn("01", "In a ring each rank passes on the block that it received last", "4 ranks, n - 1 = 3 steps")
def ring(sheet: Sheet) -> str:
    """The ranks of a ring, and the block that each passes on."""
    colours = ("#6cc4f0", "#f09a1a", "#7fd0b2", "#cc7fa8")
    middle = (300, 278)
    places = [
        (middle[0] + 160 * math.cos(a), middle[1] + 160 * math.sin(a)) for a in (-math.pi / 2, 0, math.pi / 2, math.pi)
    ]
    for rank, (x, y) in enumerate(places):
        onwards = places[(rank + 1) % 4]
        length = math.dist((x, y), onwards)
        across, down = (onwards[0] - x) / length, (onwards[1] - y) / length
        start, end = (x + 58 * across, y + 58 * down), (onwards[0] - 60 * across, onwards[1] - 60 * down)
        sheet.arrow(start, end, GREY, 5)
        at = ((x + onwards[0]) / 2, (y + onwards[1]) / 2)
        sheet.box(at[0] - 24, at[1] - 17, 48, 34, f"{rank}", colours[rank], 20)
        sheet.circle(x, y, 48, f"rank {rank}", PALE, 21)
    sheet.words(300, 278, "step 0", 22, colour=GREY)
    sheet.words(735, 108, "blocks that a rank has", 21, bold=True)
    for rank in range(4):
        sheet.words(560, 180 + 70 * rank, f"rank {rank}", 19)
        for step in range(4):
            block = (rank - step) % 4
            sheet.box(605 + 82 * step, 157 + 70 * rank, 72, 46, str(block), colours[block], 20)
    for step, name in enumerate(("own", "step 0", "step 1", "step 2")):
        sheet.words(641 + 82 * step, 137, name, 17, colour=GREY)
    return (
        "Four ranks in a circle, each with an arrow to the next. In step 0 every rank sends its own block; after three"
        " steps each has all four blocks, and has sent three of them: P (n - 1)/n bytes."
    )


@drawn(
    "02",
    "A parameter costs 16 bytes; each strategy cuts more of them",
    "fp32 and Adam, n ranks; full boxes are whole, narrow ones are 1/n",
    "Computed",
)
def bytes_a_parameter(sheet: Sheet) -> str:
    """The sixteen bytes of a parameter, and which strategy cuts which."""
    names = (("no_shard", 0), ("zero1", 1), ("zero2", 2), ("full_shard", 3))
    kinds = (("moments", 8, MOMENTS, 1), ("gradient", 4, GRADIENTS, 2), ("parameter", 4, SHARD, 3))
    for row, (name, cut) in enumerate(names):
        y = 115 + 95 * row
        sheet.words(190, y + 30, name, 22, "end")
        x = 215.0
        for what, count, fill, by in reversed(kinds):
            width = count * 36 * (0.25 if cut >= by else 1)
            sheet.box(x, y, width, 60, f"{what}\n{count} bytes" if cut < by else "", fill, 17)
            x += width + 4
        left = [f"{count}" if cut < by else f"{count}/n" for _, count, _, by in reversed(kinds)]
        sheet.words(x + 12, y + 30, " + ".join(left), 20, "start")
    return (
        "Four rows. no_shard keeps 4 bytes of parameter, 4 of gradient and 8 of moments. zero1 cuts the moments to 1/n,"
        " zero2 the gradient too, full_shard all three, so that 16/n bytes are left."
    )


@drawn("03", "Backward fills buckets; a full one leaves while backward goes on", "time runs to the right")
def buckets(sheet: Sheet) -> str:
    """Gradients are collected in buckets, and sent while backward goes on."""
    sheet.words(130, 150, "backward", 20, "end")
    sheet.words(130, 270, "buckets", 20, "end")
    sheet.words(130, 390, "link", 20, "end")
    for number in range(6):
        layer, x = 5 - number, 150 + 104 * number
        sheet.box(x, 120, 98, 60, f"layer {layer}", COMPUTE)
        sheet.arrow((x + 88, 182), (x + 88, 236), GREY)
        sheet.box(x + 58, 242, 60, 56, f"g{layer}", GRADIENTS)
    for number in range(3):
        x = 362 + 208 * number
        sheet.box(x - 160, 232, 172, 76, dashed=True)
        sheet.arrow((x, 310), (x + 6, 356), GREY)
        sheet.box(x + 6, 360, 150, 60, "all_reduce", EXPOSED if number == 2 else HIDDEN, 18)
    sheet.words(480, 462, "two messages are hidden under backward, the last one is exposed", 20)
    return (
        "Six layers run backward one after the other. Two gradients fill a bucket, and an all-reduce of the bucket runs"
        " while the next layers compute. Only the last bucket's all-reduce has nothing left to hide under."
    )


@drawn("04", "Each rank updates its rows only: reduce-scatter, step, all-gather", "ZeRO-2 on 4 ranks")
def zero_stages(sheet: Sheet) -> str:
    """Rows of one tensor over four ranks, and the two collectives of a step."""
    stages = (
        "gradient\nafter backward",
        "reduce-scatter:\nmean of its rows",
        "optimizer steps\non its rows",
        "all-gather:\nevery row again",
    )
    for column, what in enumerate(stages):
        sheet.words(185 + 215 * column, 105, what, 18)
    for rank in range(4):
        y = 150 + 84 * rank
        sheet.words(62, y + 32, f"rank {rank}", 19)
        for column in range(4):
            x = 110 + 215 * column
            for part in range(4):
                own, fill = part == rank, (GRADIENTS, GRADIENT, MOMENTS, WHOLE)[column]
                there = own or column in (0, 3)
                sheet.box(x + 37 * part, y, 34, 64, str(part) if there else "", fill, 18, dashed=not there)
            if column < 3:
                sheet.arrow((x + 155, y + 32), (x + 205, y + 32), GREY)
    return (
        "Four ranks with the four row parts of one tensor. After backward each has a gradient of all rows. A"
        " reduce-scatter leaves each the mean of its own part, the optimizer updates that part, and an all-gather"
        " brings all updated parts to every rank."
    )


@drawn("05", "A unit is whole only while it computes", "rank 1 of 4, one training step")
def life_of_a_unit(sheet: Sheet) -> str:
    """The life of a unit on one rank."""
    moments = ("at rest", "unshard", "forward", "reshard", "unshard", "backward", "reduce", "reshard")
    for column, what in enumerate(moments):
        x = 40 + 112 * column
        whole, gradient = column in (1, 2, 4, 5), column == 5
        sheet.words(x + 50, 98, what, 19, bold=what in ("unshard", "reshard"))
        for part in range(4):
            own = part == 1
            y = 125 + 48 * part
            there, fill = own or whole, SHARD if own else WHOLE
            sheet.box(x + 4, y, 92, 42, f"part {part}" if there else "", fill, 16, dashed=not there)
        for part in range(4):
            y = 350 + 26 * part
            if gradient or (column >= 6 and part == 1):
                sheet.box(x + 4, y, 92, 23, "", GRADIENTS if gradient else GRADIENT)
    sheet.words(590, 400, "gradient:", 18, "end", colour=GREY)
    for middle, collective in ((202, "all-gather"), (538, "all-gather"), (762, "reduce-scatter")):
        sheet.words(middle, 342 if collective == "all-gather" else 475, collective, 18, colour=GREY)
    return (
        "Eight moments of a unit on rank 1 of 4. At rest only part 1 is there. Unshard brings the other three by an"
        " all-gather, forward computes, reshard frees them. Before backward they come again; backward leaves a whole"
        " gradient, of which a reduce-scatter keeps part 1 of the mean."
    )


@drawn("06", "Unit after unit becomes whole; the root stays whole", "three blocks and the root, without prefetch")
def units_in_turn(sheet: Sheet) -> str:
    """Which units are whole, moment by moment, in a forward and a backward."""
    rows = ("root", "block 0", "block 1", "block 2")
    order = ("block 0", "block 1", "block 2", "head", "block 2", "block 1", "block 0")
    for row, name in enumerate(rows):
        y = 150 + 76 * row
        sheet.words(150, y + 27, name, 20, "end")
        for column, computing in enumerate(order):
            x = 170 + 108 * column
            whole = name in ("root", computing)
            sheet.box(x, y, 102, 54, "whole" if whole else "1/n", WHOLE if whole else SHARD, 18)
    for column, computing in enumerate(order):
        sheet.words(221 + 108 * column, 128, computing, 18)
    sheet.words(332, 100, "forward", 20, bold=True)
    sheet.words(765, 100, "backward", 20, bold=True)
    sheet.words(480, 474, "at any moment a rank holds 1/n of all, the root, and one block", 20)
    return (
        "A grid of units and moments. In forward blocks 0, 1 and 2 are whole one after the other, in backward 2, 1 and"
        " 0. The root unit is whole from the beginning to the end of its part; all others are sharded to 1/n meanwhile."
    )


@drawn("20", "A parameter has two forms: a shard at rest, whole at work", "one parameter on one rank, through a step")
def two_forms(sheet: Sheet) -> str:
    """One parameter's two forms through a step, and who sees which."""
    moments = ("at rest", "forward", "between", "backward", "at rest", "update")
    for column, moment in enumerate(moments):
        x, whole = 40 + 150 * column, moment in ("forward", "backward")
        sheet.words(x + 65, 128, moment, 20, bold=True)
        sheet.box(x, 160, 130, 70, "whole" if whole else "1/n", WHOLE if whole else SHARD, 22)
        if column < 4:
            message = ("all-gather", "reshard", "all-gather", "reduce-scatter")[column]
            sheet.words(x + 140, 264 + 34 * (column % 2), message, 18)
    sheet.words(480, 370, "whole: a plain tensor, which autograd keeps for backward", 21)
    sheet.words(480, 412, "1/n: a DTensor, which optimizer, clipping and checkpoint see", 21)
    sheet.words(480, 454, "four hooks change one for the other, one message for each unit", 21)
    return (
        "Six moments of a parameter from left to right: at rest a shard of 1/n, whole in forward, a shard in between,"
        " whole in backward, then a shard again, which the optimizer updates. Between them stand all-gather, reshard,"
        " all-gather and reduce-scatter. Autograd sees the whole tensor, the optimizer the shard."
    )


@drawn("21", "Muon needs a whole matrix: each matrix gets one owner", "3 ranks, 3 matrices")
def owners(sheet: Sheet) -> str:
    """Matrices move to an owner, are orthogonalised there, and come back as rows."""
    columns = (
        "rows of every\nmomentum",
        "all-to-all:\none matrix each",
        "orthogonalised\nby its owner",
        "all-to-all back:\nrows of the update",
    )
    colours = ("#6cc4f0", "#f09a1a", "#7fd0b2")
    for column, what in enumerate(columns):
        sheet.words(190 + 220 * column, 108, what, 18)
    for rank in range(3):
        y = 160 + 108 * rank
        sheet.words(62, y + 42, f"rank {rank}", 19)
        for column in range(4):
            x = 115 + 220 * column
            for matrix in range(3):
                for part in range(3):
                    there = part == rank if column in (0, 3) else matrix == rank
                    at, name = (x + 50 * matrix, y + 28 * part), "ABC"[matrix] if there else ""
                    sheet.box(*at, 46, 25, name, colours[matrix], 15, dashed=not there)
            if column < 3:
                sheet.arrow((x + 156, y + 42), (x + 208, y + 42), GREY)
    return (
        "Three ranks hold a third of the rows of the matrices A, B and C. An all-to-all brings all rows of A to rank 0,"
        " of B to rank 1 and of C to rank 2. Each orthogonalises its matrix, and an all-to-all back gives every rank"
        " its rows of all updates."
    )
