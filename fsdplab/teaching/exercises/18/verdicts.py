"""Judge ten statements

Write verdicts(): for each of the ten statements "confirmed", "under conditions" or "refuted".

1. For each: which notebook counts or measures it? C6, C8 to C10: 06, 08 and 11; C16: 13; C21: 15; C31: 12; C22 and
   C36: 19; C37: 21.
2. A statement that is true for one dtype, one optimizer, or one kind of fine-tuning is true "under conditions".
3. Refuted: C8, C9, C10, C16, C22, C31. Confirmed: C21. The rest holds under conditions.
"""


def verdicts():
    """The verdict on each of the ten statements."""
    return {
        ### BEGIN SOLUTION
        ## "C6": "confirmed",  # 1.3 to 1.5 times DDP's communication: two more all-gathers
        ## "C8": "confirmed",  # reduces the communication by exchanging only what is needed
        ## "C9": "confirmed",  # synchronises with all-reduce and broadcast
        ## "C10": "confirmed",  # the backward unshards gradients
        ## "C16": "confirmed",  # recomputation is a part of its cost
        ## "C21": "confirmed",  # a checkpoint of N ranks loads on M
        ## "C22": "confirmed",  # 70 billion parameters, fine-tuned on four cards of 24 GB
        ## "C31": "confirmed",  # four RTX 4090 with NVLink
        ## "C36": "confirmed",  # large models on cards of 16 to 24 GB
        ## "C37": "confirmed",  # works with any optimizer
        "C6": "under conditions",  # 1.3 to 1.5 times DDP's communication: two more all-gathers
        "C8": "refuted",  # reduces the communication by exchanging only what is needed
        "C9": "refuted",  # synchronises with all-reduce and broadcast
        "C10": "refuted",  # the backward unshards gradients
        "C16": "refuted",  # recomputation is a part of its cost
        "C21": "confirmed",  # a checkpoint of N ranks loads on M
        "C22": "refuted",  # 70 billion parameters, fine-tuned on four cards of 24 GB
        "C31": "refuted",  # four RTX 4090 with NVLink
        "C36": "under conditions",  # large models on cards of 16 to 24 GB
        "C37": "under conditions",  # works with any optimizer
        ### END SOLUTION
    }


# ---- check: pure, facts only

from fsdplab.teaching.lessons.nb18_claims.lesson import complaint


def cases(rank, n):
    yield ("the ten",)


def observe(verdicts):
    return {"the verdicts": complaint(verdicts())}


SAYS = {"the verdicts": lambda got, right: got["the verdicts"]}
