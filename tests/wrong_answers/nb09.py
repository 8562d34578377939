"""Wrong answers to the exercises of notebook 09, written from their statements alone."""


def holding__a_condition_that_is_always_true(life, at):
    state = {row["unit"]: row["state"] for row in life if row["time_ns"] <= at}
    return [unit for unit, now in state.items() if now == "unsharded" or "unsharding"]  # noqa: SIM222


def holding__a_unit_for_each_row(life, at):
    held = []
    for row in life:
        if row["time_ns"] <= at:
            held = [unit for unit in held if row["state"] != "sharded" or unit != row["unit"]]
            held += [row["unit"]] if row["state"] != "sharded" else []
    return held


def holding__without_the_root(life, at):
    state = {row["unit"]: row["state"] for row in life if row["time_ns"] <= at}
    return [unit for unit, now in state.items() if now != "sharded" and unit != "root"]


def holding__the_rows_themselves(life, at):
    newest = {row["unit"]: row for row in life if row["time_ns"] <= at}
    return [row for row in newest.values() if row["state"] != "sharded"]


def holding__units_that_were_resharded(life, at):
    state = {row["unit"]: row["state"] for row in life if row["time_ns"] <= at}
    return state
