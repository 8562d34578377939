"""The pictures of lessons 07 to 19: what time, memory and networks cost, and how a job is sized."""

from __future__ import annotations

from .sheet import ACTIVATIONS, COMPUTE, EXPOSED, GRADIENT, GREY, HIDDEN, MOMENTS, PALE, SHARD, WHOLE, Sheet, drawn


@drawn("07", "Unshard one unit ahead, and messages hide under computing", "a forward of three blocks")
def prefetch(sheet: Sheet) -> str:
    """The same messages without and with one unit ahead."""
    for upper, (name, starts, computes) in enumerate(
        (("when needed", (150, 370, 590), (250, 470, 690)), ("one unit ahead", (150, 250, 370), (250, 370, 490)))
    ):
        y = 105 + 210 * upper
        sheet.words(150, y, name, 22, "start", bold=True)
        sheet.words(135, y + 52, "compute", 19, "end")
        sheet.words(135, y + 118, "link", 19, "end")
        for block in range(3):
            sheet.box(computes[block], y + 25, 120, 54, f"block {block}", COMPUTE)
            exposed = not upper or block == 0
            sheet.box(starts[block], y + 91, 100, 54, f"unshard {block}", EXPOSED if exposed else HIDDEN, 17)
        end = computes[2] + 120
        sheet.line((end, y + 15), (end, y + 155), colour=GREY, dashed=True)
        sheet.words(end + 12, y + 85, "done", 19, "start", colour=GREY)
    sheet.words(870, 420, "red: exposed\nblue: hidden", 18)
    return (
        "Two timelines of three blocks. When each block is unsharded when needed, all three messages are exposed and"
        " stand between the blocks' computing. With one unit ahead only the first is exposed; the others run under the"
        " computing of the block before, and the forward is done earlier."
    )


@drawn("08", "Four instants of a message say who made the rank wait", "one message, from its issue to its delivery")
def four_instants(sheet: Sheet) -> str:
    """The instants of a message, and whose time lies between them."""
    points = ((110, "issued"), (330, "issued by\nthe last rank"), (560, "taken by\nthe link"), (850, "delivered"))
    spans = (
        ("another rank\nwas late", "#cbb5d6"),
        ("the link carried\nanother message", "#f0c27a"),
        ("bytes / bandwidth\n+ latency", HIDDEN),
    )
    for (start, _), (end, _), (what, fill) in zip(points, points[1:], spans):
        sheet.box(start, 210, end - start, 90, what, fill, 19)
    for x, name in points:
        sheet.line((x, 180), (x, 320), width=2)
        sheet.words(x, 150, name, 20)
    for x, cause in ((220, "peer"), (445, "queue"), (705, "link")):
        sheet.words(x, 335, cause, 24, bold=True)
    sheet.box(110, 385, 330, 54, "the rank still computes", COMPUTE, 19)
    sheet.box(440, 385, 410, 54, "the rank waits: exposed", EXPOSED, 19)
    sheet.words(480, 470, "only what lies after the rank needed the message costs time", 20)
    return (
        "A message's line from issued over issued by the last rank and taken by the link to delivered. The three spans"
        " are waits for a peer, for the link's queue and for the link itself. Below, the rank computes for a while and"
        " then waits: only that part is exposed."
    )


@drawn("09", "The peak is an instant: ask what was held just then", "one rank, full_shard, four blocks")
def peak_of_a_step(sheet: Sheet) -> str:
    """Memory over a step, and the peak."""
    base, top = 440, 0
    sheet.box(110, 360, 760, 80, "shards and moments, all the time", SHARD, 19)
    for block in range(4):
        height = 34 * (block + 1)
        sheet.box(110 + 80 * block, 360 - height, 80, height, "", ACTIVATIONS)
        sheet.box(115 + 80 * block, 360 - height - 46, 70, 42, "block", WHOLE, 16)
    for block in range(4):
        activations, gradients = 34 * (4 - block), 16 * (block + 1)
        x = 450 + 105 * block
        sheet.box(x, 360 - gradients, 105, gradients, "", GRADIENT)
        sheet.box(x, 360 - gradients - activations, 105, activations, "", ACTIVATIONS)
        sheet.box(x + 17, 360 - gradients - activations - 46, 70, 42, "block", WHOLE, 16)
        top = max(top, gradients + activations + 46)
    sheet.line((110, 360 - top - 6), (870, 360 - top - 6), colour=EXPOSED, dashed=True)
    sheet.words(870, 360 - top - 26, "peak", 20, "end", colour=EXPOSED, bold=True)
    sheet.words(270, base + 28, "forward: activations pile up", 19)
    sheet.words(660, base + 28, "backward: they go, gradients come", 19)
    sheet.words(240, 110, "pink: activations; brown: gradients; blue: an unsharded block", 18, "start", colour=GREY)
    return (
        "Memory of a rank over a step. Shards and moments stay. In forward activations grow block by block, in backward"
        " they shrink while sharded gradients grow, and one unsharded block stands on top. The peak is at the beginning"
        " of the backward."
    )


@drawn("10", "Messages do not grow with the batch, computing does", "one block, both axes linear")
def crossover(sheet: Sheet) -> str:
    """Time of a block's messages and of its computing over the tokens of a rank."""
    sheet.arrow((130, 430), (880, 430), GREY)
    sheet.arrow((130, 430), (130, 90), GREY)
    sheet.words(870, 462, "tokens a rank", 20, "end")
    sheet.words(145, 100, "time of a block", 20, "start")
    sheet.line((130, 270), (860, 270), colour=SHARD, width=5)
    sheet.line((130, 430), (820, 110), colour=GREY, width=5)
    sheet.words(850, 245, "messages", 21, "end", colour=SHARD)
    sheet.words(690, 130, "computing", 21, "end")
    sheet.circle(475, 270, 9, fill=EXPOSED)
    sheet.line((475, 275), (475, 430), colour=EXPOSED, dashed=True)
    sheet.words(475, 462, "crossover", 21, colour=EXPOSED, bold=True)
    sheet.words(300, 235, "exposed", 22, colour=EXPOSED)
    sheet.words(690, 335, "everything hides", 22)
    return (
        "A flat line, the time of a block's messages, and a rising line, the time of its computing, over the tokens of"
        " a rank. They meet at the crossover. With fewer tokens a part of the messages is exposed; with more all hide."
    )


@drawn("11", "First the card, then the link, then the schedule", "the questions of this lesson")
def choice(sheet: Sheet) -> str:
    """The order of questions that leads to a strategy."""
    steps = (
        ("Does it fit\nthe card?", "shard more:\nzero1, zero2,\nfull_shard"),
        ("Who sends\nleast of what\nfits?", "2 or 3 times\nP (n - 1)/n"),
        ("Is what is\nsent hidden?", "unshard ahead,\nor a larger\nbatch"),
    )
    for number, (question, otherwise) in enumerate(steps):
        x = 70 + 300 * number
        sheet.box(x, 110, 220, 130, question, PALE, 23)
        sheet.arrow((x + 110, 244), (x + 110, 318), GREY)
        sheet.box(x + 10, 322, 200, 110, otherwise, (SHARD, HIDDEN, "#f0c27a")[number], 19)
        if number < 2:
            sheet.arrow((x + 224, 175), (x + 296, 175))
    for number, measure in enumerate(("peak memory", "time on the link", "exposed time")):
        sheet.words(180 + 300 * number, 465, measure, 21, bold=True)
    return (
        "Three questions in a row: does it fit the card, judged by peak memory, else shard more; who of those that fit"
        " sends least, judged by time on the link; is what is sent hidden, judged by exposed time, else unshard ahead"
        " or take a larger batch."
    )


@drawn("12", "Shard inside a node, replicate across nodes", "2 nodes of 4 ranks, s = 4")
def mesh_of_nodes(sheet: Sheet) -> str:
    """Shard groups in rows on the fast link, replicas in columns across nodes."""
    for node in range(2):
        y = 110 + 195 * node
        sheet.box(130, y, 700, 130, "", PALE)
        sheet.words(115, y + 65, f"node {node}", 21, "end")
        for part in range(4):
            x = 160 + 165 * part
            sheet.box(x, y + 25, 130, 80, f"rank {4 * node + part}\npart {part}", SHARD, 19)
            if part < 3:
                sheet.arrow((x + 133, y + 65), (x + 162, y + 65), GREY, 4)
    for part in range(4):
        x = 225 + 165 * part
        sheet.arrow((x, 218), (x, 328), EXPOSED, 4)
        sheet.arrow((x, 328), (x, 218), EXPOSED, 4)
    sheet.words(480, 455, "rows: all-gather and reduce-scatter on the fast link", 20)
    sheet.words(480, 482, "columns: all-reduce of 1/4 of the gradients on the slow one", 20, colour=EXPOSED)
    return (
        "Two nodes of four ranks. In each node the four ranks hold parts 0 to 3 and exchange them on the fast link."
        " Ranks with the same part in both nodes reduce their gradients over the slow link, a quarter of all each."
    )


@drawn("13", "Memory is bought with digits, with work, or with transfers", "one rank under full_shard")
def three_prices(sheet: Sheet) -> str:
    """Three ways to buy memory, what each touches, and its price."""
    columns = (
        ("as it is", 1, 1, 1, ""),
        ("bf16", 1, 1, 0.5, "digits"),
        ("checkpointing", 1, 1, 0.15, "a second forward"),
        ("offload", 0, 0, 1, "the bus, each step"),
    )
    for column, (name, moments, shards, activations, price) in enumerate(columns):
        x = 75 + 220 * column
        y = 420.0
        for what, height, fill in (
            ("moments", 90 * moments, MOMENTS),
            ("shards", 80 * shards, SHARD),
            ("activations", 130 * activations, ACTIVATIONS),
        ):
            if height:
                y -= height
                sheet.box(x, y, 150, height, what if height > 20 else "", fill, 18)
        if name == "offload":
            sheet.box(x, 90, 150, 72, "host memory:\nshards and\nmoments", fill="#ffffff", size=17)
            sheet.arrow((x + 50, 166), (x + 50, 286), GREY, 4)
            sheet.arrow((x + 100, 286), (x + 100, 166), GREY, 4)
        sheet.words(x + 75, 445, name, 21, bold=True)
        sheet.words(x + 75, 476, price, 18, colour=EXPOSED)
    return (
        "Four bars of memory. As it is: moments, shards and activations. bf16 halves the activations for digits."
        " Checkpointing leaves a little of them for a second forward. Offload moves shards and moments to host memory"
        " for transfers over the bus in each step."
    )


@drawn("14", "A symptom is not a cause: look for the evidence", "five of the faults of this lesson")
def evidence(sheet: Sheet) -> str:
    """What one sees, where one looks, and what it was."""
    rows = (
        ("nothing moves", "ranks stand in different calls", "a collective too few", EXPOSED),
        ("every rank is slow", "the same rank enters last", "a straggler", "#f0c27a"),
        ("the loss differs a little", "first gradients: one factor", "a wrong divisor", GRADIENT),
        ("the loss is NaN", "the first value that is not finite", "its unit, its step", ACTIVATIONS),
        ("out of memory", "too many units whole at once", "no reshard", WHOLE),
    )
    for x, name in ((165, "what you see"), (475, "where you look"), (795, "what it was")):
        sheet.words(x, 92, name, 21, bold=True)
    for row, (seen, looked, cause, fill) in enumerate(rows):
        y = 118 + 72 * row
        sheet.box(40, y, 250, 56, seen, PALE, 18)
        sheet.arrow((293, y + 28), (328, y + 28), GREY)
        sheet.box(332, y, 300, 56, looked, PALE, 17)
        sheet.arrow((635, y + 28), (670, y + 28), GREY)
        sheet.box(674, y, 245, 56, cause, fill, 18)
    return (
        "Five rows from symptom over evidence to cause. Nothing moves: ranks stand in different calls, a collective is"
        " missing. Every rank is slow: one enters last. The loss differs: first gradients have a constant factor. The"
        " loss is NaN: the first value that is not finite. Out of memory: too many units are whole at once."
    )


@drawn("18", "A statement about FSDP is true of something", "the four questions of this lesson")
def statement(sheet: Sheet) -> str:
    """The four questions that a statement must answer before it is true or false."""
    sheet.box(250, 95, 460, 66, "FSDP sends half as much again as DDP", "#f0c27a", 22)
    questions = (
        ("which bytes?", "two all-gathers and\na reduce-scatter"),
        ("which dtype?", "bf16 all-gathers,\nfp32 reductions:\nas many as DDP"),
        ("how many ranks?", "(n - 1)/n in both:\ncancels"),
        ("beside what?", "DDP in fp32\nor in bf16"),
    )
    for number, (asked, answer) in enumerate(questions):
        x = 40 + 225 * number
        sheet.arrow((480, 165), (x + 102, 226), GREY)
        sheet.box(x, 230, 205, 58, asked, PALE, 21)
        sheet.box(x, 300, 205, 104, answer, HIDDEN if number == 1 else "#ffffff", 18)
    sheet.words(480, 450, "3/2 in one dtype, 1 with bf16 all-gathers beside DDP in fp32", 21)
    return (
        "The statement that FSDP sends half as much again as DDP, with four questions below it: which bytes, which"
        " dtype, how many ranks, and beside what. The factor is 3/2 where both have one dtype, and 1 with bf16"
        " all-gathers beside DDP in fp32."
    )


@drawn("15", "A checkpoint holds rows, so any number of ranks can read it", "six rows, saved at 2, read at 3")
def other_ranks(sheet: Sheet) -> str:
    """Shards saved by two ranks, read by three."""
    columns = (
        (150, 2, "rank", "saved by 2 ranks"),
        (445, 2, "file", "one file a rank,\nand a list of rows"),
        (740, 3, "rank", "read by 3 ranks"),
    )
    for x, parts, what, title in columns:
        sheet.words(x + 50, 100, title, 20, bold=True)
        for part in range(parts):
            rows = 6 // parts
            for row in range(rows):
                number = part * rows + row
                y = 140 + 50 * number + 14 * part
                sheet.box(x, y, 100, 44, f"row {number}", SHARD if what == "rank" else HIDDEN, 17)
            middle = 140 + 50 * (part * rows + (rows - 1) / 2) + 14 * part + 22
            sheet.words(x - 14, middle, f"{what} {part}", 18, "end")
    for start, end in ((258, 375), (553, 650)):
        sheet.arrow((start, 300), (end, 300), GREY, 4)
    sheet.words(480, 492, "each reader asks the list where its rows are; no rank holds the whole model", 18)
    return (
        "Two ranks with three rows each write a file each and a list of which rows are where. Three ranks read two rows"
        " each from these files. No rank ever holds the whole model."
    )


@drawn("17", "The same choices, in other words", "PyTorch's FSDP2 and FSDP1, DeepSpeed", "As the libraries name them")
def dialects(sheet: Sheet) -> str:
    """The same four choices in three libraries."""
    columns = ("FSDP2", "FSDP1", "DeepSpeed 3")
    rows = (
        ("a unit", "fully_shard(block)", "auto_wrap_policy", "a parameter"),
        ("unshard\nahead", "set_modules_to_\nforward_prefetch", "forward_prefetch", "prefetch_bucket_size"),
        ("reshard\nor keep", "reshard_after_\nforward", "FULL_SHARD or\nSHARD_GRAD_OP", "stage 3 or 2"),
        ("bf16", "MixedPrecision-\nPolicy", "MixedPrecision", "bf16.enabled"),
    )
    for column, name in enumerate(columns):
        sheet.words(300 + 245 * column, 92, name, 22, bold=True)
    for row, (choice, *names) in enumerate(rows):
        y = 118 + 90 * row
        sheet.words(160, y + 36, choice, 20, "end")
        for column, name in enumerate(names):
            sheet.box(185 + 245 * column, y, 232, 74, name, (WHOLE, "#a9dcc6", "#f0c27a")[column], 19)
    return (
        "A grid of four choices in three libraries. A unit is fully_shard(block), auto_wrap_policy, and in DeepSpeed a"
        " parameter. Unsharding ahead is set_modules_to_forward_prefetch, forward_prefetch, a prefetch bucket size."
        " Resharding is reshard_after_forward, FULL_SHARD or SHARD_GRAD_OP, stage 3 or 2. bf16 has a policy each."
    )


@drawn("16", "Each axis of the mesh exchanges something else", "8 ranks as 4 (dp) x 2 (tp)")
def axes_of_a_mesh(sheet: Sheet) -> str:
    """A mesh of data and tensor ranks, and what each axis exchanges."""
    for dp in range(4):
        for tp in range(2):
            x, y = 150 + 130 * dp, 130 + 150 * tp
            sheet.box(x, y, 100, 92, f"rank {2 * dp + tp}", WHOLE if tp else "#a9dcc6", 19)
            if dp < 3:
                sheet.arrow((x + 102, y + 46), (x + 128, y + 46), SHARD, 4)
        sheet.arrow((200 + 130 * dp, 224), (200 + 130 * dp, 278), EXPOSED, 4)
        sheet.arrow((200 + 130 * dp, 278), (200 + 130 * dp, 224), EXPOSED, 4)
    sheet.words(120, 176, "tp 0", 20, "end")
    sheet.words(120, 326, "tp 1", 20, "end")
    for dp in range(4):
        sheet.words(200 + 130 * dp, 108, f"dp {dp}", 19)
    sheet.words(
        690, 150, "along dp: parameters\nand gradients, early:\nhidden under computing", 19, "start", colour=SHARD
    )
    sheet.words(690, 300, "along tp: activations,\ninside every layer:\nthe layer waits", 19, "start", colour=EXPOSED)
    sheet.words(400, 420, "so tp belongs on the fastest link, dp bears a slower one", 21)
    sheet.words(400, 460, "cut a layer by tp first, then shard each part by dp", 21)
    return (
        "Eight ranks in four columns dp and two rows tp. Along dp parameters and gradients travel and hide under"
        " computing. Along tp activations travel inside every layer, which waits for them. So tp belongs on the fastest"
        " link."
    )


@drawn("19", "Size a job in order: memory, exposed time, money", "the order of this lesson")
def sizing_a_job(sheet: Sheet) -> str:
    """From a model and a budget to cards, days and a bill."""
    steps = (
        ("model, tokens,\ncards to choose from", PALE),
        ("fits: state / n +\nactivations < card", ACTIVATIONS),
        ("hides: tokens a rank\nabove the crossover", HIDDEN),
        ("days = tokens /\n(cards x tokens a s)", "#f0c27a"),
        ("bill = cards x\nhours x price", "#a9dcc6"),
    )
    for number, (what, fill) in enumerate(steps):
        x, y = 30 + 166 * number, 92 + 78 * number
        sheet.box(x, y, 232, 62, what, fill, 18)
        if number < 4:
            sheet.line((x + 233, y + 31), (x + 290, y + 31))
            sheet.arrow((x + 290, y + 31), (x + 290, y + 76))
    sheet.words(250, 400, "more cards: fewer days, the same bill,\nuntil messages show", 21)
    return (
        "A staircase of five boxes: the model and the cards; whether state and activations fit a card; whether the"
        " tokens of a rank hide the messages; days from tokens a second; the bill from card hours. More cards give"
        " fewer days at the same bill until messages are exposed."
    )
